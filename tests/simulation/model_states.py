"""Model of the recurrent states of a worker: which are kept, where, and which copies a plan has (I32)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from simulation.invariant_error import require
from simulation.model_sequence import ModelSequence

from lineclear.wire.messages import Hello, SlotInit, StateCopy


class ModelStates:
    """The states of one worker by block, as long as the block is published."""

    def __init__(self, hello: Hello, prefix_cache: bool) -> None:
        self.is_recurrent = hello.has_recurrent_state
        self._num_slots = hello.num_slots
        self._num_kept = hello.num_state_snapshots if hello.has_recurrent_state and prefix_cache else 0
        self._kept: dict[int, int] = {}  # block -> snapshot, least recently used first
        self._left: dict[int, tuple[ModelSequence, int]] = {}  # block -> admission whose slot has the state behind it
        self._leaving: dict[int, tuple[ModelSequence, int]] = {}  # the same, of the plan that is being checked
        self.coming: list[tuple[object, tuple[int, ...]]] = []  # scope and tokens before the states of the last plan
        self._loads: dict[int, int] = {}  # slot -> state that it begins with, of the plan
        self._saves: deque[StateCopy] = deque()
        self.num_hits = 0

    def begin_plan(self, copies: Sequence[StateCopy]) -> None:
        """Note the copies of a plan."""
        require(self.is_recurrent or not copies, "I32", "a model without recurrent state copies none")
        require(len({copy.target for copy in copies}) == len(copies), "I32", "a state is the target of one copy")
        self._loads = {copy.target: copy.source for copy in copies if copy.target < self._num_slots}
        self._saves = deque(copy for copy in copies if copy.target >= self._num_slots)
        self.coming.clear()

    @property
    def num_places(self) -> int:
        return self._num_kept

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def num_usable(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks of a cached prefix there are up to the last one with a state."""
        ends = [count for count, block in enumerate(blocks, 1) if block in self._kept or self._slot(block) is not None]
        return ends[-1] if ends else 0

    def _slot(self, block: int) -> int | None:
        """Return the slot in which an earlier plan left the state behind a block, if it is still there."""
        sequence, admission = self._left.get(block, (None, 0))
        is_there = sequence is not None and sequence.is_running and sequence.admission_count == admission
        return sequence.slot if sequence is not None and is_there and sequence.slot >= 0 else None

    def boundaries(self, num_shared: int, num_cached: int, num_full: int) -> list[int]:
        """Return how many blocks of a prompt lie before each of its states that are kept."""
        counts = {num_cached, num_full} if self._num_kept else set[int]()
        return sorted(count for count in counts if count > num_shared)

    def check_init(self, init: SlotInit) -> None:
        """Check the state that a request begins with."""
        source = self._loads.pop(init.slot, None)
        if not self.is_recurrent or not init.blocks:
            return require(source is None, "I32", "a request without a cached prefix begins with the zero state")
        last = init.blocks[-1]
        self.num_hits += 1
        if last in self._kept:
            self._kept[last] = self._kept.pop(last)
        right = self._kept[last] if last in self._kept else self._slot(last)
        return require(source == right, "I32", f"a request begins with state {right} of its prefix, not {source}")

    def has_state(self, block: int) -> bool:
        return block in self._kept or self._slot(block) is not None or block in self._leaving

    def leave(self, block: int, sequence: ModelSequence, key: tuple[object, tuple[int, ...]] | None) -> None:
        """Note that the plan leaves the state behind a block in the slot of `sequence`; `key` if it is published."""
        self._leaving[block] = sequence, sequence.admission_count
        self.coming += [] if key is None else [key]

    def is_coming(self, blocks: Sequence[int]) -> bool:
        return not self._leaving.keys().isdisjoint(blocks)

    def drop(self, block: int) -> None:
        """Drop the state behind a block that leaves the prefix cache, or does not enter it."""
        for states in (self._kept, self._left, self._leaving):
            states.pop(block, None)  # type: ignore[attr-defined]

    def end_plan(self) -> None:
        """Check that the plan keeps the states that earlier plans left: each in an unused place, or the oldest one."""
        require(not self._loads, "I32", "only slots of requests that start get a state")
        wanted = [(block, slot) for block in self._left if (slot := self._slot(block)) is not None]
        for block, slot in wanted[: self._num_kept]:
            require(bool(self._saves), "I32", "a state is kept by the plan after the row that leaves it")
            copy = self._saves.popleft()
            require(copy.source == slot, "I32", f"the state of slot {slot} is kept, not that of {copy.source}")
            free = {*range(self._num_slots, self._num_slots + self._num_kept)} - {*self._kept.values()}
            if not free:
                free = {self._kept.pop(next(iter(self._kept)))}
            require(
                copy.target in free, "I32", "a state is kept in a free place, or that of the least recently used one"
            )
            self._kept[block] = copy.target
        require(not self._saves, "I32", "only states behind published blocks are kept")
        self._left, self._leaving = self._leaving, {}
