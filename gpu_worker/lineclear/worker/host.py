"""What this process may use of its machine, and what of it would make steps faster: cores, allocator, huge pages.

Read from /proc, /sys and the control group; where they are silent, the answer is that nothing is known.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CPU_MAX = Path("sys/fs/cgroup/cpu.max")
_QUOTA = Path("sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_PERIOD = Path("sys/fs/cgroup/cpu/cpu.cfs_period_us")
_MAPS = Path("proc/self/maps")
_HUGE_PAGES = Path("sys/kernel/mm/transparent_hugepage/enabled")
_SPIN_COUNT = "10000"
_BLOCK_TIME_MILLISECONDS = "1"
_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may run on at once, at least 1: those it is bound to, and what its control group may take.

    A container with a quota of two cores on a machine of 64 sees 64: as many threads would be stopped most of the time,
    and each operation waits for its last thread.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(root)
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def bound_spinning() -> None:
    """Let a compute thread that waits sleep after less than a millisecond of spinning. Before OpenMP is loaded.

    By default it spins for 10 ms and more, with all steps of a small model in between: on a core that another process,
    or a thread that it waits for, needs. Environment variables about waiting that are set already are respected.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)  # libgomp, 35 to 70 ns each
        os.environ.setdefault("KMP_BLOCKTIME", _BLOCK_TIME_MILLISECONDS)  # LLVM's and Intel's


def allocator(root: Path = Path("/")) -> str:
    """The library that malloc comes from, "libc" where no other one is loaded."""
    maps = _read(root / _MAPS)
    return next((name for name in _ALLOCATORS if f"lib{name}" in maps), "libc")


def huge_pages(root: Path = Path("/")) -> str:
    """What the kernel does about transparent huge pages: always, madvise, never, or unknown."""
    modes = _read(root / _HUGE_PAGES)
    return modes.partition("[")[2].partition("]")[0] or "unknown"


def _quota(root: Path) -> float | None:
    """In cores; None for no limit."""
    limit, _, period = (_read(root / _CPU_MAX) or f"{_read(root / _QUOTA)} {_read(root / _PERIOD)}").partition(" ")
    try:
        cores = float(limit) / float(period)
    except (ValueError, ZeroDivisionError):  # "max", or nothing there
        return None
    return cores if cores > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
