"""Standard error is a pipe that nobody reads any more, and it is full: the server serves on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service.processes import RUN
from service.small_tokenizers import byte_level, save
from support.patience import PATIENCE_SECONDS
from support.world import ENVIRONMENT

from lineclear.client import Client

# Once the log's pipe is full, the engine stands still for a while, which the event loop reports with all stacks.
STANDING_STILL = """
import threading, time
from lineclear.scheduler.engine import Engine
turn = Engine._turn
def slow(self):
    if os.path.exists({path!r}):
        os.unlink({path!r})
        time.sleep(1.0)
    turn(self)
Engine._turn = slow
import os
"""


@pytest.fixture
def stuck() -> Iterator[int]:
    """The writing end of a full pipe."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"x" * 512):
            pass
    os.set_blocking(writing, True)
    yield writing
    os.close(reading)
    os.close(writing)


def test_stacks_that_nobody_reads_hold_up_nothing(tmp_path: Path, stuck: int) -> None:
    address, flag = f"unix:{tmp_path}/s", tmp_path / "stand-still"
    code = RUN.replace("sys.exit", STANDING_STILL.format(path=str(flag)) + "sys.exit", 1)
    command = [sys.executable, "-c", code, "--model", str(save(tmp_path, byte_level())), "--listen", address]
    command += ["--standstill-seconds", "0.2", "--spawn-worker", "--log-format", "json"]
    command += [f"--worker-command={word}" for word in (sys.executable, "-m", "service.toy_worker")]
    environment = {**ENVIRONMENT, "TOY_OPTIONS": '{"vocab_size": 512}'}
    server = subprocess.Popen(command, env=environment, stderr=stuck, stdin=subprocess.DEVNULL)
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
