"""The persistent batch (vLLM's `InputBatch`): tokens, block table and lengths of each slot, updated by plans.

Block tables and lengths live on the host, where plans arrive and attention metadata is computed. Tokens live on the
device: a step reads the tokens sampled by the previous step before the host has seen them. A plan is checked completely
before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lineclear.wire.messages import BlockCopy, Decodes, Row, RowOutput, SlotInit, StepErrorKind, StepPlan

from .attention.base import Batch, IntArray, to_device
from .drafts.verification import NO_DRAFTS, Drafts
from .runner_interface import StepFailed


class Capacity(NamedTuple):
    """The worker's capacities, as in Hello."""

    num_slots: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_step_tokens: int
    vocab_size: int


class OutputRow(NamedTuple):
    """A row that reports scores or a vector."""

    output: RowOutput
    slot: int
    first: int
    """Packed index of its first token."""
    num_tokens: int
    token_index: int
    """Index of its first token in the flattened token table."""
    is_last: bool
    """It has the last known token of the sequence."""


class PackedInputs(NamedTuple):
    """Inputs of a step. Tokens are in packed order, samples in the plan's order."""

    batch: Batch
    read_indices: IntArray
    """[num_tokens]: index of each input token in the flattened token table."""
    positions: IntArray
    """[num_tokens]: position of each token in its sequence."""
    sample_rows: IntArray
    """[num_samples]: packed index of the token whose logits are sampled."""
    sample_slots: list[int]
    sample_positions: list[int]
    """[num_samples]: position of the sampled token."""
    write_indices: list[int]
    """[num_samples]: index of the sampled token in the flattened token table."""
    output_rows: tuple[OutputRow, ...]
    """The rows that report scores or a vector, in the plan's order."""
    adapters: npt.NDArray[np.int32] | None = None
    """[num_tokens]: index of the adapter of each input token, 0 for none. None: no row has one."""


class InputBatch:
    """Tables with one row per slot."""

    def __init__(self, capacity: Capacity, device: torch.device, adapters: Container[int] = ()) -> None:
        """`adapters` are the indices that slots may name."""
        self.capacity = capacity
        self.device = device
        self.stride = capacity.max_model_len + 1  # includes the token sampled after the last position
        self.tokens = torch.zeros((capacity.num_slots, self.stride), dtype=torch.int64, device=device)
        self.flat_tokens = self.tokens.view(-1)
        self._host_token_table = self.flat_tokens.numpy().data if device.type == "cpu" else None
        max_blocks = -(-capacity.max_model_len // capacity.block_size)
        self._blocks = np.zeros((capacity.num_slots, max_blocks), np.int32)
        self._flat_blocks = self._blocks.reshape(-1)
        self._num_blocks = [0] * capacity.num_slots
        self._num_computed = [0] * capacity.num_slots
        self._num_tokens = [0] * capacity.num_slots  # includes tokens sampled by launched steps
        self._loaded_adapters = adapters
        self._adapters = [0] * capacity.num_slots
        self._has_adapters = False  # a slot has one, or had one before its next owner
        # Slots whose last row verified drafts: how many of them may have been accepted beyond the two figures above.
        self._num_drafted: dict[int, int] = {}
        self._deferred: dict[int, int] = {}  # slots whose last row sampled nothing: its last position
        self.prompt_len = np.zeros(capacity.num_slots, np.int64)
        self.num_touched_blocks = 0
        """One more than the highest block of any plan since the last reset."""

    def reset(self) -> None:
        """Free every slot."""
        self._num_tokens = [0] * self.capacity.num_slots
        self._adapters, self._has_adapters = [0] * self.capacity.num_slots, False
        self._num_drafted.clear()
        self._deferred.clear()
        self.num_touched_blocks = 0

    def check(self, plan: StepPlan) -> None:
        """Raise StepFailed(PROTOCOL) for a plan that contradicts the tables. Changes nothing."""
        inits = {init.slot: init for init in plan.inits}
        if len(inits) != len(plan.inits):
            raise _protocol_error("two owners for one slot")
        for init in plan.inits:
            self._check_init(init)
        if len({*plan.decodes.slots, *[row.slot for row in plan.chunks]}) != plan.num_rows:
            raise _protocol_error("a slot has two rows")
        if plan.num_tokens > self.capacity.max_step_tokens:
            raise _protocol_error(f"more than {self.capacity.max_step_tokens} tokens in a step")
        self._check_decodes(plan.decodes, inits)
        copied = self._check_copies(plan.copy_blocks) if plan.copy_blocks else {}
        for row in plan.chunks:
            self._check_row(row, inits, copied)
        if copied:
            raise _protocol_error("a copy whose target no new sequence starts with")
        self._check_blocks(plan.zero_blocks)

    def apply(self, plan: StepPlan, drafts: Drafts = NO_DRAFTS) -> PackedInputs:
        """Apply a checked plan and pack its rows: rows of one token first, each kind by ascending context length.

        A row with drafts is packed as one of several tokens, and samples at each of them.
        """
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
            self._num_tokens[slot] = start + 2
        for row in plan.chunks:
            self._append(row)
        for slot, tokens in drafts.items():
            self._num_drafted[slot] = len(tokens)
            self._write_drafts(slot, self._num_computed[slot], tokens)
        return self._pack(plan, drafts)

    def without_drafts(self, plan: StepPlan) -> PackedInputs:
        """Pack the rows of a plan that was just applied again, without drafts."""
        for row in plan.chunks:
            self._num_drafted.pop(row.slot, None)
        return self._pack(plan, NO_DRAFTS)

    def defer(self, slot: int, position: int) -> None:
        """Note that the row that would have sampled the token at `position` sampled nothing. It is planned again."""
        self._deferred.setdefault(slot, position - 1)

    def cell(self, slot: int, position: int) -> tuple[int, int]:
        """Return the block of a position, and its place there."""
        size = self.capacity.block_size
        return int(self._blocks[slot, position // size]), position % size

    def draft_cells(self, plan: StepPlan, drafts: Drafts) -> list[tuple[int, int]]:
        """Return (block, first cell) of each block that has cells of drafts."""
        size, found = self.capacity.block_size, []
        for row in plan.chunks:
            end = row.start + 1 + len(drafts.get(row.slot, ()))
            for position in range(row.start + 1, end):
                if position == row.start + 1 or position % size == 0:
                    found.append(self.cell(row.slot, position))
        return found

    def read_tokens(self, slot: int, start: int, end: int) -> list[int]:
        """Return the tokens of a slot at positions [start, end). Waits for the device."""
        tokens: list[int] = self.tokens[slot, start:end].tolist()
        return tokens

    def blocks_of(self, slot: int) -> IntArray:
        """Return a copy of the block table of a slot."""
        return self._blocks[slot, : self._num_blocks[slot]].astype(np.int64)

    def fetch_last_tokens(self, packed: PackedInputs, rows: list[int]) -> Callable[[], list[int]]:
        """Return a function that waits for the token before the sampled position of these sampling rows.

        Queue no work of the step before this call: on CUDA it would be waited for.
        """
        indices = [packed.write_indices[row] - 1 for row in rows]
        table = self._host_token_table
        if table is not None:
            return lambda: [table[index] for index in indices]
        tokens = self.flat_tokens.index_select(0, to_device(np.array(indices, np.int64), self.device))
        if self.device.type != "cuda":
            return tokens.tolist
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True).copy_(tokens, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.device))

        def wait() -> list[int]:
            copied.synchronize()
            return [int(token) for token in host.tolist()]

        return wait

    def write_sampled(self, packed: PackedInputs, tokens: Tensor | list[int]) -> None:
        """Write the step's sampled tokens, in the plan's order, to the token table: a list on a CPU, else a tensor."""
        if self._host_token_table is None:
            assert isinstance(tokens, Tensor)
            self.flat_tokens.index_copy_(0, to_device(np.array(packed.write_indices, np.int64), self.device), tokens)
            return
        host_tokens = tokens if isinstance(tokens, list) else tokens.tolist()
        for index, token in zip(packed.write_indices, host_tokens, strict=True):
            self._host_token_table[index] = token

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check_init(self, init: SlotInit) -> None:
        c = self.capacity
        if not 0 <= init.slot < c.num_slots:
            raise _protocol_error(f"slot {init.slot} of {c.num_slots}")
        if not 1 <= len(init.tokens) <= c.max_model_len or not 1 <= init.prompt_len <= len(init.tokens):
            raise _protocol_error(f"a sequence of {len(init.tokens)} tokens with a prompt of {init.prompt_len}")
        if min(init.tokens) < 0 or max(init.tokens) >= c.vocab_size:
            raise _protocol_error("a token outside the vocabulary")
        if len(init.blocks) * c.block_size >= len(init.tokens):
            raise _protocol_error("cached blocks for the whole sequence, so nothing is left to compute")
        if init.adapter and init.adapter not in self._loaded_adapters:
            raise _protocol_error(f"adapter {init.adapter} is not loaded")
        self._check_blocks(init.blocks)
        s = init.sampling
        lists = s.allowed_ids, s.banned_ids, s.begin_banned_ids, s.stop_ids, s.dry_breaker_ids
        sequences = *s.bad_words, *s.dry_breaker_sequences
        ids = [max(s.forced_first_id, 0), *chain(*lists, *sequences), *(i for i, _ in s.logit_bias)]
        if min(ids) < 0 or max(ids) >= c.vocab_size or min(map(len, sequences), default=2) < 2:
            raise _protocol_error("sampling parameters name a token outside the vocabulary")
        if s.temperature < 0 or s.repetition_penalty <= 0 or not 0 <= s.seed < 2**64:
            raise _protocol_error("sampling parameters out of range")

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
                or start + 1 != self._num_tokens[slot]
                or start >= c.max_model_len
                or start >= self._num_blocks[slot] * c.block_size
            ):
                self._check_row(Row(slot, start, 1, RowOutput.SAMPLE, (grown[slot],) if slot in grown else ()), inits)

    def _check_copies(self, copies: Sequence[BlockCopy]) -> dict[int, int]:
        """Return how many positions are copied, by target."""
        copied = {copy.target: copy.num_positions for copy in copies}
        if len(copied) != len(copies):
            raise _protocol_error("two copies to one block")
        self._check_blocks([block for copy in copies for block in (copy.source, copy.target)])
        if not 0 < min(copied.values()) <= max(copied.values()) < self.capacity.block_size:
            raise _protocol_error("a copy of a whole block, or of no positions")
        return copied

    def _check_row(self, row: Row, inits: Mapping[int, SlotInit], copied: dict[int, int] | None = None) -> None:
        """Check a row, and remove the target from `copied` if the row starts behind copied positions."""
        c = self.capacity
        if not 0 <= row.slot < c.num_slots:
            raise _protocol_error(f"slot {row.slot} of {c.num_slots}")
        init = inits.get(row.slot)
        if init is not None:
            known, num_blocks = len(init.tokens), len(init.blocks)
            computed = num_blocks * c.block_size
            if copied and row.new_blocks:
                computed += copied.pop(row.new_blocks[0], 0)
        else:
            known, num_blocks = self._num_tokens[row.slot], self._num_blocks[row.slot]
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
        if total * c.block_size < end or total > self._blocks.shape[1]:
            raise _protocol_error(f"{total} blocks for {end} positions")
        self._check_blocks(row.new_blocks)
        if row.num_drafts:
            end += row.num_drafts
            if row.num_drafts < 0 or row.num_tokens != 1 or not row.sample or init is not None:
                raise _protocol_error("drafts behind another token than the last known one")
            if total * c.block_size < end or end > c.max_model_len:
                raise _protocol_error(f"{total} blocks, in a context of {c.max_model_len}, for drafts up to {end}")

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        if blocks and (min(blocks) < 0 or max(blocks) >= self.capacity.num_blocks):
            raise _protocol_error("a block outside the pool")

    # --- updates ----------------------------------------------------------------------------------------------------

    def _init_slot(self, init: SlotInit) -> None:
        slot, count = init.slot, len(init.tokens)
        self._num_drafted.pop(slot, None)
        self._deferred.pop(slot, None)
        self.tokens[slot, :count].copy_(to_device(np.array(init.tokens, np.int64), self.device), non_blocking=True)
        self._note_blocks(init.blocks)
        self._blocks[slot, : len(init.blocks)] = init.blocks
        self._num_blocks[slot] = len(init.blocks)
        self._num_computed[slot] = len(init.blocks) * self.capacity.block_size
        self._num_tokens[slot] = count
        self.prompt_len[slot] = init.prompt_len
        if init.adapter or self._adapters[slot]:
            self._adapters[slot] = init.adapter
            self._has_adapters = any(self._adapters)

    def _append(self, row: Row) -> None:
        slot, end = row.slot, row.start + row.num_tokens
        self._grow(slot, row.new_blocks)
        self._num_computed[slot] = end
        self._num_drafted.pop(slot, None)
        if row.sample:
            self._num_tokens[slot] = end + 1

    def _write_drafts(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        if self._host_token_table is not None:
            for index, token in enumerate(tokens, slot * self.stride + first):
                self._host_token_table[index] = token
        else:
            drafts = to_device(np.array(tokens, np.int64), self.device)
            self.tokens[slot, first : first + len(tokens)].copy_(drafts, non_blocking=True)

    def _grow(self, slot: int, blocks: Sequence[int]) -> None:
        if blocks:
            self._note_blocks(blocks)
            first = self._num_blocks[slot]
            self._num_blocks[slot] = first + len(blocks)
            self._blocks[slot, first : self._num_blocks[slot]] = blocks

    def _note_blocks(self, blocks: Sequence[int]) -> None:
        if blocks:
            self.num_touched_blocks = max(self.num_touched_blocks, max(blocks) + 1)

    def _pack(self, plan: StepPlan, drafts: Drafts) -> PackedInputs:
        # Python lists first, then few arrays: for a handful of rows, one NumPy operation costs more than all list
        # operations together, because the matrix products evicted its code from the caches. Rows of several tokens
        # use NumPy, so that a long prompt needs no loop over its tokens.
        decodes, chunks = plan.decodes, plan.chunks
        slots = [*decodes.slots, *(row.slot for row in chunks)]
        starts = [*decodes.starts, *(row.start for row in chunks)]
        counts = [1] * len(decodes.slots) + [row.num_tokens for row in chunks]
        if drafts:
            counts = [count + len(drafts.get(slot, ())) for count, slot in zip(counts, slots, strict=True)]
        order = sorted(range(len(slots)), key=lambda i: (counts[i] > 1, starts[i] + counts[i]))
        first: list[int] = []
        num_tokens = 0
        last = [0] * len(slots)  # packed index of each plan row's last token
        for i in order:
            first.append(num_tokens)
            num_tokens += counts[i]
            last[i] = num_tokens - 1
        size, stride, width, block = self.capacity.block_size, self.stride, self._blocks.shape[1], self._blocks.item
        by_row = first, [counts[i] for i in order], [starts[i] for i in order], [slots[i] * width for i in order]
        single = order[: counts.count(1)]
        positions = [starts[i] for i in single]
        read_indices = [slots[i] * stride + starts[i] for i in single]
        cells = [block(slots[i], starts[i] // size) * size + starts[i] % size for i in single]
        firsts, num_queries, queries_start, tables = columns = np.array(by_row, np.int64)
        by_token = np.array((read_indices, positions, cells), np.int64)
        if len(single) < len(order):
            by_token = np.concatenate((by_token, self._expand_chunks(*columns[:, len(single) :])), axis=1)
        batch = Batch(size, firsts, num_queries, queries_start, tables, self._flat_blocks, by_token[2])
        adapters = self._row_adapters([slots[i] for i in order], by_row[1]) if self._has_adapters else None
        sampling = [*range(len(decodes.slots)), *(i for i, x in enumerate(chunks, len(decodes.slots)) if x.sample)]
        # A row samples at its last position; one with drafts also at the position before each.
        sampled = [(i, n) for i in sampling for n in range(len(drafts.get(slots[i], ())), -1, -1)]
        sample_slots, sample_rows = [slots[i] for i, _ in sampled], [last[i] - n for i, n in sampled]
        ends = [starts[i] + counts[i] - n for i, n in sampled]
        write_indices = [slot * stride + end for slot, end in zip(sample_slots, ends, strict=True)]
        samples = np.array(sample_rows, np.int64), sample_slots, ends, write_indices
        output_rows = _output_rows(chunks, last[len(decodes.slots) :], stride, self._num_tokens)
        return PackedInputs(batch, by_token[0], by_token[1], *samples, output_rows, adapters)

    def _row_adapters(self, slots: list[int], counts: list[int]) -> npt.NDArray[np.int32] | None:
        adapters = [self._adapters[slot] for slot in slots]
        return np.repeat(np.array(adapters, np.int32), counts) if any(adapters) else None

    def _expand_chunks(self, first: IntArray, count: IntArray, start: IntArray, table: IntArray) -> IntArray:
        """Return [3, num_tokens] for consecutive packed rows: read indices, positions and cells."""
        size, token_rows = self.capacity.block_size, table // self._blocks.shape[1] * self.stride
        offsets, tables, token_rows = np.repeat((start - first, table, token_rows), count, axis=1)
        positions = offsets + np.arange(first[0], first[0] + len(offsets))
        cells = self._flat_blocks[tables + positions // size].astype(np.int64) * size + positions % size
        return np.array((token_rows + positions, positions, cells))


def _output_rows(
    chunks: Sequence[Row], last: Sequence[int], stride: int, num_tokens: Sequence[int]
) -> tuple[OutputRow, ...]:
    """Return the rows that report scores or a vector. `last`: packed index of each chunk's last token."""
    return tuple(
        OutputRow(
            *(row.output, row.slot, index - row.num_tokens + 1, row.num_tokens, row.slot * stride + row.start),
            is_last=row.start + row.num_tokens == num_tokens[row.slot],
        )
        for row, index in zip(chunks, last, strict=True)
        if row.is_reported
    )


def _protocol_error(summary: str) -> StepFailed:
    return StepFailed(StepErrorKind.PROTOCOL, summary)
