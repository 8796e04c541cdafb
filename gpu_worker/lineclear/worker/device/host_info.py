"""The host as far as it affects step times: usable cores, allocator, huge pages.

Read from /proc, /sys and the control group. Missing information counts as no limit or as unknown.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

OWN_GROUPS = Path("proc/self/cgroup")
GROUPS = Path("sys/fs/cgroup")
_MAPS = Path("proc/self/maps")
_HUGE_PAGES = Path("sys/kernel/mm/transparent_hugepage/enabled")
_ALLOCATORS = ("tcmalloc", "jemalloc", "mimalloc")


class _Quota:
    num_workers = 1


def divide_quota(num_workers: int) -> None:
    """Let `usable_cores` count this worker's part of the quota only: its control group holds this number of workers."""
    _Quota.num_workers = num_workers


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that CPU affinity and control group quotas let this process use at once, at least 1.

    A container with a quota of two cores on a machine of 64 sees 64. With 64 threads, the kernel throttles most of
    them, and each operation waits for its last thread.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    groups = control_groups("cpu", root / GROUPS, root / OWN_GROUPS)
    quota = min((cores for cores in map(_quota_of, groups) if cores is not None), default=None)
    return bound if quota is None else max(1, min(bound, math.ceil(quota / _Quota.num_workers)))


def allocator(root: Path = Path("/")) -> str:
    """Return the loaded malloc library; "libc" if no other one is loaded."""
    maps = _read(root / _MAPS)
    return next((name for name in _ALLOCATORS if f"lib{name}" in maps), "libc")


def huge_pages(root: Path = Path("/")) -> str:
    """Return the kernel's mode of transparent huge pages: always, madvise, never, or unknown."""
    modes = _read(root / _HUGE_PAGES)
    return modes.partition("[")[2].partition("]")[0] or "unknown"


def control_groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of the process's group of a controller and of those above it, for both versions of groups.

    Lines of `own` are `0::PATH` for version 2, mounted at `root` or at `unified` there, and `ID:CONTROLLERS:PATH` for
    version 1. In a container the mounted root may be the group itself, so the root is always included.
    """
    paths = {"": "", controller: ""}
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            if name in paths:
                paths[name] = path.lstrip("/")
    for mount, path in ((root, paths[""]), (root / "unified", paths[""]), (root / controller, paths[controller])):
        inner = mount / path
        yield from (group for group in (inner, *inner.parents) if group.is_relative_to(mount))


def _quota_of(folder: Path) -> float | None:
    """Return the quota of one group, in cores; None for no limit."""
    version_1 = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    limit, _, period = (_read(folder / "cpu.max") or version_1).partition(" ")
    try:
        cores = float(limit) / float(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return None
    return cores if cores > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
