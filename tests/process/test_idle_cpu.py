"""Idle CPU time: both processes sleep in the kernel without work."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from support.engine_harness import ENVIRONMENT, ToyScheduler, eventually
from support.time_limits import PATIENCE_SECONDS
from support.toy_worker import ToyOptions

IDLE = ToyOptions(heartbeat_seconds=0.5)
"""With the heartbeat of the real worker."""
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def cpu_percent(pids: list[int], seconds: float) -> list[float]:
    """Of one processor, over the next `seconds` at least."""
    before, begin = [cpu_seconds(pid) for pid in pids], time.monotonic()
    time.sleep(seconds)  # the quantity measured
    used = [cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)]
    return [100 * seconds / (time.monotonic() - begin) for seconds in used]


def test_two_idle_processes_use_no_processor(folder: Path) -> None:
    with ToyScheduler(folder, 0, IDLE) as scheduler:
        worker = scheduler.read_pid("joined")
        percent = cpu_percent([scheduler.process.pid, worker], 5.0)
        assert max(percent) < 2.0, percent


def test_a_worker_without_a_scheduler_uses_no_processor(folder: Path) -> None:
    worker = subprocess.Popen(IDLE.arguments(folder), env=ENVIRONMENT, stderr=subprocess.PIPE)
    assert worker.stderr is not None
    assert b"waiting_for_scheduler" in worker.stderr.readline()
    percent = cpu_percent([worker.pid], 3.0)
    worker.terminate()
    assert worker.wait(PATIENCE_SECONDS) == 0
    worker.stderr.close()
    assert percent[0] < 2.0


def test_idle_measure_detects_work(folder: Path) -> None:
    """The measure is not blind: with streams running it exceeds the bound of the other tests."""
    with ToyScheduler(folder, 16, IDLE) as scheduler:
        worker = scheduler.read_pid("joined")
        eventually(lambda: min(cpu_percent([scheduler.process.pid, worker], 0.5)) > 2.0)
