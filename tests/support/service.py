"""A whole service for tests: scheduler and torch worker as real processes, and a connected client."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from support.processes import start_process
from support.time_limits import PATIENCE_SECONDS
from support.toy_service import wait_until_serving
from support.waiting import eventually

from lineclear.client import Client, Stats

DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"


def wait_for(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until `condition()` holds. Raises AssertionError with `what` after `seconds`."""
    eventually(condition, seconds, what)


@dataclass
class Service:
    process: subprocess.Popen[bytes]
    target: str
    client: Client

    @property
    def worker_pid(self) -> int:
        return self.client.stats().worker.pid

    def is_idle(self) -> bool:
        return is_idle(self.client.stats())


def is_idle(stats: Stats) -> bool:
    g = stats.gauges
    return not (
        g.num_requests_waiting or g.num_requests_running or g.steps_in_flight or g.blocks_used or g.open_streams
    )


@contextlib.contextmanager
def running(*flags: str, worker: tuple[str, ...] = (), model: Path = DEMO_MODEL, listen: str = "") -> Iterator[Service]:
    """Run a ready service on a Unix socket or at `listen`. Stop it after the block and check its exit code."""
    with tempfile.TemporaryDirectory(prefix="lineclear-test-") as folder:
        target = listen or f"unix:{folder}/api.sock"
        command = ["--model", str(model), "--listen", target, "--spawn-worker", "--log-level", "warning", *flags]
        command += ["--", "--dtype", "float32", "--threads", "1", *worker]
        process = start_process(command, toy={}, variables={"OMP_NUM_THREADS": "1"})
        try:
            with Client(target, max_attempts=1) as client:
                wait_until_serving(client, process)
                yield Service(process, target, client)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.poll() is None:
            process.terminate()
        assert process.wait(PATIENCE_SECONDS) in (0, -9), "the scheduler failed to shut down"
