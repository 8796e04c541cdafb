"""Free memory, the most that steps take of it, and the number of KV blocks that fit into the rest.

On a CPU, memory limits of control groups (version 1 and 2) count, of the process's group and of all groups above it.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import structlog
import torch

from .host_info import GROUPS, OWN_GROUPS, control_groups

_DEFAULT_FRACTION = {"cuda": 0.9, "cpu": 0.5, "mps": 0.5}
_UNLIMITED = 1 << 62
_CONTEXT_BYTES = 1 << 30  # more than CUDA takes for a process, and less than a model
_NOISE_BYTES = 64 << 20
_SETTLE_SECONDS, _QUIET_SECONDS = 30.0, 0.5

log = structlog.get_logger(__name__)


def blocks_that_fit(
    block_bytes: int, max_blocks: int, fraction: float, device: torch.device, num_workers: int = 1, reserved: int = 0
) -> int:
    """Return how many blocks fit in `fraction` of the free memory (0: the device's default), at most `max_blocks`.

    `num_workers` workers divide that fraction: they load at the same time, and each sees the same free memory. Of its
    part, each keeps `reserved` bytes for steps.
    """
    share = (fraction or _DEFAULT_FRACTION.get(device.type, 0.5)) / num_workers
    return min(max_blocks, max(0, int(free_bytes(device) * share) - reserved) // block_bytes)


class PeakMemory:
    """The most memory of a GPU that torch takes from here on, what its allocator keeps for later steps included."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self._device, self._before = device, torch.cuda.memory_reserved(device)

    def bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._device) - self._before


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory has run out, by torch's error or by the words of the driver, cuBLAS or Triton."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(words in str(error) for words in ("allocate memory", "out of memory", "ALLOC_FAILED"))


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on `device` now; on a GPU, once they have stopped rising."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # returns memory that torch's allocator kept after loading
        return _settled_bytes(device)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min(_available_bytes(), _cgroup_bytes())


def _settled_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, once they no longer rise: the driver frees those of a killed process late."""
    first, total = torch.cuda.mem_get_info(device)
    if total - first - torch.cuda.memory_reserved(device) < _CONTEXT_BYTES:
        return int(first)  # no other process uses it
    free, started_at, is_rising = first, time.monotonic(), True
    while is_rising and time.monotonic() - started_at < _SETTLE_SECONDS:
        time.sleep(_QUIET_SECONDS)
        before, free = free, torch.cuda.mem_get_info(device)[0]
        is_rising = free > before + _NOISE_BYTES
    if free > first + _NOISE_BYTES or is_rising:
        seconds = round(time.monotonic() - started_at, 1)
        log.warning("device_memory_awaited", freed_bytes=free - first, seconds=seconds, is_rising=is_rising)
    return int(free)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable; set --num-blocks")


def _cgroup_bytes(root: Path = "/" / GROUPS, own: Path = "/" / OWN_GROUPS) -> int:
    """Return the smallest headroom below the memory limits of the process's control groups, at most `_UNLIMITED`."""
    return min(map(_headroom, control_groups("memory", root, own)), default=_UNLIMITED)


def _headroom(group: Path) -> int:
    """Return the bytes left below one group's limits. Inactive file cache counts as free."""
    limits = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    current = _number(group / "memory.current")
    used = _number(group / "memory.usage_in_bytes") if current is None else current
    known = [limit for limit in limits if limit is not None]
    if not known or used is None:  # no control group, one outside the container, or the root group
        return _UNLIMITED
    return max(0, min(*known, _UNLIMITED) - used + _inactive_file_bytes(group))


def _number(file: Path) -> int | None:
    """Return the number in a file; None for "max" or an unreadable file."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _inactive_file_bytes(group: Path) -> int:
    try:
        words = (group / "memory.stat").read_text(encoding="ascii").split()
    except OSError:
        return 0
    # In version 1 only the totals include child groups.
    name = "total_inactive_file" if "total_inactive_file" in words else "inactive_file"
    return int(words[words.index(name) + 1]) if name in words else 0
