"""Shutdown of the scheduler process: signals, stalls, a second signal, and late calls."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from support.engine_harness import ENVIRONMENT, short_directory
from support.processes import BOUND_SECONDS, EOS, VOCABULARY, WITHOUT_TORCH, Process, Running, endless, error_of, until
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS
from support.toy import expected
from support.toy_worker import ToyOptions

from lineclear.status_codec import TRAILER, from_trailer
from lineclear.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Sampling


def short(seed: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[6]), sampling={"seed": seed, "max_tokens": 20})


def right(seed: int) -> list[int]:
    return expected([6], Sampling(seed=seed, stop_ids=(EOS,)), 20, VOCABULARY)


def test_idle_server_stops_at_once(start: Callable[..., Running]) -> None:
    server = start("--drain-timeout-seconds", "600")
    watch = server.health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    server.popen.send_signal(signal.SIGINT)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert server.exit_code(SOON_SECONDS) == 0  # a drain would take longer
    assert server.wait_for("worker_exited")["exit_code"] == 0
    assert not Path(f"/proc/{server.wait_for('worker_started')['pid']}").exists()


def drain_by_operator(server: Running, stdin: int) -> None:
    """Send AdminService.Drain. A second one does not shorten the drain."""
    with grpc.insecure_channel(server.wait_for("listening")["admin_address"]) as channel:
        for _ in range(2):
            admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
    server.wait_for("shutdown_started", reason="an operator asked")


def close_standard_input(server: Running, stdin: int) -> None:
    """As when the parent exits."""
    os.write(stdin, b"what is written there says nothing\n")
    os.close(stdin)
    server.wait_for("shutdown_started", reason="standard input ended")


@pytest.mark.parametrize("drain", [drain_by_operator, close_standard_input])
def test_first_signal_during_an_admin_drain_keeps_streams(
    start: Callable[..., Running], drain: Callable[[Running, int], None]
) -> None:
    """A preStop hook calls Drain, then the kubelet sends SIGTERM. A second signal ends the process at once."""
    reading, writing = os.pipe()
    server = start(
        *("--admin-listen", "127.0.0.1:0", "--drain-timeout-seconds", "600", "--exit-on-stdin-close"),
        stdin=reading,
        min_step_seconds=0.02,
        max_step_seconds=0.02,
    )
    os.close(reading)
    call, long = server.stub.Generate(short(1)), server.stub.Generate(endless())
    tokens = list(next(call).token_ids)
    next(long)
    drain(server, writing)
    server.popen.send_signal(signal.SIGTERM)
    tokens += [t for r in call for t in r.token_ids]
    assert tokens == right(1)
    server.wait_for("shutdown_already_started", reason="SIGTERM")
    server.popen.send_signal(signal.SIGTERM)
    assert error_of(long).code == "UNAVAILABLE"
    assert server.exit_code(SOON_SECONDS) == 0
    assert server.wait_for("shutdown_forced")["reason"] == "SIGTERM"
    if drain is drain_by_operator:
        os.close(writing)


def test_new_calls_during_shutdown_get_the_reason(start: Callable[..., Running]) -> None:
    """Call without a pause from before the signal until the server is down.

    Every call ends with a reason of the server or of a closed connection: a bare CANCELLED would blame the caller.
    """
    server = start("--drain-linger-seconds", "1")
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

    def call_repeatedly() -> None:
        while True:
            outcomes.append(outcome := call())
            if outcome[1] not in ("OK", "SERVER_DRAINING"):
                return

    callers = [threading.Thread(target=call_repeatedly) for _ in range(8)]
    for caller in callers:
        caller.start()
    server.popen.send_signal(signal.SIGTERM)
    for caller in callers:
        caller.join(BOUND_SECONDS)
    assert not any(caller.is_alive() for caller in callers)
    assert [reason for _, reason in outcomes].count("SERVER_DRAINING") > 10
    assert set(outcomes) <= {("OK", "OK"), ("UNAVAILABLE", "SERVER_DRAINING"), ("UNAVAILABLE", "UNREACHABLE")}
    assert server.exit_code() == 0


@pytest.mark.parametrize("target", ["loop", "engine"])
def test_stalled_engine_is_reported_and_logged(start: Callable[..., Running], target: str, tmp_path: Path) -> None:
    """SIGALRM blocks the event loop, or the engine's next iteration, until a test writes to a pipe."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    stall = {
        "loop": f"loop.add_signal_handler(signal.SIGALRM, Path({str(gate)!r}).read_bytes)",
        "engine": "loop.add_signal_handler(signal.SIGALRM, lambda: engines[0].call_on_engine_thread("
        f"Path({str(gate)!r}).read_bytes))",
    }[target]
    code = WITHOUT_TORCH + (
        "import asyncio, signal\n"
        "from pathlib import Path\n"
        "from lineclear.scheduler import app as module\n"
        "from lineclear.scheduler.main import main\n"
        "engines = []\n"
        "class Kept(module.Engine):\n"
        "    def __init__(self, *a, **k):\n"
        "        super().__init__(*a, **k)\n"
        "        engines.append(self)\n"
        "        loop = asyncio.get_running_loop()\n"
        f"        {stall}\n"
        "module.Engine = Kept\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    server = start("--watchdog-timeout-seconds", "1", code=code)
    live = health_pb2.HealthCheckRequest(service="liveness")
    server.popen.send_signal(signal.SIGALRM)
    if target == "loop":
        server.wait_for("event_loop_stalled")
        with pytest.raises(grpc.RpcError) as caught:
            server.health.Check(live, timeout=0.3)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.write_bytes(b"")
        server.wait_for("event_loop_recovered")
    else:
        server.wait_for("engine_stalled")
        until(lambda: server.health.Check(live).status == 2)
        gate.write_bytes(b"")
        server.wait_for("engine_recovered")
    until(lambda: server.health.Check(live).status == 1)
    assert any("most recent call first" in line for line in list(server.other))
    assert len([t for r in server.stub.Generate(endless()) for t in r.token_ids]) == 500


def test_second_signal_stops_at_once(start: Callable[..., Running]) -> None:
    """Liveness outlasts readiness: a probe must not cut a drain short."""
    server = start("--drain-timeout-seconds", "600", min_step_seconds=0.02, max_step_seconds=0.02)
    call = server.stub.Generate(endless())
    next(call)
    server.popen.send_signal(signal.SIGTERM)
    check = server.health.Check
    until(lambda: check(health_pb2.HealthCheckRequest(service="readiness")).status == 2)
    for name in ("", "liveness", "worker"):
        assert check(health_pb2.HealthCheckRequest(service=name)).status == 1
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code(SOON_SECONDS) == 0
    assert error_of(call).code == "UNAVAILABLE"
    pid = server.wait_for("worker_started")["pid"]
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_other_signals_are_ignored(start: Callable[..., Running]) -> None:
    server = start()
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE):
        server.popen.send_signal(number)
        assert len([t for r in server.stub.Generate(endless()) for t in r.token_ids]) == 500
    until(lambda: any("most recent call first" in line for line in list(server.other)))
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0


NUM_STREAMS, NUM_TOKENS = 12, 40
TOY = ToyOptions(vocab_size=VOCABULARY, min_step_seconds=0.02, max_step_seconds=0.02)


class Split:
    """A scheduler process and a worker process that share only the folder of their sockets."""

    def __init__(self, model: Path, directory: Path) -> None:
        sockets = ("--socket-directory", str(directory / "sockets"))
        drain = ("--drain-timeout-seconds", "60")
        self.scheduler = Process(
            ["--model", str(model), "--listen", "127.0.0.1:0", "--log-format", "json", *sockets, *drain]
        )
        self.worker = subprocess.Popen(TOY.arguments(directory / "sockets"), env=ENVIRONMENT)
        self.address = self.scheduler.wait_for("serving")["address"]

    def stop_scheduler(self) -> None:
        self.scheduler.popen.send_signal(signal.SIGTERM)
        self.scheduler.wait_for("shutdown_started")

    def stop_worker(self) -> None:
        """Send SIGTERM, and return when the scheduler has noticed."""
        self.worker.send_signal(signal.SIGTERM)
        self.scheduler.wait_for("worker_stopping")

    def stop_both(self) -> None:
        self.worker.send_signal(signal.SIGTERM)
        self.scheduler.popen.send_signal(signal.SIGTERM)


@pytest.fixture
def split(model: Path) -> Iterator[Split]:
    directory = short_directory()
    running = Split(model, directory)
    try:
        yield running
    finally:
        running.worker.kill()
        running.worker.wait()
        running.scheduler.end()
        shutil.rmtree(directory)


STOP_ORDERS: dict[str, Callable[[Split], None]] = {
    "worker, then scheduler": lambda split: (split.stop_worker(), split.stop_scheduler()),  # type: ignore[dict-item]
    "scheduler, then worker": lambda split: (split.stop_scheduler(), split.stop_worker()),  # type: ignore[dict-item]
    "both at once": Split.stop_both,
}


@pytest.mark.parametrize("stop", STOP_ORDERS.values(), ids=STOP_ORDERS)
def test_streams_complete_in_every_stop_order(split: Split, stop: Callable[[Split], None]) -> None:
    with grpc.insecure_channel(split.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answers = stream(stub, lambda: stop(split))
    assert answers == [right_answer(seed) for seed in range(NUM_STREAMS)]
    assert split.worker.wait(PATIENCE_SECONDS) == 0
    assert split.scheduler.exit_code() == 0


def test_streams_complete_when_both_processes_stop(start: Callable[..., Running]) -> None:
    """As systemd stops a service: SIGTERM to every process of the control group. No new worker starts."""
    server = start("--drain-timeout-seconds", "60", min_step_seconds=0.02, max_step_seconds=0.02)
    worker = server.wait_for("worker_started")["pid"]

    def stop() -> None:
        subprocess.run(["kill", "-TERM", str(worker), str(server.popen.pid)], check=True)

    assert stream(server.stub, stop) == [right_answer(seed) for seed in range(NUM_STREAMS)]
    assert server.exit_code() == 0
    # After its last request the scheduler stops its worker too, which may be the worker's second signal.
    assert server.wait_for("worker_exited")["exit_code"] in (0, -signal.SIGTERM)
    assert [line for line in server.lines if line.get("event") == "worker_started"][1:] == []


def stream(stub: inference_pb2_grpc.InferenceServiceStub, stop: Callable[[], None]) -> list[list[int]]:
    calls = [
        stub.Generate(
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[5]),
                sampling={"seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True},  # type: ignore[arg-type]
            )
        )
        for seed in range(NUM_STREAMS)
    ]
    answers = [list(next(call).token_ids) for call in calls]
    stop()
    for answer, call in zip(answers, calls, strict=True):
        answer += [token for response in call for token in response.token_ids]
    return answers


def right_answer(seed: int) -> list[int]:
    return expected([5], Sampling(seed=seed), NUM_TOKENS, VOCABULARY)
