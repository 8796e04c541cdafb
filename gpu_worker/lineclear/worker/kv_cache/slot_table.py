"""The slots as the host knows them (vLLM's block table): blocks, lengths, adapter. Plans are checked against them.

A plan is checked completely before anything changes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lineclear.wire.messages import BlockCopy, Decodes, Row, RowOutput, SlotInit, StepErrorKind, StepPlan
from lineclear.worker.attention.base import IntArray
from lineclear.worker.drafts.verification import Drafts
from lineclear.worker.loop.runner_interface import StepFailed


class Capacity(NamedTuple):
    """The worker's capacities, as in Hello."""

    num_slots: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_step_tokens: int
    vocab_size: int
    num_swap_blocks: int = 0
    has_recurrent_state: bool = False
    num_state_snapshots: int = 0


class SlotTable:
    """Blocks, lengths and adapter of each slot."""

    def __init__(self, capacity: Capacity, adapters: Container[int] = ()) -> None:
        """`adapters` are the indices that slots may name."""
        self.capacity = capacity
        max_blocks = -(-capacity.max_model_len // capacity.block_size)
        self.blocks = np.zeros((capacity.num_slots + 1, max_blocks), np.int32)
        """[num_slots + 1, most blocks]. The last row is that of padding rows: the block behind those of plans."""
        self.blocks[-1] = capacity.num_blocks
        self.num_tokens = [0] * capacity.num_slots
        """Known tokens, those included that launched steps sample."""
        self._num_blocks = [0] * capacity.num_slots
        self._num_computed = [0] * capacity.num_slots
        self._loaded_adapters = adapters
        self._adapters = [0] * (capacity.num_slots + 1)
        self.has_adapters = False
        """A slot has one, or had one before its next owner."""
        # Slots whose last row verified drafts: how many of them may have been accepted beyond the two figures above.
        self._num_drafted: dict[int, int] = {}
        self._deferred: dict[int, int] = {}  # slots whose last row sampled nothing: its last position
        self.snapshots: dict[int, int] = {}
        """Of recurrent states, by number: how many positions each is behind."""
        self.prompt_len = np.zeros(capacity.num_slots, np.int64)
        self.num_touched_blocks = 0
        """One more than the highest block of any plan since the last reset."""
        self.grown: list[tuple[int, int]] | None = None
        """Where `blocks` has changed since this was emptied, as (flat index, block). None: not recorded."""

    def reset(self) -> None:
        self.num_tokens = [0] * self.capacity.num_slots
        self._adapters, self.has_adapters = [0] * (self.capacity.num_slots + 1), False
        self._num_drafted.clear()
        self._deferred.clear()
        self.snapshots.clear()
        self.num_touched_blocks = 0
        if self.grown is not None:
            self.grown.clear()

    def check(self, plan: StepPlan) -> None:
        """Raise StepFailed(PROTOCOL) for a plan that contradicts the tables. Changes nothing."""
        inits = {init.slot: init for init in plan.inits}
        if len(inits) != len(plan.inits):
            raise _protocol_error("two owners for one slot")
        for init in plan.inits:
            _check_init(init, self.capacity, self._loaded_adapters)
        if plan.copy_states or (inits and self.capacity.has_recurrent_state):
            _check_states(plan, _copied_states(plan, self._num_computed, self.snapshots), self.capacity)
        if len({*plan.decodes.slots, *[row.slot for row in plan.chunks]}) != plan.num_rows:
            raise _protocol_error("a slot has two rows")
        if plan.num_tokens > self.capacity.max_step_tokens:
            raise _protocol_error(f"more than {self.capacity.max_step_tokens} tokens in a step")
        self._check_decodes(plan.decodes, inits)
        copied = _check_copies(plan.copy_blocks, self.capacity) if plan.copy_blocks else {}
        for row in plan.chunks:
            self._check_row(row, inits, copied)
        if copied:
            raise _protocol_error("a copy whose target no new sequence starts with")
        _check_blocks(plan.zero_blocks, self.capacity)

    def apply(self, plan: StepPlan, drafts: Drafts) -> None:
        """Apply a checked plan, whose rows verify `drafts`."""
        if plan.copy_states:
            copied = _copied_states(plan, self._num_computed, self.snapshots)
            self.snapshots.update((x, at) for x, at in copied.items() if x >= self.capacity.num_slots)
        for init in plan.inits:
            self._init_slot(init)
        decodes = plan.decodes
        if self._num_drafted:
            for slot in decodes.slots:
                self._num_drafted.pop(slot, None)
        if self._deferred:
            for row in plan.rows:
                if self._deferred.get(row.slot) == row.start:
                    del self._deferred[row.slot]
        for slot, block in decodes.new_blocks:
            self._grow(slot, (block,))
        for slot, start in zip(decodes.slots, decodes.starts, strict=True):
            self._num_computed[slot] = start + 1
            self.num_tokens[slot] = start + 2
        for row in plan.chunks:
            self._append(row)
        for slot, tokens in drafts.items():
            self._num_drafted[slot] = len(tokens)

    def drop_drafts(self, plan: StepPlan) -> None:
        """Note that the rows of a plan that was just applied verify no drafts."""
        for row in plan.chunks:
            self._num_drafted.pop(row.slot, None)

    def defer(self, slot: int, position: int) -> None:
        """Note that the row that would have sampled the token at `position` sampled nothing. It is planned again."""
        self._deferred.setdefault(slot, position - 1)

    def cell(self, slot: int, position: int) -> tuple[int, int]:
        """Return the block of a position, and its place there."""
        size = self.capacity.block_size
        return int(self.blocks[slot, position // size]), position % size

    def draft_cells(self, plan: StepPlan, drafts: Drafts) -> list[tuple[int, int]]:
        """Return (block, first cell) of each block that has cells of drafts."""
        size, found = self.capacity.block_size, []
        for row in plan.chunks:
            end = row.start + 1 + len(drafts.get(row.slot, ()))
            for position in range(row.start + 1, end):
                if position == row.start + 1 or position % size == 0:
                    found.append(self.cell(row.slot, position))
        return found

    def blocks_of(self, slot: int) -> IntArray:
        return self.blocks[slot, : self._num_blocks[slot]].astype(np.int64)

    def row_adapters(self, slots: list[int], counts: list[int]) -> npt.NDArray[np.int32] | None:
        """Return the adapter of each token of rows with these slots and numbers of tokens; None if no row has one."""
        adapters = [self._adapters[slot] for slot in slots]
        return np.repeat(np.array(adapters, np.int32), counts) if any(adapters) else None

    def _check_decodes(self, decodes: Decodes, inits: Mapping[int, SlotInit]) -> None:
        """Check the common case, a decode that needs no new block, inline; check other decodes as rows."""
        c = self.capacity
        grown = dict(decodes.new_blocks)
        if len(grown) != len(decodes.new_blocks):
            raise _protocol_error("two blocks for one position")
        for slot, start in zip(decodes.slots, decodes.starts, strict=True):
            if (
                slot in grown
                or slot in inits
                or not 0 <= slot < c.num_slots
                or start != self._num_computed[slot]
                or start + 1 != self.num_tokens[slot]
                or start >= c.max_model_len
                or start >= self._num_blocks[slot] * c.block_size
            ):
                self._check_row(Row(slot, start, 1, RowOutput.SAMPLE, (grown[slot],) if slot in grown else ()), inits)

    def _check_row(self, row: Row, inits: Mapping[int, SlotInit], copied: dict[int, int] | None = None) -> None:
        """Check a row, and remove the target from `copied` if the row starts behind copied positions."""
        c = self.capacity
        if not 0 <= row.slot < c.num_slots:
            raise _protocol_error(f"slot {row.slot} of {c.num_slots}")
        init = inits.get(row.slot)
        if init is not None:
            known, num_blocks = len(init.tokens), len(init.blocks)
            computed = num_blocks * c.block_size
            by_target = copied or {}
            for block in row.new_blocks if by_target else ():
                num_copied = by_target.pop(block, 0)
                computed += num_copied
                if num_copied < c.block_size:
                    break
        else:
            known, num_blocks = self.num_tokens[row.slot], self._num_blocks[row.slot]
            computed = self._num_computed[row.slot]
            is_again = row.start == self._deferred.get(row.slot)
            if is_again or computed < row.start <= computed + self._num_drafted.get(row.slot, 0):
                computed, known = row.start, row.start + 1
        end = row.start + row.num_tokens
        if row.num_tokens < 1 or row.start != computed:
            raise _protocol_error(f"row of {row.num_tokens} positions at {row.start}, but {computed} are computed")
        if row.output == RowOutput.SCORE and end == known:
            raise _protocol_error(f"score of position {end - 1}, but {known} tokens are known")
        if end > known or (row.sample and end != known):
            raise _protocol_error(f"row up to position {end}, but {known} tokens are known")
        if end > c.max_model_len:
            raise _protocol_error(f"position {end} is beyond the context of {c.max_model_len}")
        total = num_blocks + len(row.new_blocks)
        if total * c.block_size < end or total > self.blocks.shape[1]:
            raise _protocol_error(f"{total} blocks for {end} positions")
        _check_blocks(row.new_blocks, c)
        if row.num_drafts:
            _check_drafts(row, total, c, is_new=init is not None)

    def _init_slot(self, init: SlotInit) -> None:
        slot = init.slot
        self._num_drafted.pop(slot, None)
        self._deferred.pop(slot, None)
        self._num_blocks[slot] = 0
        self._grow(slot, init.blocks)
        self._num_computed[slot] = len(init.blocks) * self.capacity.block_size
        self.num_tokens[slot] = len(init.tokens)
        self.prompt_len[slot] = init.prompt_len
        if init.adapter or self._adapters[slot]:
            self._adapters[slot] = init.adapter
            self.has_adapters = any(self._adapters)

    def _append(self, row: Row) -> None:
        slot, end = row.slot, row.start + row.num_tokens
        self._grow(slot, row.new_blocks)
        self._num_computed[slot] = end
        self._num_drafted.pop(slot, None)
        if row.sample:
            self.num_tokens[slot] = end + 1

    def _grow(self, slot: int, blocks: Sequence[int]) -> None:
        if blocks:
            self.num_touched_blocks = max(self.num_touched_blocks, max(blocks) + 1)
            first = self._num_blocks[slot]
            self._num_blocks[slot] = first + len(blocks)
            self.blocks[slot, first : self._num_blocks[slot]] = blocks
            if self.grown is not None:
                self.grown += enumerate(blocks, slot * self.blocks.shape[1] + first)


def _check_init(init: SlotInit, c: Capacity, adapters: Container[int]) -> None:
    if not 0 <= init.slot < c.num_slots:
        raise _protocol_error(f"slot {init.slot} of {c.num_slots}")
    if not 1 <= len(init.tokens) <= c.max_model_len or not 1 <= init.prompt_len <= len(init.tokens):
        raise _protocol_error(f"a sequence of {len(init.tokens)} tokens with a prompt of {init.prompt_len}")
    if min(init.tokens) < 0 or max(init.tokens) >= c.vocab_size:
        raise _protocol_error("a token outside the vocabulary")
    if len(init.blocks) * c.block_size >= len(init.tokens):
        raise _protocol_error("cached blocks for the whole sequence, so nothing is left to compute")
    if init.adapter and init.adapter not in adapters:
        raise _protocol_error(f"adapter {init.adapter} is not loaded")
    _check_blocks(init.blocks, c)
    s = init.sampling
    lists = s.allowed_ids, s.banned_ids, s.begin_banned_ids, s.stop_ids, s.dry_breaker_ids
    sequences = *s.bad_words, *s.dry_breaker_sequences
    ids = [max(s.forced_first_id, 0), *chain(*lists, *sequences), *(i for i, _ in s.logit_bias)]
    if min(ids) < 0 or max(ids) >= c.vocab_size or min(map(len, sequences), default=2) < 2:
        raise _protocol_error("sampling parameters name a token outside the vocabulary")
    if s.temperature < 0 or s.repetition_penalty <= 0 or not 0 <= s.seed < 2**64:
        raise _protocol_error("sampling parameters out of range")


def _check_copies(copies: Sequence[BlockCopy], c: Capacity) -> dict[int, int]:
    """Return how many positions are copied, by target in the pool."""
    copied = {copy.target: copy.num_positions for copy in copies}
    if len(copied) != len(copies):
        raise _protocol_error("two copies to one block")
    _check_blocks([block for copy in copies for block in (copy.source, copy.target)], c, c.num_swap_blocks)
    read = {copy.source for copy in copies if copy.source >= c.num_blocks}
    for source, target, count in copies:
        if source < c.num_blocks and target < c.num_blocks:
            if not 0 < count < c.block_size:
                raise _protocol_error("a copy of a whole block, or of no positions")
        elif count != c.block_size or min(source, target) >= c.num_blocks or target in read:
            raise _protocol_error("a host block that is copied in part, to another one, or both read and written")
    return {target: count for target, count in copied.items() if target < c.num_blocks}


def _copied_states(plan: StepPlan, computed: Sequence[int], snapshots: Mapping[int, int]) -> dict[int, int]:
    """Return how many positions each copied state is behind, by target; -1 for one that was never written."""
    return {
        copy.target: computed[copy.source] if 0 <= copy.source < len(computed) else snapshots.get(copy.source, -1)
        for copy in plan.copy_states
    }


def _check_states(plan: StepPlan, copied: Mapping[int, int], c: Capacity) -> None:
    """Check copies of recurrent states, and that each new sequence starts behind the positions of its state."""
    states = [state for copy in plan.copy_states for state in copy]
    if states and (not c.has_recurrent_state or min(states) < 0 or max(states) >= c.num_slots + c.num_state_snapshots):
        raise _protocol_error("a copy of a recurrent state that does not exist")
    if len(copied) != len(plan.copy_states):
        raise _protocol_error("two copies to one recurrent state")
    starts = {row.slot: row.start for row in plan.rows}
    slots = {init.slot: starts.get(init.slot, len(init.blocks) * c.block_size) for init in plan.inits}
    if any(target < c.num_slots and target not in slots for target in copied):
        raise _protocol_error("a copy to the recurrent state of a sequence that runs")
    for slot, start in slots.items():
        if (behind := copied.get(slot, 0)) != start:
            raise _protocol_error(f"a sequence that starts at {start} with a state behind {behind} positions")


def _check_drafts(row: Row, num_blocks: int, c: Capacity, *, is_new: bool) -> None:
    end = row.start + row.num_tokens + row.num_drafts
    if row.num_drafts < 0 or row.num_tokens != 1 or not row.sample or is_new:
        raise _protocol_error("drafts behind another token than the last known one")
    if num_blocks * c.block_size < end or end > c.max_model_len:
        raise _protocol_error(f"{num_blocks} blocks, in a context of {c.max_model_len}, for drafts up to {end}")


def _check_blocks(blocks: Sequence[int], c: Capacity, num_swap_blocks: int = 0) -> None:
    if blocks and (min(blocks) < 0 or max(blocks) >= c.num_blocks + num_swap_blocks):
        raise _protocol_error("a block outside the pool")


def _protocol_error(summary: str) -> StepFailed:
    return StepFailed(StepErrorKind.PROTOCOL, summary)
