"""What this process may use of its machine, and what of it would make steps faster: cores, allocator, huge pages.

Read from /proc, /sys and the control group; where they are silent, the answer is that nothing is known.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CONTROL_GROUPS = Path("proc/self/cgroup")
_UNIFIED = Path("sys/fs/cgroup")
_CPU_CONTROLLER = Path("sys/fs/cgroup/cpu")
_MAPS = Path("proc/self/maps")
_HUGE_PAGES = Path("sys/kernel/mm/transparent_hugepage/enabled")
_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may run on at once, at least 1: those it is bound to, and what its control group may take.

    A container with a quota of two cores on a machine of 64 sees 64: as many threads would be stopped most of the time,
    and each operation waits for its last thread.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(root)
    return bound if quota is None else max(1, min(bound, math.ceil(quota)))


def allocator(root: Path = Path("/")) -> str:
    """The library that malloc comes from, "libc" where no other one is loaded."""
    maps = _read(root / _MAPS)
    return next((name for name in _ALLOCATORS if f"lib{name}" in maps), "libc")


def huge_pages(root: Path = Path("/")) -> str:
    """What the kernel does about transparent huge pages: always, madvise, never, or unknown."""
    modes = _read(root / _HUGE_PAGES)
    return modes.partition("[")[2].partition("]")[0] or "unknown"


def _quota(root: Path) -> float | None:
    """The smallest quota, in cores, of the control group of this process and of those around it; None for no limit."""
    found = [_quota_of(folder) for folder in _group_folders(root)]
    return min((cores for cores in found if cores is not None), default=None)


def _group_folders(root: Path) -> list[Path]:
    """Of both versions, from the mount down to the group of this process.

    Without a namespace of its own, as in a systemd service, a process has its limits further down than the mount.
    """
    folders = [root / _UNIFIED, root / _CPU_CONTROLLER]
    for line in _read(root / _CONTROL_GROUPS).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers == "" or "cpu" in controllers.split(","):
            mount = root / (_CPU_CONTROLLER if controllers else _UNIFIED)
            group = mount / name.lstrip("/")
            folders += [group, *(parent for parent in group.parents if mount in parent.parents)]
    return folders


def _quota_of(folder: Path) -> float | None:
    """Of one group, in cores."""
    limit, _, period = (
        _read(folder / "cpu.max") or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    ).partition(" ")
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
