"""Recurrent states: what a layer without KV cache carries from token to token, one state for each slot.

The rows of a step are packed as for attention. Each row reads the state of its slot, and leaves there the state behind
its last token. A row at position 0 starts from the zero state, so no state reaches the next owner of a slot.
*Snapshots* are further states, which copies fill and read. No state can be taken back by some positions, so there are
no drafts; that before a row of one token can be held.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineclear.worker.attention.base import Batch
from lineclear.worker.device.staging import Put, to_device

_BLOCK_TOKENS = 64


class StateSpec(NamedTuple):
    """Shape and number format of one part of the state of a layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


LayerSpecs = Sequence[StateSpec]
"""The parts of the state of one layer."""


class Rows(NamedTuple):
    """The packed rows of a step: rows of one token first, as in `Batch`."""

    num_single: int
    single: Tensor
    """[num_single]: index in the pools of the state of each row of one token."""
    chunks: Sequence[tuple[int, int, int]]
    """(first, end, state) of each longer row: its packed tokens [first, end) and the index of its state."""


Compute = Callable[[Any, Tensor], Tensor]
"""Inputs of some tokens, and their states, which are updated -> the outputs."""


def scan(inputs: Sequence[Tensor], output: Tensor, rows: Rows, pool: Tensor, step: Compute, block: Compute) -> Tensor:
    """Return the outputs [num_tokens, ...] of packed tokens in `output`, and leave their states in `pool`.

    `step` computes one token of each row with the states of all these rows, `block` consecutive tokens of one row with
    its state: _BLOCK_TOKENS at most, which bounds the memory.
    """
    if count := rows.num_single:
        states = pool.index_select(0, rows.single)
        output[:count] = step([x[:count] for x in inputs], states)
        pool.index_copy_(0, rows.single, states)
    for first, end, state in rows.chunks:
        for start in range(first, end, _BLOCK_TOKENS):
            tokens = slice(start, min(start + _BLOCK_TOKENS, end))
            output[tokens] = block([x[tokens] for x in inputs], pool[state])
    return output


class RecurrentStates:
    """The states of all layers. Numbers below `num_slots` name those of slots, the following ones snapshots."""

    def __init__(
        self,
        layers: Sequence[LayerSpecs],
        num_slots: int,
        num_snapshots: int,
        blocks_per_slot: int,
        device: torch.device,
    ) -> None:
        """Allocate the states. `blocks_per_slot`: by which `Batch.table` gives the slot of a row."""
        self._num_slots, self._blocks_per_slot, self._device = num_slots, blocks_per_slot, device
        # State `num_slots` is that of padding rows. Not zeroed: memory is taken on first use.
        count = num_slots + 1 + num_snapshots
        self.pools = [[torch.empty((count, *x.shape), dtype=x.dtype, device=device) for x in layer] for layer in layers]
        """By layer, one for each part: [num_states, *shape]."""
        self.put: Put = partial(to_device, device=device)
        self.rows = Rows(0, torch.empty(0, dtype=torch.int64, device=device), ())
        self._single_slots = np.empty(0, np.int64)

    def start_step(self, batch: Batch) -> None:
        """Take the rows of the next step, and zero the states of those that start a sequence."""
        slots, num_single = batch.table // self._blocks_per_slot, batch.num_single
        starting = slots[(batch.start == 0) & (slots < self._num_slots)]
        if len(starting):
            places = to_device(starting, self._device)
            for pool in self._all():
                pool.index_fill_(0, places, 0)
        columns = (column[num_single:].tolist() for column in (batch.first, batch.num_queries, slots))
        chunks = [(first, first + count, slot) for first, count, slot in zip(*columns, strict=True)]
        self.rows, self._single_slots = Rows(num_single, self.put(slots[:num_single]), chunks), slots[:num_single]

    @property
    def single_slots(self) -> Set[int]:
        """Return the slots with a row of one token in this step."""
        return {*self._single_slots.tolist()}

    def hold(self, slots: Sequence[int]) -> Callable[[Container[int]], None]:
        """Return a function that brings back the present states of those of `slots` that it is called with."""
        restore = self._kept(to_device(np.array(slots, np.int64), self._device))

        def restore_wanted(wanted: Container[int]) -> None:
            places = np.array([i for i, slot in enumerate(slots) if slot in wanted], np.int64)
            restore(to_device(places, self._device))

        return restore_wanted

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states, given as (source, target): all reads come before all writes."""
        places = np.array(copies, np.int64)
        places += places >= self._num_slots  # behind the state of padding rows
        sources, targets = (to_device(column, self._device) for column in places.T.copy())
        for pool in self._all():
            pool.index_copy_(0, targets, pool.index_select(0, sources))

    @property
    def step_inputs(self) -> Sequence[Tensor]:
        """Return the tensors on the device that `start_step` has put, of a step with rows of one token only."""
        return (self.rows.single,)

    def keep(self) -> Callable[[], None]:
        """Return a function that undoes what later runs of this step do to the states of its rows of one token."""
        return partial(self._kept(self.rows.single.clone()), slice(None))

    def _kept(self, states: Tensor) -> Callable[[Any], None]:
        """Return a function that brings back what states have now: those at the places of `states` that it gets."""
        kept = [pool.index_select(0, states) for pool in self._all()]

        def restore(places: Any) -> None:
            for pool, values in zip(self._all(), kept, strict=True):
                pool.index_copy_(0, states[places], values[places])

        return restore

    def _all(self) -> list[Tensor]:
        return [pool for layer in self.pools for pool in layer]
