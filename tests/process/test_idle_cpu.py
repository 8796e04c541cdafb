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


def test_idle_processes_use_no_processor(folder: Path) -> None:
    """A scheduler, its worker, and a worker without a scheduler."""
    lonely = subprocess.Popen(IDLE.arguments(folder / "alone"), env=ENVIRONMENT, stderr=subprocess.PIPE)
    try:
        assert lonely.stderr is not None
        assert b"waiting_for_scheduler" in lonely.stderr.readline()
        with ToyScheduler(folder, 0, IDLE) as scheduler:
            pids = [scheduler.process.pid, scheduler.read_pid("joined"), lonely.pid]
            percent = cpu_percent(pids, 3.0)
        assert max(percent) < 2.0, percent
        lonely.terminate()
        assert lonely.wait(PATIENCE_SECONDS) == 0
    finally:
        lonely.kill()
        lonely.communicate()


def test_idle_measure_detects_work(folder: Path) -> None:
    """The measure is not blind: with streams running it exceeds the bound of the other tests."""
    with ToyScheduler(folder, 16, IDLE) as scheduler:
        worker = scheduler.read_pid("joined")
        eventually(lambda: min(cpu_percent([scheduler.process.pid, worker], 0.5)) > 2.0)
