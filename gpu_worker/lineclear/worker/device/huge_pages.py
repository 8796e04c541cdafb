"""An arena of huge pages for memory that every step reads from end to end, such as weights and KV pools.

With 4 KiB pages, hardware prefetching stops at the end of each page, and each page needs an entry in the TLB.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20
_ALIGNMENT_BYTES = 64


class HugePageArena:
    """Allocates tensors from chunks of memory. A chunk lives as long as any tensor in it. Not thread-safe."""

    def __init__(self) -> None:
        self._free: Tensor = torch.empty(0, dtype=torch.uint8)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous CPU tensor of zeros."""
        size = -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if size > len(self._free):
            self._free = _map_chunk(max(size, _CHUNK_BYTES))
        taken, self._free = self._free[:size], self._free[size:]
        return taken[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _map_chunk(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # EINVAL from a Linux kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
