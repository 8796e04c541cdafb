"""Memory for what every step reads from end to end: in huge pages where the system lends them.

The processor's own prefetching stops at the end of a page, and each 4 KiB page costs an entry of its translation cache.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20
_ALIGNMENT_BYTES = 64


class HugePageArena:
    """Gives out tensors from chunks of memory; a chunk lives as long as any tensor of it. Not thread-safe."""

    def __init__(self) -> None:
        self._left: Tensor = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on the CPU, filled with zeros."""
        size = -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if size > len(self._left):
            self._left = _chunk(max(size, _CHUNK_BYTES))
        taken, self._left = self._left[:size], self._left[size:]
        return taken[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _chunk(size: int) -> Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
