"""How much memory is free for the KV pool, and how many blocks that makes."""

from __future__ import annotations

from pathlib import Path

import torch

_DEFAULT_FRACTION = {"cuda": 0.85, "cpu": 0.5, "mps": 0.5}
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def blocks_that_fit(block_bytes: int, most: int, fraction: float, device: torch.device) -> int:
    """Blocks in `fraction` (0: the device's default) of the free memory, at most `most`. May be 0."""
    share = fraction or _DEFAULT_FRACTION.get(device.type, 0.5)
    return min(most, int(free_bytes(device) * share) // block_bytes)


def free_bytes(device: torch.device) -> int:
    """What can be allocated on `device` now. On a CPU the container's limit counts, too."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left in torch's own pool is free as well
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min(_available_bytes(), _cgroup_bytes())


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo does not say how much memory is available; set num_blocks")


def _cgroup_bytes(root: Path = _CGROUP, own: Path = _OWN_CGROUP) -> int:
    """What the memory limits of our control group and of those around it leave."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    inner = root / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    return min(_room(group) for group in (inner, *inner.parents) if group.is_relative_to(root))


def _room(group: Path) -> int:
    """What one group's limit leaves; cached files that the kernel would drop count as free."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        statistics = (group / "memory.stat").read_text(encoding="ascii").split()
    except OSError:  # no control group of version 2, not seen from within the container, or the outermost one
        return 1 << 62
    if limit == "max":
        return 1 << 62
    droppable = int(statistics[statistics.index("inactive_file") + 1]) if "inactive_file" in statistics else 0
    return max(0, int(limit) - used + droppable)
