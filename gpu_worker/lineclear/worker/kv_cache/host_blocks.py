"""Host blocks: host memory for the KV blocks of preempted sequences, pinned where the pools are on a GPU.

A host block is a row of bytes, the values of all layers side by side, so a block crosses the bus in one copy and the
layout of the pools does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lineclear.wire.messages import BlockCopy
from lineclear.worker.attention.base import AttentionBackend
from lineclear.worker.device.staging import to_device

_STAGED_BLOCKS = 32
"""Blocks that are gathered on the device at once. It bounds the memory for that: 64 MiB for an 8 B Llama."""
_MEASURED_BLOCKS, _NUM_TRIALS = 8, 3


class HostBlocks:
    """`count` host blocks from number `first` on. Copies are queued on the device's stream. Raises RuntimeError."""

    def __init__(self, backend: AttentionBackend, first: int, count: int) -> None:
        self._backend, self._first = backend, first
        self._views = backend.block_views
        self._widths = [view[0].numel() * view.element_size() for view in self._views]
        pin_memory = backend.device.type == "cuda"
        self._rows = torch.empty((count, sum(self._widths)), dtype=torch.uint8, pin_memory=pin_memory)
        self.block_seconds = self._measure()
        """Seconds to copy a block out or in."""

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Make the copies of a plan. The order equals reading all before writing: no plan reads its swapped blocks."""
        within = [copy for copy in copies if max(copy.source, copy.target) < self._first]
        for part in _parts([copy for copy in copies if copy.target >= self._first]):
            self._swap_out(part)
        if within:
            self._backend.copy(within)
        for part in _parts([copy for copy in copies if copy.source >= self._first]):
            self._swap_in(part)

    def _swap_out(self, copies: Sequence[BlockCopy]) -> None:
        sources = self._indices([copy.source for copy in copies])
        read = [view.index_select(0, sources).view(len(copies), -1).view(torch.uint8) for view in self._views]
        for copy, staged in zip(copies, torch.cat(read, dim=1), strict=True):
            self._rows[copy.target - self._first].copy_(staged, non_blocking=True)

    def _swap_in(self, copies: Sequence[BlockCopy]) -> None:
        targets = self._indices([copy.target for copy in copies])
        staged = torch.empty((len(copies), sum(self._widths)), dtype=torch.uint8, device=self._backend.device)
        for copy, row in zip(copies, staged, strict=True):
            row.copy_(self._rows[copy.source - self._first], non_blocking=True)
        for view, values in zip(self._views, torch.split(staged, self._widths, dim=1), strict=True):
            view.index_copy_(0, targets, values.contiguous().view(view.dtype).view(len(copies), *view.shape[1:]))

    def _indices(self, blocks: Sequence[int]) -> Tensor:
        return to_device(np.array(blocks, np.int64), self._backend.device)

    def _measure(self) -> float:
        """Copy some unused blocks out and in; return the seconds of one copy."""
        count, size = min(_MEASURED_BLOCKS, len(self._rows), self._first), self._backend.block_size
        out = [BlockCopy(block, self._first + block, size) for block in range(count)]
        back = [BlockCopy(copy.target, copy.source, size) for copy in out]
        seconds = []
        for _ in range(_NUM_TRIALS):
            self._synchronize()
            started_at = time.perf_counter()
            self.copy(out)
            self.copy(back)
            self._synchronize()
            seconds.append(time.perf_counter() - started_at)
        return min(seconds) / (2 * count)

    def _synchronize(self) -> None:
        if self._backend.device.type == "cuda":
            torch.cuda.synchronize(self._backend.device)


def _parts(copies: Sequence[BlockCopy]) -> Iterator[Sequence[BlockCopy]]:
    for first in range(0, len(copies), _STAGED_BLOCKS):
        yield copies[first : first + _STAGED_BLOCKS]
