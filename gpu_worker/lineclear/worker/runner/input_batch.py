"""The persistent batch (vLLM's `InputBatch`): the tokens of each slot, and the rows of a step packed for the model.

Block tables and lengths live on the host (slot_table.py), where plans arrive and attention metadata is computed. Tokens
live on the device: a step reads the tokens sampled by the previous step before the host has seen them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lineclear.wire.messages import Row, RowOutput, StepPlan
from lineclear.worker.attention.base import Batch, IntArray
from lineclear.worker.device.staging import Staging, fetch, to_device
from lineclear.worker.drafts.verification import NO_DRAFTS, Drafts, PendingDrafts
from lineclear.worker.kv_cache.slot_table import Capacity, SlotTable


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


class PackedTensors(NamedTuple):
    """These arrays of `PackedInputs` on the device, `sample_rows` padded. Values arrive with `InputBatch.send`."""

    read_indices: Tensor
    positions: Tensor
    sample_rows: Tensor
    write_indices: Tensor


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
    on_device: PackedTensors | None = None
    """None on a CPU."""
    is_padded: bool = False
    """All rows are single tokens. Arrays by token have padding rows, wherever their context length places them."""


class InputBatch:
    def __init__(
        self, capacity: Capacity, device: torch.device, adapters: Container[int] = (), staging: Staging | None = None
    ) -> None:
        self.capacity, self.device = capacity, device
        self.stride = capacity.max_model_len + 1  # includes the token sampled after the last position
        # The last row belongs to the slot of padding rows.
        self.tokens = torch.zeros((capacity.num_slots + 1, self.stride), dtype=torch.int64, device=device)
        self.flat_tokens = self.tokens.view(-1)
        self.slots = SlotTable(capacity, adapters)
        self._flat_blocks = self.slots.blocks.reshape(-1)
        self.staging = staging or Staging(device, _staging_bytes(capacity))
        """Of the arrays of a step: `apply` and others put theirs between its `begin` and `send` of this."""
        self._host_token_table = self.flat_tokens.numpy().data if self.staging.is_direct else None
        # Of other devices: the tokens that the host knows. Memory of positions that no sequence reaches is never used.
        self._known_tokens: npt.NDArray[np.int32] | None = None
        self._num_owners = np.zeros(capacity.num_slots, np.int64)  # that each slot has had
        self._arrivals: list[tuple[Tensor, IntArray]] = []  # places in the token table, and what `send` brings there
        self._arriving_drafts: list[tuple[int, int]] = []  # as (index in the flattened token table, token)
        self._blocks_on_device: Tensor | None = None
        if not self.staging.is_direct:
            self._blocks_on_device = torch.from_numpy(self._flat_blocks).to(device, copy=True)
            self._known_tokens = np.zeros((capacity.num_slots, self.stride), np.int32)
            self.slots.grown = []

    def reset(self) -> None:
        """Free every slot, and forget what a failed step has not sent."""
        self.slots.reset()
        self._arrivals.clear()
        self._arriving_drafts.clear()

    def apply(
        self, plan: StepPlan, drafts: Drafts = NO_DRAFTS, pad: Callable[[int], int] | None = None
    ) -> PackedInputs:
        """Apply a checked plan and pack its rows: rows of one token first, each kind by ascending context length.

        `pad` returns how many rows a step of so many single tokens that are all sampled is padded to; 0: not at all.
        A row with drafts is packed as one of several tokens, and samples at each of them.
        """
        self.slots.apply(plan, drafts)
        packed = self._pack(plan, drafts, pad)
        for init in plan.inits:
            self._write_tokens(init.slot, 0, init.tokens)
            if self._known_tokens is not None:
                self._num_owners[init.slot] += 1
                self._known_tokens[init.slot, : len(init.tokens)] = init.tokens
        for row in plan.chunks if drafts else ():
            if row.slot in drafts and not isinstance(drafts[row.slot], PendingDrafts):
                self._write_drafts(row.slot, row.start + 1, drafts[row.slot])
        return packed

    def without_drafts(self, plan: StepPlan) -> PackedInputs:
        """Pack the rows of a plan that was just applied again, without drafts."""
        self.slots.drop_drafts(plan)
        return self._pack(plan, NO_DRAFTS)

    def read_tokens(self, slot: int, start: int, end: int) -> list[int]:
        """Return the tokens of a slot at positions [start, end), all of them in results or plans that came before."""
        table = self.tokens if self._known_tokens is None else self._known_tokens
        tokens: list[int] = table[slot, start:end].tolist()
        return tokens

    def learner(self, packed: PackedInputs) -> Callable[[Sequence[int]], None] | None:
        """Return what takes the sampled tokens of a step once they are on the host; None: the table is there.

        Another thread may call it. It leaves slots alone that have another owner by then.
        """
        known = self._known_tokens
        if known is None:
            return None
        slots, places = np.array(packed.sample_slots, np.int64), np.array(packed.write_indices, np.int64)
        owners = self._num_owners[slots]

        def learn(tokens: Sequence[int]) -> None:
            is_same = self._num_owners[slots] == owners
            known.reshape(-1)[places[is_same]] = np.array(tokens, np.int32)[is_same]

        return learn

    def fetch_last_tokens(self, packed: PackedInputs, rows: list[int]) -> Callable[[], list[int]]:
        """Return a function that waits for the token before the sampled position of these sampling rows.

        Queue no work of the step before this call: on CUDA it would be waited for.
        """
        indices = [packed.write_indices[row] - 1 for row in rows]
        table = self._host_token_table
        if table is not None:
            return lambda: [table[index] for index in indices]
        return fetch(self.flat_tokens.index_select(0, to_device(np.array(indices, np.int64), self.device)))

    def write_sampled(self, packed: PackedInputs, tokens: Tensor, host_tokens: list[int] | None = None) -> None:
        """Write the step's sampled tokens, in the plan's order, to the token table. `host_tokens`: a list of them."""
        if packed.on_device is not None:
            self.flat_tokens.index_copy_(0, packed.on_device.write_indices, tokens)
            return
        assert self._host_token_table is not None
        host_tokens = tokens.tolist() if host_tokens is None else host_tokens
        for index, token in zip(packed.write_indices, host_tokens, strict=True):
            self._host_token_table[index] = token

    def _write_drafts(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        places = enumerate(tokens, slot * self.stride + first)
        if self._host_token_table is None:
            self._arriving_drafts += places
            return
        for index, token in places:
            self._host_token_table[index] = token

    def _write_tokens(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        places, array = self.tokens[slot, first : first + len(tokens)], np.array(tokens, np.int64)
        if self.staging.is_direct:
            places.copy_(torch.from_numpy(array))
        else:
            self._arrivals.append((places, array))

    def send(self) -> None:
        """Queue the copy of all that was put for the step, and of new tokens and blocks, and their writes."""
        put, writes = self.staging.put, list[Callable[[], object]]()
        for places, array in self._arrivals:
            writes.append(partial(places.copy_, put(array)))
        self._arrivals.clear()
        if self._arriving_drafts:
            places, drafts = np.array(self._arriving_drafts, np.int64).T
            self._arriving_drafts.clear()
            writes.append(partial(self.flat_tokens.index_copy_, 0, put(places), put(drafts)))
        if self._blocks_on_device is not None and self.slots.grown:
            indices, blocks = np.array(self.slots.grown, np.int64).T
            self.slots.grown.clear()
            staged = put(indices), put(blocks.astype(np.int32))
            writes.append(partial(self._blocks_on_device.index_copy_, 0, *staged))
        self.staging.send()
        for write in writes:
            write()

    def _pack(self, plan: StepPlan, drafts: Drafts, pad: Callable[[int], int] | None = None) -> PackedInputs:
        # Python lists first, then few arrays: for a handful of rows, one NumPy operation costs more than all list
        # operations together, because the matrix products evicted its code from the caches. Rows of several tokens
        # use NumPy, so that a long prompt needs no loop over its tokens.
        decodes, chunks = plan.decodes, plan.chunks
        slots = [*decodes.slots, *(row.slot for row in chunks)]
        starts = [*decodes.starts, *(row.start for row in chunks)]
        counts = [1] * len(decodes.slots) + [row.num_tokens for row in chunks]
        if drafts:
            counts = [count + len(drafts.get(slot, ())) for count, slot in zip(counts, slots, strict=True)]
        padded = pad(len(slots)) if pad and not drafts and all(x.num_tokens == 1 and x.sample for x in chunks) else 0
        for column, value in ((slots, self.capacity.num_slots), (starts, 0), (counts, 1)):
            column.extend([value] * (padded - len(column)))
        order = sorted(range(len(slots)), key=lambda i: (counts[i] > 1, starts[i] + counts[i]))
        packed, last = _packed_places(order, counts)
        size, stride, blocks = self.capacity.block_size, self.stride, self.slots.blocks
        width, block = blocks.shape[1], blocks.item
        by_row = packed, [counts[i] for i in order], [starts[i] for i in order], [slots[i] * width for i in order]
        single = order[: counts.count(1)]
        positions = [starts[i] for i in single]
        read_indices = [slots[i] * stride + starts[i] for i in single]
        cells = [block(slots[i], starts[i] // size) * size + starts[i] % size for i in single]
        columns = np.array(by_row, np.int64)
        by_token = np.array((read_indices, positions, cells), np.int64)
        if len(single) < len(order):
            by_token = np.concatenate((by_token, self._expand_chunks(*columns[:, len(single) :])), axis=1)
        first, count, start, table = columns
        batch = Batch(size, first, count, start, table, self._flat_blocks, by_token[2], self._blocks_on_device)
        adapters = self.slots.row_adapters([slots[i] for i in order], by_row[1]) if self.slots.has_adapters else None
        sampling = [*range(len(decodes.slots)), *(i for i, x in enumerate(chunks, len(decodes.slots)) if x.sample)]
        # A row samples at its last position; one with drafts also at the position before each.
        sampled = [(i, n) for i in sampling for n in range(len(drafts.get(slots[i], ())), -1, -1)]
        sample_slots, sample_rows = [slots[i] for i, _ in sampled], [last[i] - n for i, n in sampled]
        ends = [starts[i] + counts[i] - n for i, n in sampled]
        write_indices = [slot * stride + end for slot, end in zip(sample_slots, ends, strict=True)]
        samples = np.array(sample_rows, np.int64), sample_slots, ends, write_indices
        output_rows = _output_rows(chunks, last[len(decodes.slots) : plan.num_rows], stride, self.slots.num_tokens)
        inputs = by_token[0], by_token[1], *samples
        on_device = self._put(by_token, sample_rows, write_indices, padded)
        return PackedInputs(batch, *inputs, output_rows, adapters, on_device, is_padded=padded > 0)

    def _put(
        self, by_token: IntArray, sample_rows: list[int], write_indices: list[int], padded: int
    ) -> PackedTensors | None:
        """Put what the model and the token table need: first of the step, so that equal steps use equal places."""
        if self.staging.is_direct:
            return None
        put = self.staging.put
        read_indices, positions = put(by_token[:2])
        padding = [0] * (padded - len(sample_rows))
        kept, written = put(np.array((sample_rows + padding, write_indices + padding), np.int64))
        return PackedTensors(read_indices, positions, kept, written[: len(write_indices)])

    def _expand_chunks(self, first: IntArray, count: IntArray, start: IntArray, table: IntArray) -> IntArray:
        """Return [3, num_tokens] for consecutive packed rows: read indices, positions and cells."""
        size, token_rows = self.capacity.block_size, table // self.slots.blocks.shape[1] * self.stride
        offsets, tables, token_rows = np.repeat((start - first, table, token_rows), count, axis=1)
        positions = offsets + np.arange(first[0], first[0] + len(offsets))
        cells = self._flat_blocks[tables + positions // size].astype(np.int64) * size + positions % size
        return np.array((token_rows + positions, positions, cells))


def _packed_places(order: Sequence[int], counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the packed index of the first token of each row in packed order, and of the last one in the plan's."""
    first, last, num_tokens = list[int](), [0] * len(order), 0
    for i in order:
        first.append(num_tokens)
        num_tokens += counts[i]
        last[i] = num_tokens - 1
    return first, last


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


def _staging_bytes(capacity: Capacity) -> int:
    """Return the bytes that the arrays of a step need: its tokens and rows, new blocks, and sampling parameters.

    Long lists, as of a request with thousands of biased tokens, may exceed them.
    """
    by_token, by_row, lists = 128, 1024, 1 << 20
    return capacity.max_step_tokens * by_token + capacity.num_slots * by_row + lists
