"""The scheduler as a process, with a worker process beside it: start, answers, signals, exit codes.

It runs where torch and transformers cannot be imported: every scheduler here is started with both blocked.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service.small_tokenizers import byte_level, definition, save
from support.patience import PATIENCE_SECONDS
from support.toy import expected
from support.world import ENVIRONMENT

from lineclear.errors import LineclearError
from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.status import TRAILER, from_trailer
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc
from lineclear.wire.types import Sampling

VOCABULARY, EOS = 512, 0
BOUND_SECONDS = PATIENCE_SECONDS

WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "triton", "numpy"):
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, Blocked())
"""
RUN = WITHOUT_TORCH + "from lineclear.scheduler.main import main\nsys.exit(main(sys.argv[1:]))"
TOKENIZER = Tokenizer(definition(byte_level()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), byte_level())


class Process:
    """A scheduler and all it says."""

    def __init__(self, flags: list[str], code: str = RUN, **toy: Any) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LINECLEAR_")}
        environment |= {
            "PYTHONPATH": ENVIRONMENT["PYTHONPATH"],
            "TOY_OPTIONS": json.dumps({"vocab_size": VOCABULARY, **toy}),
        }
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code, *flags], env=environment, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self.lines: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            try:
                parsed = json.loads(line)
            except ValueError:
                parsed = None
            with self._said:
                if isinstance(parsed, dict):
                    self.lines.append(parsed)
                else:
                    self.other.append(line.decode())
                self._said.notify_all()

    def wait_for(self, event: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        """The count-th log line of that event."""

        def found() -> list[dict[str, Any]]:
            return [e for e in self.lines if e.get("event") == event and fields.items() <= e.items()]

        with self._said:
            assert self._said.wait_for(lambda: len(found()) >= count, BOUND_SECONDS), (event, self.lines, self.other)
            return found()[count - 1]

    def exit_code(self, seconds: float = BOUND_SECONDS) -> int:
        code = self.popen.wait(seconds)
        self._reader.join(BOUND_SECONDS)
        return code

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        self._reader.join(BOUND_SECONDS)
        assert self.popen.stderr is not None
        self.popen.stderr.close()


class Running(Process):
    """A scheduler that listens and has a worker, and a client."""

    def __init__(self, model: Path, *flags: str, code: str = RUN, demo: bool = False, **toy: Any) -> None:
        worker = ["--worker-command", sys.executable, "--worker-command=-m", "--worker-command", "service.toy_worker"]
        which = ["--demo"] if demo else ["--model", str(model)]
        common = ["--listen", "127.0.0.1:0", "--log-format", "json"]
        super().__init__([*which, *common, "--spawn-worker", *worker, *flags], code, **toy)
        try:
            self.address = self.wait_for("listening")["address"]
            self.wait_for("worker_joined")
        except BaseException:
            self.end()
            raise
        self.channel = grpc.insecure_channel(self.address)
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        until(lambda: self.health.Check(health_pb2.HealthCheckRequest()).status == 1)

    def end(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
        super().end()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + BOUND_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(*flags: str, **options: Any) -> Running:
        running = Running(model, *flags, **options)
        started.append(running)
        return running

    yield begin
    for running in started:
        running.end()


def endless(seed: int = 1) -> pb.GenerateRequest:
    """Goes on until the context is full; no token ends it."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5]), sampling={"seed": seed, "max_tokens": 500, "ignore_eos": True}
    )


def error_of(call: Any) -> LineclearError:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error: Any = caught.value
    return from_trailer(error.code().name, error.details(), dict(error.trailing_metadata()).get(TRAILER))


# --- answers ---------------------------------------------------------------------------------------------------------


def test_answers_are_exact_and_figures_add_up(start: Callable[..., Running]) -> None:
    server = start("--max-batch-size", "4")
    prompt = TOKENIZER.encode("The quick brown fox")
    calls = [
        server.stub.Generate(pb.GenerateRequest(text="The quick brown fox", sampling={"seed": n, "max_tokens": 20}))
        for n in range(6)
    ]
    total = 0
    for seed, call in enumerate(calls):
        responses = list(call)
        tokens = [t for r in responses for t in r.token_ids]
        assert tokens == expected(prompt, Sampling(seed=seed, stop_ids=(EOS,)), 20, VOCABULARY)
        assert "".join(r.text for r in responses) == decode(TOKENIZER, tokens, keep_special=False)
        assert responses[-1].finished.usage.completion_tokens == len(tokens)
        total += len(tokens)
    stats = server.stub.GetStats(pb.GetStatsRequest())
    until(lambda: server.stub.GetStats(pb.GetStatsRequest()).totals.requests_finished == 6)
    stats = server.stub.GetStats(pb.GetStatsRequest())
    assert stats.totals.output_tokens == total
    assert stats.totals.prompt_tokens == 6 * len(prompt)
    assert (stats.gauges.requests_running, stats.gauges.requests_waiting, stats.gauges.blocks_used) == (0, 0, 0)
    assert stats.step_seconds.count > 0
    model = server.stub.GetModel(pb.GetModelRequest())
    assert (model.limits.max_batch_size, model.vocab_size) == (4, VOCABULARY)


def test_prometheus_finds_what_was_done_and_finds_it_while_the_server_leaves(start: Callable[..., Running]) -> None:
    server = start(
        "--metrics-listen", "127.0.0.1:0", "--drain-timeout-seconds", "60", min_step_seconds=0.02, max_step_seconds=0.02
    )
    address = server.wait_for("metrics")["address"]

    def figures() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=BOUND_SECONDS) as page:
            lines = (line.split() for line in page.read().decode().splitlines() if not line.startswith("#"))
            return {name: float(value) for name, value in lines}

    list(server.stub.Generate(pb.GenerateRequest(text="The quick", sampling={"seed": 1, "max_tokens": 3})))
    found = figures()
    assert found["lineclear_requests_finished_total"] == found["lineclear_total_seconds_count"] == 1
    assert found["lineclear_worker_joined"] == 1
    call = server.stub.Generate(endless())
    next(call)
    server.popen.send_signal(signal.SIGTERM)
    until(lambda: figures()["lineclear_draining"])
    call.cancel()
    assert server.exit_code() == 0


def test_the_demonstration_model_is_found(start: Callable[..., Running]) -> None:
    server = start(demo=True, vocab_size=4096)
    assert server.stub.GetModel(pb.GetModelRequest()).model_id == "lineclear-demo"
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hello")])
    assert len(list(server.stub.Generate(pb.GenerateRequest(chat=chat, sampling={"max_tokens": 3})))) >= 1


def test_a_stop_string_through_all_processes(start: Callable[..., Running]) -> None:
    server = start()
    sampling = Sampling(seed=3, stop_ids=(EOS,))
    text = decode(TOKENIZER, expected([5], sampling, 40, VOCABULARY), keep_special=False)
    stop = text[10:13]
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5]), sampling={"seed": 3, "max_tokens": 40}, stop={"strings": [stop]}
    )
    responses = list(server.stub.Generate(request))
    assert "".join(r.text for r in responses) == text[: text.find(stop)]
    assert responses[-1].finished.matched_stop_string == stop


def test_a_worker_that_dies_is_replaced_and_the_answer_is_exact(start: Callable[..., Running], tmp_path: Path) -> None:
    server = start(fault="exit", fault_step=10, fault_once=str(tmp_path / "died"))
    responses = list(server.stub.Generate(endless()))
    tokens = [t for r in responses for t in r.token_ids]
    assert tokens == expected([5], Sampling(seed=1), 500, VOCABULARY)
    assert responses[-1].finished.timings.recoveries == 1
    assert server.stub.GetStats(pb.GetStatsRequest()).worker.incarnation == 2


def test_a_worker_that_somebody_else_starts(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    flags = ["--model", str(model), "--listen", f"unix:{tmp_path}/grpc", "--socket-directory", str(directory)]
    process = Process([*flags, "--log-format", "json"])
    worker = None
    try:
        process.wait_for("listening")
        with grpc.insecure_channel(f"unix:{tmp_path}/grpc") as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            assert error_of(stub.Generate(endless())).reason == "STARTING"
            environment = ENVIRONMENT
            options = json.dumps({"vocab_size": VOCABULARY})
            worker = subprocess.Popen(
                [sys.executable, "-m", "support.toy_worker", str(directory), options],
                env=environment,
                stderr=subprocess.DEVNULL,
            )
            process.wait_for("worker_joined")
            tokens = [t for r in stub.Generate(endless()) for t in r.token_ids]
            assert len(tokens) == 500
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
    finally:
        if worker is not None:
            worker.kill()
            worker.wait()
        process.end()


# --- limits of the machine -------------------------------------------------------------------------------------------


def test_without_descriptors_streams_go_on_and_later_connections_are_taken(start: Callable[..., Running]) -> None:
    """Connections until no more are taken, in the middle of an answer: that is exact, probes on an open connection are
    answered, and once the connections are gone a new caller gets in."""
    server = start(min_step_seconds=0.004, max_step_seconds=0.004)
    call = server.stub.Generate(endless())
    first = next(call)
    limit = len(os.listdir(f"/proc/{server.popen.pid}/fd")) + 20
    resource.prlimit(server.popen.pid, resource.RLIMIT_NOFILE, (limit, limit))
    host, _, port = server.address.rpartition(":")
    crowd = [socket.create_connection((host, int(port))) for _ in range(100)]
    until(lambda: len(os.listdir(f"/proc/{server.popen.pid}/fd")) >= limit)
    assert server.health.Check(health_pb2.HealthCheckRequest()).status == 1
    tokens = [*first.token_ids, *(t for r in call for t in r.token_ids)]
    assert tokens == expected([5], Sampling(seed=1), 500, VOCABULARY)
    for connection in crowd:
        connection.close()
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as late:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[6]), sampling={"seed": 1, "max_tokens": 2})
        answer = inference_pb2_grpc.InferenceServiceStub(late).Generate(
            request, wait_for_ready=True, timeout=BOUND_SECONDS
        )
        assert [t for r in answer for t in r.token_ids] == expected(
            [6], Sampling(seed=1, stop_ids=(EOS,)), 2, VOCABULARY
        )
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_leaves_at_once(start: Callable[..., Running], number: signal.Signals) -> None:
    server = start()
    watch = server.health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    begin = time.monotonic()
    server.popen.send_signal(number)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert server.exit_code() == 0
    assert time.monotonic() - begin < 8
    assert server.wait_for("worker_stopped")["exit_code"] == 0
    assert not Path(f"/proc/{server.wait_for('worker_started')['pid']}").exists()


def test_sigterm_lets_short_answers_finish_and_ends_long_ones(start: Callable[..., Running]) -> None:
    server = start("--drain-timeout-seconds", "1.5", min_step_seconds=0.02, max_step_seconds=0.02)
    watch = server.health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    short = [
        server.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[6]), sampling={"seed": n, "max_tokens": 20}))
        for n in range(8)
    ]
    long = [server.stub.Generate(endless(n)) for n in range(2)]
    begun = [next(call) for call in (*short, *long)]
    assert all(response.HasField("started") for response in begun)
    server.popen.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert error_of(server.stub.Generate(endless())).reason == "DRAINING"
    for seed, call in enumerate(short):
        tokens = [*begun[seed].token_ids, *(t for r in call for t in r.token_ids)]
        assert tokens == expected([6], Sampling(seed=seed, stop_ids=(EOS,)), 20, VOCABULARY)
    for number, call in enumerate(long):
        tokens = list(begun[8 + number].token_ids)
        error = error_of(tokens.extend(response.token_ids) for response in call)
        assert error.reason == "DRAINED"
        assert int(error.metadata["next_index"]) == len(tokens)
        assert tokens == expected([5], Sampling(seed=number), 500, VOCABULARY)[: len(tokens)]
        assert 1.0 < time.monotonic() - begin < 4
    assert server.exit_code() == 0


def test_whoever_comes_while_it_leaves_is_told_why(start: Callable[..., Running]) -> None:
    """Callers without a pause, from before the signal until nobody answers. None ends without a reason of ours, or of a
    connection that is closed: a bare CANCELLED would say that the caller hung up."""
    server = start("--drain-linger-seconds", "2")
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[6]), sampling={"seed": 1, "max_tokens": 2})
    outcomes: list[tuple[str, str]] = []

    def call() -> tuple[str, str]:
        try:
            list(server.stub.Generate(request))
            return "OK", "OK"
        except grpc.RpcError as caught:
            error: Any = caught
            found = from_trailer(error.code().name, error.details(), dict(error.trailing_metadata() or ()).get(TRAILER))
            return error.code().name, found.reason

    def keep_calling() -> None:
        while True:
            outcomes.append(outcome := call())
            if outcome[1] not in ("OK", "DRAINING"):
                return

    callers = [threading.Thread(target=keep_calling) for _ in range(8)]
    for caller in callers:
        caller.start()
    server.popen.send_signal(signal.SIGTERM)
    for caller in callers:
        caller.join(BOUND_SECONDS)
    assert not any(caller.is_alive() for caller in callers)
    assert [reason for _, reason in outcomes].count("DRAINING") > 10
    assert set(outcomes) <= {("OK", "OK"), ("UNAVAILABLE", "DRAINING"), ("UNAVAILABLE", "UNREACHABLE")}
    assert server.exit_code() == 0


def test_liveness_does_not_end_with_readiness(start: Callable[..., Running]) -> None:
    server = start("--drain-timeout-seconds", "600", min_step_seconds=0.02, max_step_seconds=0.02)
    call = server.stub.Generate(endless())
    next(call)
    server.popen.send_signal(signal.SIGTERM)
    check = server.health.Check
    until(lambda: check(health_pb2.HealthCheckRequest(service="readiness")).status == 2)
    for name in ("liveness", "worker"):
        assert check(health_pb2.HealthCheckRequest(service=name)).status == 1
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0


@pytest.mark.parametrize("target", ["loop", "engine"])
def test_what_stands_still_is_seen_by_probes_and_written_down(start: Callable[..., Running], target: str) -> None:
    """SIGALRM makes the event loop, or the engine's next turn, stand still for three seconds."""
    stall = {
        "loop": "loop.add_signal_handler(signal.SIGALRM, time.sleep, 3)",
        "engine": "loop.add_signal_handler(signal.SIGALRM, lambda: engines[0]._order(lambda now: time.sleep(3)))",
    }[target]
    code = WITHOUT_TORCH + (
        "import asyncio, signal, time\n"
        "from lineclear.scheduler import main as module\n"
        "engines = []\n"
        "class Kept(module.Engine):\n"
        "    def __init__(self, *a, **k):\n"
        "        super().__init__(*a, **k)\n"
        "        engines.append(self)\n"
        "        loop = asyncio.get_running_loop()\n"
        f"        {stall}\n"
        "module.Engine = Kept\n"
        "sys.exit(module.main(sys.argv[1:]))\n"
    )
    server = start("--standstill-seconds", "1", code=code)
    live = health_pb2.HealthCheckRequest(service="liveness")
    server.popen.send_signal(signal.SIGALRM)
    if target == "loop":
        server.wait_for("event_loop_stands_still")
        with pytest.raises(grpc.RpcError) as caught:
            server.health.Check(live, timeout=0.3)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        server.wait_for("event_loop_goes_on")
    else:
        server.wait_for("engine_stands_still")
        until(lambda: server.health.Check(live).status == 2)
        server.wait_for("engine_goes_on")
    until(lambda: server.health.Check(live).status == 1)
    assert any("most recent call first" in line for line in list(server.other))
    assert len([t for r in server.stub.Generate(endless()) for t in r.token_ids]) == 500


def test_a_second_signal_ends_it_now(start: Callable[..., Running]) -> None:
    server = start("--drain-timeout-seconds", "600", min_step_seconds=0.02, max_step_seconds=0.02)
    call = server.stub.Generate(endless())
    next(call)
    server.popen.send_signal(signal.SIGTERM)
    server.wait_for("leaving")
    begin = time.monotonic()
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code(10) == 0
    assert time.monotonic() - begin < 3
    assert error_of(call).code == "UNAVAILABLE"
    pid = server.wait_for("worker_started")["pid"]
    until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE])
def test_other_signals_do_not_end_it(start: Callable[..., Running], number: signal.Signals) -> None:
    server = start()
    server.popen.send_signal(number)
    assert len([t for r in server.stub.Generate(endless()) for t in r.token_ids]) == 500
    if number == signal.SIGUSR1:
        until(lambda: any("most recent call first" in line for line in list(server.other)))
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0


# --- exit codes ------------------------------------------------------------------------------------------------------


def test_workers_that_die_too_often_end_it_with_1(start: Callable[..., Running]) -> None:
    server = start("--max-worker-crashes", "1", fault="exit", fault_step=5)
    error = error_of(server.stub.Generate(endless()))
    assert (error.code, error.reason) == ("UNAVAILABLE", "WORKER_UNAVAILABLE")
    assert server.exit_code() == 1


def test_a_worker_that_cannot_run_as_configured_ends_it_with_79(model: Path) -> None:
    worker = ["--worker-command", sys.executable, "--worker-command=-c", "--worker-command", "raise SystemExit(78)"]
    process = Process(["--model", str(model), "--listen", "127.0.0.1:0", "--spawn-worker", *worker])
    try:
        assert process.exit_code() == 79
    finally:
        process.end()


@pytest.mark.parametrize("part", ["scheduling.core.Scheduler.apply", "text.detokenizer.AnswerText.push"])
def test_a_part_that_dies_ends_it_with_70(start: Callable[..., Running], part: str) -> None:
    module, cls, method = part.rsplit(".", 2)
    broken = RUN.replace(
        "sys.exit",
        f"from lineclear.scheduler.{module} import {cls}\n"
        "def broken(*_): raise RuntimeError('secret-of-a-user')\n"
        f"{cls}.{method} = broken\nsys.exit",
    )
    server = start(code=broken)
    error = error_of(server.stub.Generate(endless()))
    assert (error.code, error.reason) == ("INTERNAL", "INTERNAL")
    assert server.exit_code() == 70
    incident = server.wait_for("incident")
    assert incident["incident_id"] == error.metadata["incident_id"]
    assert "secret-of-a-user" not in str(server.lines) + str(server.other) + str(error)


def test_a_wrong_configuration_ends_it_with_78(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    spawn = ["--spawn-worker", "--listen", "127.0.0.1:0"]
    cases: list[tuple[list[str], str]] = [
        (["--no-such-flag"], "no-such-flag"),
        (["--order", "best"], "order"),
        (spawn, "no model is named"),
        ([*spawn, "--model", str(tmp_path / "absent")], "does not exist"),
        ([*spawn, "--model", str(tmp_path / "file")], "is a file"),
        ([*spawn, "--model", str(tmp_path / "empty")], "tokenizer.json"),
        ([*spawn, "--model", "nobody/nothing"], "local cache"),
        (["--listen", "127.0.0.1:0", "--model", str(model)], "--socket-directory"),
        (["--listen", f"unix:{tmp_path}/file", "--model", str(model), "--spawn-worker"], "something else"),
        (["--listen", "10.0.0.1:1", "--model", str(model)], "insecure_allow_remote"),
        ([*spawn, "--model", str(model), "--socket-directory", "/absent/parent/x"], "parent"),
    ]
    processes = [(Process([*flags]), flags, says) for flags, says in cases]
    for process, flags, says in processes:
        try:
            code = process.exit_code()
            said = str(process.lines) + "".join(process.other)
            assert code == 78, (flags, said)
            assert says in said
            assert "Traceback" not in said
        finally:
            process.end()


def test_help_is_not_an_error() -> None:
    found = subprocess.run([sys.executable, "-c", RUN, "--help"], capture_output=True, text=True, timeout=BOUND_SECONDS)
    assert found.returncode == 0
    assert "--max-batch-size" in found.stdout


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = WITHOUT_TORCH + "import lineclear.scheduler.main\nprint(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_SECONDS, check=True
    )
    loaded = {name.split(".")[0] for name in found.stdout.split()}
    assert "lineclear" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "triton"}
    assert "lineclear.worker" not in found.stdout
    assert "lineclear.client" not in found.stdout


@pytest.mark.parametrize("how", ["cancel", "close", "session"])
def test_a_caller_who_hangs_up_is_no_incident(start: Callable[..., Running], how: str) -> None:
    server = start(min_step_seconds=0.002, max_step_seconds=0.002)
    if how == "session":
        channel = grpc.insecure_channel(server.address)
        orders: queue.SimpleQueue[pb.SessionRequest] = queue.SimpleQueue()
        call = inference_pb2_grpc.InferenceServiceStub(channel).Session(iter(orders.get, None))
        call.initial_metadata()
        channel.close()
    else:
        channel = grpc.insecure_channel(server.address)
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(endless())
        next(call)
        call.cancel() if how == "cancel" else channel.close()
        server.wait_for("request_ended", outcome="cancelled")
    assert [t for r in server.stub.Generate(endless(2)) for t in r.token_ids]
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert [line for line in server.lines if line["event"] in ("incident", "status_not_taken", "loop_error")] == []
