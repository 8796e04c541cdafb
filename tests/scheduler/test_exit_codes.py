"""Exit codes of the scheduler process with their log lines, and modules that it never imports."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import trustme
from client.command import spawn
from google.rpc.code_pb2 import Code
from support.processes import BOUND_SECONDS, RUN, WITHOUT_TORCH, Process, Running, endless, error_of, worker_flags
from support.time_limits import PATIENCE_SECONDS

from lineclear.exit_codes import COMMAND, TABLE, ExitCode, of_grpc
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc


def test_exit_69_when_workers_crash_too_often(start: Callable[..., Running]) -> None:
    server = start("--max-worker-crashes", "1", fault="exit", fault_step=1)
    # Two: a single request would be suspected, and perhaps rejected as poison before the server gives up.
    calls = [server.stub.Generate(endless()) for _ in range(2)]
    for error in map(error_of, calls):
        assert (error.code, error.reason) == ("UNAVAILABLE", "WORKER_UNAVAILABLE")
    assert server.exit_code() == 69


def test_exit_79_when_the_worker_is_misconfigured(model: Path) -> None:
    worker = worker_flags([sys.executable, "-c", "raise SystemExit(78)"])
    with Process(["--model", str(model), "--listen", "127.0.0.1:0", *worker]) as process:
        assert process.exit_code() == 79


def test_exit_76_when_tokenizer_files_differ(model: Path) -> None:
    """After a restart both read the current files: unlike after 78, a restart helps."""
    flags = ["--model", str(model), "--listen", "127.0.0.1:0", "--log-format", "json", *worker_flags()]
    with Process(flags, text_fingerprint="0123456789abcdef") as process:
        assert process.exit_code() == 76
        refused = process.wait_for("join_rejected")
        assert refused["theirs"] == "0123456789abcdef"
        assert "same model directory" in refused["reason"]
        assert not [line for line in process.lines if line.get("event") == "worker_joined"]


@pytest.mark.parametrize("part", ["core.scheduler.Scheduler.apply", "requests.request_metrics.TokenRate.add"])
def test_exit_70_when_a_component_crashes(start: Callable[..., Running], part: str) -> None:
    module, cls, method = part.rsplit(".", 2)
    broken = RUN.replace(
        "sys.exit",
        f"from lineclear.scheduler.{module} import {cls}\n"
        "def broken(*_): raise RuntimeError('secret-of-a-user')\n"
        f"assert callable({cls}.{method})\n"
        f"{cls}.{method} = broken\nsys.exit",
    )
    server = start(code=broken)
    error = error_of(server.stub.Generate(endless()))
    assert (error.code, error.reason) == ("INTERNAL", "INTERNAL_ERROR")
    assert server.exit_code() == 70
    incident = server.wait_for("internal_error")
    assert incident["incident_id"] == error.metadata["incident_id"]
    assert "secret-of-a-user" not in str(server.lines) + str(server.other) + str(error)


def test_exit_70_on_a_failed_invariant(start: Callable[..., Running], tmp_path: Path) -> None:
    """Blocks of an ended answer leak: no caller would notice before the memory is exhausted."""
    losing = RUN.replace(
        "sys.exit",
        "from lineclear.scheduler.core.block_pool import BlockPool\n"
        "BlockPool.release = lambda self, blocks: None\nsys.exit",
    )
    recordings = tmp_path / "recordings"
    server = start("--recording-directory", str(recordings), code=losing, min_step_seconds=0.002)
    stream = server.stub.Generate(endless())
    next(stream)
    assert list(server.stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), sampling={"max_tokens": 1})))
    error = error_of(stream)
    assert (error.code, error.reason) == ("INTERNAL", "INTERNAL_ERROR")
    assert server.exit_code() == 70
    died = server.wait_for("engine_died")
    assert died["error"] == "AssertionError"
    assert any("block_pool.py" in place for place in died["location"]), died["location"]
    assert "engine died" in server.wait_for("recording_written")["reason"]
    assert list(recordings.iterdir())


def test_exit_70_when_shutdown_hangs(start: Callable[..., Running]) -> None:
    """Like a library that waits for a thread: the log lists the running threads."""
    hanging = RUN.replace(
        "sys.exit",
        "import time\nfrom lineclear.scheduler import main as module\n"
        "module._EXIT_SECONDS = 0.5\n"
        "from lineclear.scheduler.engine.worker_link import WorkerLink\n"
        "WorkerLink.close = lambda self: time.sleep(600)\nsys.exit",
        1,
    )
    server = start(code=hanging)
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code() == 70
    assert "engine" not in server.wait_for("exit_overdue")["threads"]


@pytest.fixture
def occupied() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_exit_78_on_invalid_configuration(model: Path, tmp_path: Path, occupied: str) -> None:
    """Most errors are found before a worker starts. The rest also stop the worker."""
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("weights", "text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / name / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")  # no tensors
    (tmp_path / "text" / "tokenizer.json").write_text("{")
    (tmp_path / "tokens").write_text("# none\n")
    (tmp_path / "tokens").chmod(0o400)
    authority = trustme.CA()
    authority.issue_cert("localhost").cert_chain_pems[0].write_to_path(str(tmp_path / "chain"))
    authority.issue_cert("localhost").private_key_pem.write_to_path(str(tmp_path / "other"))
    tls = ["--tls-cert-file", str(tmp_path / "chain"), "--tls-key-file", str(tmp_path / "other")]
    spawn = ["--spawn-worker", "--listen", "127.0.0.1:0"]
    cases: list[tuple[list[str], str]] = [
        (["--scheduling-policy", "best"], "scheduling-policy"),
        (spawn, "no model is named"),
        ([*spawn, "--model", str(tmp_path / "weights")], "has no tokenizer.json"),
        ([*spawn, "--model", str(tmp_path / "text")], "tokenizer.json is not JSON"),
        (["--listen", "127.0.0.1:0", "--model", str(model)], "--socket-directory"),
        (["--listen", f"unix:{tmp_path}/file", "--model", str(model), "--spawn-worker"], "is not a socket of user"),
        (["--listen", occupied, "--model", str(model), "--spawn-worker"], "in use"),
        ([*spawn, "--model", str(model), "--status-listen", occupied], "--status-listen"),
        ([*spawn, "--model", str(model), "--recording-directory", str(tmp_path / "open")], "it must be 0700"),
        ([*spawn, "--model", str(model), "--lora-dir", "/absent"], "--lora-dir /absent is not a directory"),
        ([*spawn, "--model", str(model), "--token-file", str(tmp_path / "tokens")], "contains no token; write a name"),
        ([*spawn, "--model", str(model), *tls], "give the key that this certificate was made with"),
        ([*spawn, "--model", str(model), "--socket-directory", "/absent/parent/x"], "parent"),
    ]
    late = {"tokenizer.json is not JSON"}
    processes = [(Process([*flags]), flags, says) for flags, says in cases]
    for process, flags, says in processes:
        with process:
            code = process.exit_code()
            output = str(process.lines) + "".join(process.other)
            assert code == 78, (flags, output)
            assert says in output
            assert "Traceback" not in output
            assert "add_port.cc" not in output, "gRPC wrote a line of its own"
            started = [line["pid"] for line in process.lines if line["event"] == "worker_started"]
            assert len(started) == (says in late), flags
            assert [line["pid"] for line in process.lines if line["event"] == "worker_exited"] == started
            assert not any(Path(f"/proc/{pid}").exists() for pid in started)


@pytest.mark.parametrize("form", ["json", "console"])
def test_settings_are_logged_once_and_changed_ones_on_the_console(occupied: str, form: str) -> None:
    with Process(["--demo", "--listen", occupied, "--insecure-allow-remote", "--log-format", form]) as process:
        assert process.exit_code() == 78
        output = "".join(process.other) + str(process.lines)
        assert occupied in output
        assert "demo" in output
        assert ("'insecure_allow_remote': True" if form == "json" else "insecure_allow_remote=True") in output
        assert ("max_batch_size" in output) == (form == "json")


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = WITHOUT_TORCH + "import lineclear.scheduler.main, lineclear.scheduler.app\nprint(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_SECONDS, check=True
    )
    loaded = {name.split(".")[0] for name in found.stdout.split()}
    assert "lineclear" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "triton"}
    assert "lineclear.worker" not in found.stdout
    assert "lineclear.client" not in found.stdout


def test_worker_starts_before_service_imports(model: Path) -> None:
    """The worker's own imports take longest. Here the service cannot be imported: the worker starts, then exits."""
    blocked = WITHOUT_TORCH.replace('"numpy"', '"numpy", "grpc", "jinja2", "tokenizers"')
    code = RUN.replace(WITHOUT_TORCH, blocked)
    loads_for_ever = (
        "from lineclear.process.parent_death import die_with_parent; import signal; die_with_parent(); signal.pause()"
    )
    worker = worker_flags([sys.executable, "-c", loads_for_ever])
    with Process(["--model", str(model), "--listen", "127.0.0.1:0", *worker], code) as process:
        pid = process.wait_for("worker_started")["pid"]
        assert process.exit_code() == 1
        assert "is not installed here" in "".join(process.other)  # the first import of the service
        assert process.wait_for("worker_exited")["pid"] == pid


def test_hang_up_is_no_incident(start: Callable[..., Running]) -> None:
    server = start(min_step_seconds=0.002, max_step_seconds=0.002)
    channels = [grpc.insecure_channel(server.address) for _ in range(3)]
    stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
    commands: queue.SimpleQueue[pb.SessionRequest] = queue.SimpleQueue()
    stubs[0].Session(iter(commands.get, None)).initial_metadata()
    cancelled, closed = stubs[1].Generate(endless()), stubs[2].Generate(endless())
    next(cancelled), next(closed)
    cancelled.cancel()
    for channel in channels:
        channel.close()
    server.wait_for("request_ended", count=2, outcome="cancelled")
    assert [t for r in server.stub.Generate(endless(2)) for t in r.token_ids]
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert [line for line in server.lines if line["event"] in ("internal_error", "abort_timed_out", "loop_error")] == []


LINECLEAR = [sys.executable, "-m", "lineclear.cli"]
SCHEDULER = [sys.executable, "-m", "lineclear.scheduler.main"]
WORKER = [sys.executable, "-m", "lineclear.worker.main"]
OF_GRPC = {of_grpc(number) for code, number in Code.items() if code != "OK"}
OF_SHELLS = {*range(124, 166)}
"""timeout (124, 125, 137), docker run (125), not executable (126), not found (127), signals (128 + n)."""


def run(words: list[str], **settings: object) -> int:
    return subprocess.run(words, capture_output=True, timeout=PATIENCE_SECONDS, **settings).returncode  # type: ignore[call-overload, no-any-return]


def test_table_lists_each_code_once() -> None:
    codes = [row.code for row in TABLE]
    assert sorted(codes) == sorted({*ExitCode} - {ExitCode.FIRST_OF_GRPC})


def test_exit_code_ranges_do_not_overlap() -> None:
    others = {int(row.code) for row in TABLE}
    assert len(OF_GRPC) == 16
    assert not OF_GRPC & (others | OF_SHELLS)
    assert not {code for code in others if code != ExitCode.INTERRUPTED} & OF_SHELLS
    of_command = {int(row.code) for row in TABLE if row.program == COMMAND}
    assert not of_command & {*range(64, 80)}  # sysexits.h and 79 are of processes


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([*LINECLEAR, "--version"], ExitCode.OK),
        ([*LINECLEAR, "generate", "x", "--no-such-flag"], ExitCode.USAGE),
        ([*LINECLEAR, "generate", "--file", "/absent"], ExitCode.USAGE),
        ([*LINECLEAR, "generate", "x", "--target=unix:/absent", "--max-attempts=1"], of_grpc(Code.UNAVAILABLE)),
        ([*LINECLEAR, "serve", "--model", "/absent"], ExitCode.CONFIGURATION),
        ([*SCHEDULER, "replay", "/absent"], ExitCode.USAGE),
        ([*WORKER, "--version"], ExitCode.OK),
        ([*WORKER, "--no-such-flag"], ExitCode.CONFIGURATION),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else None,
)
def test_programs_exit_with_codes_of_the_table(words: list[str], code: int) -> None:
    assert run(words) == code


def test_ctrl_c_exits_with_130() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        waiting = spawn("generate", "x", "--target", target, stdout=subprocess.DEVNULL)
        try:
            connection, _ = silent.accept()
            waiting.send_signal(signal.SIGINT)
            assert waiting.wait(PATIENCE_SECONDS) == ExitCode.INTERRUPTED
            connection.close()
        finally:
            waiting.kill()
            waiting.wait()
