"""The server continues when standard error is a full pipe or socket without a reader.

journald gives every service a socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.engine_harness import ENVIRONMENT
from support.processes import RUN, start_process, worker_flags
from support.small_tokenizers import byte_level, save
from support.time_limits import PATIENCE_SECONDS

from lineclear.client import Client

# With a full log pipe the engine stalls for a while, which the event loop reports with all stacks.
STANDING_STILL = """
import threading, time
from lineclear.scheduler.engine.engine_loop import EngineLoop
turn = EngineLoop._run_once
def slow(self):
    if os.path.exists({path!r}):
        os.unlink({path!r})
        time.sleep(1.0)
    turn(self)
EngineLoop._run_once = slow
import os
"""


def fill(descriptor: int) -> None:
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(descriptor, b"x" * 512):
            pass
    with contextlib.suppress(BlockingIOError):
        while os.write(descriptor, b"x"):
            pass


# Libraries, warnings and threads that end with an exception write to standard error.
NOTES = """
from lineclear.scheduler.requests.request_manager import RequestManager
drain = RequestManager.drain
def noted(self, seconds):
    try:
        print("note " * 5000, file=sys.stderr)
    except OSError:
        pass
    return drain(self, seconds)
RequestManager.drain = noted
"""


@pytest.fixture(params=["pipe", "socket"])
def stuck(request: pytest.FixtureRequest) -> Iterator[int]:
    """Yield the writing end of a full pipe, or socket, without a reader."""
    if request.param == "pipe":
        reading, writing = os.pipe()
    else:
        reading, writing = (end.detach() for end in socket.socketpair())
    fill(writing)
    os.set_blocking(writing, True)
    yield writing
    os.close(reading)
    os.close(writing)


def test_unread_stack_dumps_block_nothing(tmp_path: Path, stuck: int) -> None:
    address, flag = f"unix:{tmp_path}/s", tmp_path / "stand-still"
    code = RUN.replace("sys.exit", NOTES + STANDING_STILL.format(path=str(flag)) + "sys.exit", 1)
    flags = ["--model", str(save(tmp_path, byte_level())), "--listen", address, "--watchdog-timeout-seconds", "0.5"]
    flags += ["--log-format", "json", *worker_flags()]
    server = start_process(flags, code, toy={}, variables={"PYTHONUNBUFFERED": ""}, stderr=stuck)
    try:
        with Client(address, max_attempts=1000) as client, grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            client.generate([5], max_tokens=1)
            server.send_signal(signal.SIGUSR1)
            flag.touch()
            client.generate([5], max_tokens=1)
            health.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=PATIENCE_SECONDS)
            client.generate([5], max_tokens=1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_SECONDS) == 0
    finally:
        server.kill()
        server.wait()


def test_server_without_standard_streams(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    command = [sys.executable, "-c", RUN, "--model", str(save(tmp_path, byte_level())), "--listen", address]
    command += worker_flags()
    environment = {**ENVIRONMENT, "TOY_OPTIONS": '{"vocab_size": 512}'}
    server = subprocess.Popen(["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], env=environment)
    try:
        with Client(address, max_attempts=1000) as client:
            assert len(client.generate([5], max_tokens=3, ignore_eos=True).token_ids) == 3
            for process in (server.pid, client.stats().workers[0].pid):
                streams = {os.readlink(f"/proc/{process}/fd/{number}") for number in range(3)}
                assert streams == {os.devnull}
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_SECONDS) == 0
    finally:
        server.kill()
        server.wait()


FAULTS = {"wrong flag": "", "missing package": "sys.modules['structlog'] = None"}


@pytest.mark.parametrize(
    ("module", "fault", "reader"),
    [
        ("lineclear.scheduler.main", "wrong flag", "stopped"),
        ("lineclear.worker.main", "wrong flag", "gone"),
        ("lineclear.scheduler.command", "missing package", "stopped"),
        ("lineclear.scheduler.command", "missing package", "gone"),
        ("lineclear.scheduler.command", "missing package", "closed"),
        ("lineclear.worker.main", "missing package", "stopped"),
    ],
)
def test_exit_code_of_a_fault_at_start_with_unread_stderr(module: str, fault: str, reader: str) -> None:
    """A parent like Node.js makes its end non-blocking, which makes its children's end non-blocking too."""
    reading, writing = os.pipe()
    if reader == "stopped":
        fill(writing)
    else:
        os.close(reading)
    code = f"import runpy, sys\n{FAULTS[fault]}\nrunpy.run_module({module!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, "--nonsense"]
    if reader == "closed":
        command = ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    try:
        environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": ""}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=writing)
        assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", None)
        assert process.returncode == 78
    finally:
        if reader == "stopped":
            os.close(reading)
        os.close(writing)


def output_to_a_socket(script: str) -> tuple[int, str]:
    """Return the exit code of a process, and what it wrote to a standard error that is a socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen([sys.executable, "-c", script], env=ENVIRONMENT, stderr=theirs)
        theirs.close()
        ours.settimeout(PATIENCE_SECONDS)
        output = b"".join(iter(lambda: ours.recv(1 << 16), b"")).decode()
        return process.wait(PATIENCE_SECONDS), output


def test_output_to_a_socket_is_complete_and_ordered() -> None:
    """Log lines, stacks and the last traceback arrive, including the lines just before the exit."""
    code, output = output_to_a_socket("""
import faulthandler, os, sys, structlog
from lineclear.process.logging_setup import configure
faulthandler.enable()
writer = configure("scheduler", form="json")
for number in range(100):
    structlog.get_logger().info("line", number=number)
os.write(2, b"from a library\\n")
faulthandler.dump_traceback()
try:
    raise KeyError("in the end")
finally:
    writer.close()
""")
    assert code == 1
    numbers = [json.loads(line)["number"] for line in output.splitlines() if line.startswith("{")]
    assert numbers == list(range(100))
    assert "from a library\n" in output
    assert "most recent call first" in output
    assert output.rstrip().endswith("KeyError: 'in the end'")


def test_crash_is_reported_to_a_socket() -> None:
    code, output = output_to_a_socket("""
import faulthandler, os, signal
from lineclear.process.logging_setup import configure
faulthandler.enable()
configure("scheduler", form="json")
os.kill(os.getpid(), signal.SIGSEGV)
""")
    assert code == -signal.SIGSEGV
    assert "Segmentation fault" in output
