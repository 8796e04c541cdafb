"""The slots: what the worker keeps of each sequence, and what a plan does to it.

Block tables and lengths live on the host, where plans arrive and where the metadata of a step is computed. The tokens
live on the device, so that a step can read what the one before it sampled without the host having seen it. A plan is
checked completely before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineclear.wire.messages import Decodes, Row, SlotInit, StepErrorKind, StepPlan

from .attention import Batch, IntArray, on_device
from .runner_interface import StepFailed


class Capacity(NamedTuple):
    """How much there is of everything, as Hello says it."""

    num_slots: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_step_tokens: int
    vocab_size: int


class PackedInputs(NamedTuple):
    """A step's rows in the order in which they lie in the packed batch."""

    batch: Batch
    reads: IntArray
    """[num_tokens]: where in the flattened token table each input token is."""
    positions: IntArray
    """[num_tokens]: its position in its sequence."""
    sample_rows: IntArray
    """[num_samples]: packed index of the token whose logits are sampled, in the plan's order."""
    sample_slots: list[int]
    sample_positions: list[int]
    """[num_samples]: the position that the sampled token will have."""
    writes: list[int]
    """[num_samples]: where in the flattened token table it will be."""


class InputBatch:
    """Tables with one line a slot."""

    def __init__(self, capacity: Capacity, device: torch.device) -> None:
        self.capacity = capacity
        self.device = device
        self.stride = capacity.max_model_len + 1  # the token sampled at the very end has a place, too
        self.tokens = torch.zeros((capacity.num_slots, self.stride), dtype=torch.int64, device=device)
        self.flat_tokens = self.tokens.view(-1)
        self._host_tokens = self.flat_tokens.numpy().data if device.type == "cpu" else None
        max_blocks = -(-capacity.max_model_len // capacity.block_size)
        self._blocks = np.zeros((capacity.num_slots, max_blocks), np.int32)
        self._flat_blocks = self._blocks.reshape(-1)
        self._num_blocks = [0] * capacity.num_slots
        self._num_computed = [0] * capacity.num_slots
        self._num_known = [0] * capacity.num_slots  # tokens in the table, sampled ones of launched steps included
        self.prompt_len = np.zeros(capacity.num_slots, np.int64)
        self.num_touched_blocks = 0
        """No plan since the last reset named a block from here on."""

    def reset(self) -> None:
        """Nobody owns a slot any more."""
        self._num_known = [0] * self.capacity.num_slots
        self.num_touched_blocks = 0

    def check(self, plan: StepPlan) -> None:
        """Raise StepFailed(PROTOCOL) for a plan that contradicts the slots. Changes nothing."""
        inits = {init.slot: init for init in plan.inits}
        if len(inits) != len(plan.inits):
            raise _protocol("two owners for one slot")
        for init in plan.inits:
            self._check_init(init)
        if len({*plan.decodes.slots, *[row.slot for row in plan.chunks]}) != plan.num_rows:
            raise _protocol("a slot has two rows")
        if plan.num_tokens > self.capacity.max_step_tokens:
            raise _protocol(f"more than {self.capacity.max_step_tokens} tokens in a step")
        self._check_decodes(plan.decodes, inits)
        for row in plan.chunks:
            self._check_row(row, inits)
        self._check_blocks(plan.zero_blocks)

    def apply(self, plan: StepPlan) -> PackedInputs:
        """Enter a checked plan and lay its rows out: single tokens first, the shortest context first of all."""
        for init in plan.inits:
            self._init_slot(init)
        decodes = plan.decodes
        for slot, block in decodes.new_blocks:
            self._grow(slot, (block,))
        for slot, start in zip(decodes.slots, decodes.starts, strict=True):
            self._num_computed[slot] = start + 1
            self._num_known[slot] = start + 2
        for row in plan.chunks:
            self._append(row)
        return self._pack(plan)

    def write_sampled(self, packed: PackedInputs, tokens: Tensor | list[int]) -> None:
        """Put the step's sampled tokens (in the plan's order; a tensor on the device) where later steps read them."""
        if self._host_tokens is None:
            assert isinstance(tokens, Tensor)
            self.flat_tokens.index_copy_(0, on_device(np.array(packed.writes, np.int64), self.device), tokens)
            return
        known = tokens if isinstance(tokens, list) else tokens.tolist()
        for place, token in zip(packed.writes, known, strict=True):
            self._host_tokens[place] = token

    # --- checking ---------------------------------------------------------------------------------------------------

    def _check_init(self, init: SlotInit) -> None:
        c = self.capacity
        if not 0 <= init.slot < c.num_slots:
            raise _protocol(f"slot {init.slot} of {c.num_slots}")
        if not 1 <= len(init.tokens) <= c.max_model_len or not 1 <= init.prompt_len <= len(init.tokens):
            raise _protocol(f"a sequence of {len(init.tokens)} tokens with a prompt of {init.prompt_len}")
        if min(init.tokens) < 0 or max(init.tokens) >= c.vocab_size:
            raise _protocol("a token outside the vocabulary")
        if len(init.blocks) * c.block_size >= len(init.tokens):
            raise _protocol("cached blocks for the whole sequence, so nothing is left to compute")
        self._check_blocks(init.blocks)
        s = init.sampling
        named = (*s.allowed_ids, *s.banned_ids, *s.stop_ids, *(i for i, _ in s.logit_bias))
        if named and (min(named) < 0 or max(named) >= c.vocab_size):
            raise _protocol("sampling parameters name a token outside the vocabulary")
        if s.temperature < 0 or s.repetition_penalty <= 0 or not 0 <= s.seed < 2**64:
            raise _protocol("sampling parameters out of range")

    def _check_decodes(self, decodes: Decodes, inits: Mapping[int, SlotInit]) -> None:
        """The usual one, of a slot that holds all it needs, is looked at here; any other as the row that it is."""
        c = self.capacity
        grown = dict(decodes.new_blocks)
        if len(grown) != len(decodes.new_blocks):
            raise _protocol("two blocks for one position")
        for slot, start in zip(decodes.slots, decodes.starts, strict=True):
            if (
                slot in grown
                or slot in inits
                or not 0 <= slot < c.num_slots
                or start != self._num_computed[slot]
                or start + 1 != self._num_known[slot]
                or start >= c.max_model_len
                or start >= self._num_blocks[slot] * c.block_size
            ):
                self._check_row(Row(slot, start, 1, True, (grown[slot],) if slot in grown else ()), inits)

    def _check_row(self, row: Row, inits: Mapping[int, SlotInit]) -> None:
        c = self.capacity
        if not 0 <= row.slot < c.num_slots:
            raise _protocol(f"slot {row.slot} of {c.num_slots}")
        init = inits.get(row.slot)
        if init is not None:
            known, num_blocks = len(init.tokens), len(init.blocks)
            computed = num_blocks * c.block_size
        else:
            known, num_blocks = self._num_known[row.slot], self._num_blocks[row.slot]
            computed = self._num_computed[row.slot]
        end = row.start + row.num_tokens
        if row.num_tokens < 1 or row.start != computed:
            raise _protocol(f"row of {row.num_tokens} positions at {row.start}, but {computed} are computed")
        if end > known or (row.sample and end != known):
            raise _protocol(f"row up to position {end}, but {known} tokens are known")
        if end > c.max_model_len:
            raise _protocol(f"position {end} is beyond the context of {c.max_model_len}")
        total = num_blocks + len(row.new_blocks)
        if total * c.block_size < end or total > self._blocks.shape[1]:
            raise _protocol(f"{total} blocks for {end} positions")
        self._check_blocks(row.new_blocks)

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        if blocks and (min(blocks) < 0 or max(blocks) >= self.capacity.num_blocks):
            raise _protocol("a block outside the pool")

    # --- entering ---------------------------------------------------------------------------------------------------

    def _init_slot(self, init: SlotInit) -> None:
        slot, count = init.slot, len(init.tokens)
        self.tokens[slot, :count].copy_(on_device(np.array(init.tokens, np.int64), self.device), non_blocking=True)
        self._note_blocks(init.blocks)
        self._blocks[slot, : len(init.blocks)] = init.blocks
        self._num_blocks[slot] = len(init.blocks)
        self._num_computed[slot] = len(init.blocks) * self.capacity.block_size
        self._num_known[slot] = count
        self.prompt_len[slot] = init.prompt_len

    def _append(self, row: Row) -> None:
        slot, end = row.slot, row.start + row.num_tokens
        self._grow(slot, row.new_blocks)
        self._num_computed[slot] = end
        if row.sample:
            self._num_known[slot] = end + 1

    def _grow(self, slot: int, blocks: Sequence[int]) -> None:
        if blocks:
            self._note_blocks(blocks)
            first = self._num_blocks[slot]
            self._num_blocks[slot] = first + len(blocks)
            self._blocks[slot, first : self._num_blocks[slot]] = blocks

    def _note_blocks(self, blocks: Sequence[int]) -> None:
        if blocks:
            self.num_touched_blocks = max(self.num_touched_blocks, max(blocks) + 1)

    def _pack(self, plan: StepPlan) -> PackedInputs:
        # In lists, and then into few arrays: for the usual handful of rows an operation on an array costs more than all
        # of them together, above all the first of its kind, whose code the matrix products drove out of the caches.
        # Rows of several tokens are spread by operations on arrays, or a long prompt would be a loop over its tokens.
        decodes, chunks = plan.decodes, plan.chunks
        slots = [*decodes.slots, *(row.slot for row in chunks)]
        starts = [*decodes.starts, *(row.start for row in chunks)]
        counts = [1] * len(decodes.slots) + [row.num_tokens for row in chunks]
        order = sorted(range(len(slots)), key=lambda i: (counts[i] > 1, starts[i] + counts[i]))
        first: list[int] = []
        num_tokens = 0
        last = [0] * len(slots)  # packed index of each plan row's last token
        for i in order:
            first.append(num_tokens)
            num_tokens += counts[i]
            last[i] = num_tokens - 1
        size, stride, width, block = self.capacity.block_size, self.stride, self._blocks.shape[1], self._blocks.item
        by_chunk = first, [counts[i] for i in order], [starts[i] for i in order], [slots[i] * width for i in order]
        single = order[: counts.count(1)]
        positions = [starts[i] for i in single]
        reads = [slots[i] * stride + starts[i] for i in single]
        cells = [block(slots[i], starts[i] // size) * size + starts[i] % size for i in single]
        sampling = [*range(len(decodes.slots)), *(i for i, x in enumerate(chunks, len(decodes.slots)) if x.sample)]
        sample_slots, ends = [slots[i] for i in sampling], [starts[i] + counts[i] for i in sampling]
        writes = [slot * stride + end for slot, end in zip(sample_slots, ends, strict=True)]
        firsts, num_queries, queries_start, tables = columns = np.array(by_chunk, np.int64)
        by_token = np.array((reads, positions, cells), np.int64)
        if len(single) < len(order):
            by_token = np.concatenate((by_token, self._expand_chunks(*columns[:, len(single) :])), axis=1)
        batch = Batch(size, firsts, num_queries, queries_start, tables, self._flat_blocks, by_token[2])
        sample_rows = np.array([last[i] for i in sampling], np.int64)
        return PackedInputs(batch, by_token[0], by_token[1], sample_rows, sample_slots, ends, writes)

    def _expand_chunks(self, first: IntArray, count: IntArray, start: IntArray, table: IntArray) -> IntArray:
        """[3, num_tokens] for rows that lie packed one after the other: what is read, the positions and their cells."""
        size, lines = self.capacity.block_size, table // self._blocks.shape[1] * self.stride
        offsets, tables, lines = np.repeat((start - first, table, lines), count, axis=1)
        positions = offsets + np.arange(first[0], first[0] + len(offsets))
        cells = self._flat_blocks[tables + positions // size].astype(np.int64) * size + positions % size
        return np.array((lines + positions, positions, cells))


def _protocol(summary: str) -> StepFailed:
    return StepFailed(StepErrorKind.PROTOCOL, summary)
