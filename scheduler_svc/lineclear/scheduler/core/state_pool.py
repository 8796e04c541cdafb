"""Recurrent states: which snapshots of them a worker keeps, and where.

A hybrid or state-space model has a state for each slot beside keys and values. A row continues from it and changes it,
so a request can use a cached prefix only up to a block behind which a state is kept. Such a *snapshot* belongs to a
block and is dropped when that leaves the prefix cache; the least recently used one gives way to the next.

Rows of a prompt end at its *boundaries*: behind its last full block, and where it leaves a prefix that other requests
have cached (as with the branching points of SGLang's MambaRadixCache, and the aligned chunks of vLLM). The plan after
such a row copies the state of the slot to a snapshot, before another row changes it. In that plan requests can already
begin with the state of the slot. Decode rows leave the states of an answer in the same way, behind blocks that are
published when the tokens are known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from lineclear.wire.messages import StateCopy


class StatePool:
    """The snapshots of one worker, numbered behind the states of its slots."""

    def __init__(self, num_slots: int, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self.num_hits = 0
        """Requests that began with a state."""
        self._first = num_slots
        self._free = [*reversed(range(num_slots, num_slots + num_snapshots))]
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # by block, the least recently used first
        self._reached: dict[int, int] = {}  # block -> slot: earlier plans left the state behind the block there
        self._planned: dict[int, int] = {}  # the same, of the plan being made

    @property
    def num_used(self) -> int:
        """Number of snapshots that keep a state."""
        return len(self._snapshots)

    def boundaries(self, num_shared: int, num_cached: int, num_full: int) -> list[int]:
        """Return behind how many of its blocks the states of a prompt are kept, ascending.

        It has `num_full` full blocks, of which `num_cached` are cached, and begins with a state behind `num_shared`.
        """
        return [count for count in sorted({num_cached, num_full}) if count > num_shared] if self.num_snapshots else []

    def num_usable(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks of a cached prefix there are up to the last one with a state."""
        count = len(blocks)
        while count and blocks[count - 1] not in self._snapshots and blocks[count - 1] not in self._reached:
            count -= 1
        return count

    @property
    def has_coming(self) -> bool:
        """Whether the plan being made leaves a state behind any block."""
        return bool(self._planned)

    def is_coming(self, blocks: Sequence[int]) -> bool:
        """Return whether the plan being made leaves a state behind one of `blocks`, for the plans after it."""
        return not self._planned.keys().isdisjoint(blocks)

    def has_state(self, block: int) -> bool:
        """Return whether a state is kept behind a block, or will be."""
        return block in self._snapshots or block in self._reached or block in self._planned

    def load(self, block: int) -> int:
        """Return the number of the state behind a block, for a request that begins with it."""
        self.num_hits += 1
        if block in self._snapshots:
            self._snapshots.move_to_end(block)
            return self._snapshots[block]
        return self._reached[block]

    def reach(self, block: int, slot: int) -> None:
        """Note that the plan being made leaves the state behind a block in `slot`."""
        assert not self.has_state(block)
        self._planned[block] = slot

    def end_plan(self) -> list[StateCopy]:
        """Return the copies that keep the states of earlier plans, for a plan that has rows.

        At most as many as there are snapshots: a plan writes each of them once.
        """
        copies = []
        for block, slot in islice(self._reached.items(), self.num_snapshots):
            number = self._free.pop() if self._free else self._snapshots.popitem(last=False)[1]
            self._snapshots[block] = number
            copies.append(StateCopy(slot, number))
        self._reached, self._planned = self._planned, {}
        return copies

    def leave(self, slot: int) -> None:
        """Forget the state of a slot whose sequence leaves it."""
        for block in [block for block, other in self._reached.items() if other == slot]:
            del self._reached[block]

    def drop(self, block: int) -> None:
        """Drop the state behind a block that leaves the prefix cache."""
        self._reached.pop(block, None)
        if (number := self._snapshots.pop(block, None)) is not None:
            self._free.append(number)

    def check(self, published: Sequence[bytes | None], references: Sequence[int], used_slots: Sequence[int]) -> None:
        """Check every invariant, given keys and references of all blocks, and the slots with a sequence.

        Raises AssertionError.
        """
        assert not self._planned, "a plan has not ended"
        found = sorted([*self._free, *self._snapshots.values()])
        assert found == [*range(self._first, self._first + self.num_snapshots)], "a snapshot twice, or lost"
        assert self._reached.keys().isdisjoint(self._snapshots), "a block with two states"
        for block in (*self._snapshots, *self._reached):
            assert published[block] is not None or references[block] == 1, "a state of no prefix"
        slots = [*self._reached.values()]
        assert len({*slots}) == len(slots), "a slot with two states"
        assert {*slots} <= {*used_slots}, "the state of a slot without sequence"
