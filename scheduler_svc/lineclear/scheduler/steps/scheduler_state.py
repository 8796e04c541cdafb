"""The scheduler at one moment, for observers: a view of the core with the small numbers of the workers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lineclear.scheduler.core.views import CoreView, WorkerView

# The code of a block with this many references: see `NumberedWorker.block_map`.
_CODES = bytes([0, *(min(1 + count, 255) for count in range(1, 2**13))])


@dataclass(frozen=True)
class NumberedWorker:
    """A joined worker and its small number."""

    index: int
    view: WorkerView

    @cached_property
    def block_map(self) -> bytes:
        """A byte for each block: 0 free, 1 free with a cached prefix, else one more than its users, at most 255."""
        codes = bytearray(map(_CODES.__getitem__, self.view.references))
        for block in self.view.cached:
            codes[block] = 1
        return bytes(codes)

    @cached_property
    def blocks_used(self) -> int:
        """Blocks of running requests."""
        return len(self.view.references) - self.view.references.count(0)

    @cached_property
    def blocks_shared(self) -> int:
        """Blocks that several requests share."""
        return self.blocks_used - self.view.references.count(1)


@dataclass(frozen=True)
class SchedulerState:
    """The core at `taken_at`, on the engine's clock."""

    taken_at: float
    core: CoreView
    workers: tuple[NumberedWorker, ...]
    num_workers_wanted: int = 0
    """Workers that the server keeps running, joined or not; 0 if another program starts them."""

    def equals(self, other: SchedulerState | None) -> bool:
        """Return whether nothing has happened since `other`."""
        return other is not None and self.core == other.core
