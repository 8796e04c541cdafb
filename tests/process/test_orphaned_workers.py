"""A supervised worker never outlives its scheduler; an unsupervised one joins the next scheduler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.engine_harness import ENVIRONMENT, EngineHarness, ToyScheduler, eventually, request
from support.processes import is_running
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS
from support.toy_worker import ToyOptions

from lineclear.exit_codes import ExitCode
from lineclear.process.parent_death import ParentDeathPipe

STEPPING = ToyOptions(min_step_seconds=0.003, max_step_seconds=0.003)


@pytest.mark.parametrize("num_streams", [0, 8], ids=["idle", "busy"])
def test_worker_ends_with_a_killed_scheduler(folder: Path, num_streams: int) -> None:
    with ToyScheduler(folder, num_streams, STEPPING) as scheduler:
        pid = scheduler.read_pid("joined")
        scheduler.end(signal.SIGKILL)
        assert eventually(lambda: not is_running(pid)) < SOON_SECONDS


# The moment itself is the point here: between fork and Hello lie the interpreter's start, imports, arming and the load.
@pytest.mark.parametrize("delay_seconds", [0.0, 0.02, 0.08, 0.5])
def test_worker_ends_with_its_scheduler_while_it_loads(folder: Path, delay_seconds: float) -> None:
    with ToyScheduler(folder, 0, ToyOptions(load_seconds=3600)) as scheduler:
        pid = scheduler.read_pid("started")
        time.sleep(delay_seconds)
        scheduler.end(signal.SIGKILL)
        assert eventually(lambda: not is_running(pid)) < SOON_SECONDS


def test_death_pipe_alone_ends_the_worker(folder: Path) -> None:
    """The scheduler lives on and only lets go of the pipe, so the kernel sends no signal."""
    lifeline = ParentDeathPipe()
    worker = subprocess.Popen(
        ToyOptions(load_seconds=3600).arguments(folder),
        env=ENVIRONMENT | lifeline.environment(),
        pass_fds=lifeline.inherited,
    )
    lifeline.close()
    assert worker.wait(PATIENCE_SECONDS) == ExitCode.ORPHANED


def test_worker_started_by_a_dead_scheduler_exits() -> None:
    reading, writing = os.pipe()
    code = "from lineclear.process.parent_death import die_with_parent; die_with_parent(); print('still here')"
    environment = ENVIRONMENT | {"LINECLEAR_PARENT_PIPE": f"{os.getppid()}:{reading}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, pass_fds=(reading,), stdout=subprocess.PIPE)
    os.close(reading)
    os.close(writing)
    assert (done.returncode, done.stdout) == (ExitCode.ORPHANED, b"")


def test_unsupervised_worker_joins_the_next_scheduler(folder: Path) -> None:
    """Answers of a used worker are exact."""
    worker = subprocess.Popen(STEPPING.arguments(folder), env=ENVIRONMENT)  # before any scheduler
    for _ in range(2):
        with ToyScheduler(folder, 4) as scheduler:
            assert scheduler.read_pid("joined") == worker.pid
            scheduler.end(signal.SIGKILL)  # leaves its socket files behind
    with EngineHarness(directory=folder, options=STEPPING) as harness:
        harness.workers.append(worker)
        harness.check([harness.submit(request(i)) for i in range(10)])
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE_SECONDS) == 0
