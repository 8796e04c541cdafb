"""Attention over KV pages: what a layer is, what a step is, and the backends to choose from.

A backend owns the key and value pools of every layer, in whatever layout suits it. The runner describes a step once
(`Batch`); each layer then hands over its new keys and values and gets its attention output. Nothing here knows models,
requests or plans.

A cell is one position of one block. The promise every backend keeps, so that a NaN of one sequence can never reach
another: **a cell is read only if its owner wrote it, or it was zeroed for its owner** (`Batch.fresh_blocks`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lineclear.worker.kernels.call_graph import Call, DynamicInt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    """The attention of one layer, as the loaded model calls it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    window: int = 0
    """A query sees itself and the `window - 1` positions before it; 0: all of them."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: they stay."""
    sinks: Tensor | None = None
    """[num_heads]: a score per head that takes part in the softmax and has no value (gpt-oss)."""


class Chunk(NamedTuple):
    """Consecutive positions of one sequence: the packed batch's queries [first, first + num_queries).

    The first of them is at position `start`; `blocks` hold positions [0, end), in order.
    """

    first: int
    num_queries: int
    start: int
    blocks: IntArray

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.start + self.num_queries


@dataclass(frozen=True, eq=False)
class Batch:
    """One step as attention sees it, in columns. Chunks of one query come first."""

    block_size: int
    first: IntArray
    """[num_chunks]: these four as in Chunk."""
    num_queries: IntArray
    start: IntArray
    table: IntArray
    """Where in `blocks` the chunk's begin. There may be more of them than it uses."""
    blocks: npt.NDArray[np.int32]
    """Good until the step has been launched."""
    cells: IntArray
    """[num_tokens]: the cell (block * block_size + offset) of each packed token."""

    @property
    def num_single(self) -> int:
        """How many of the chunks have one query."""
        return int((self.num_queries == 1).sum())

    @cached_property
    def chunks(self) -> list[Chunk]:
        """One by one, with blocks of their own."""
        columns = (column.tolist() for column in (self.first, self.num_queries, self.start, self.table))
        return [
            Chunk(first, count, start, self.blocks[at : at - (-(start + count) // self.block_size)].astype(np.int64))
            for first, count, start, at in zip(*columns, strict=True)
        ]

    @property
    def fresh_blocks(self) -> IntArray:
        """Blocks that this step begins and leaves partly empty: to be zeroed before their first cell is written."""
        ends = self.start + self.num_queries
        left = ends % self.block_size
        fresh = np.flatnonzero((left > 0) & (self.start <= ends - left))
        return self.blocks[self.table[fresh] + ends[fresh] // self.block_size].astype(np.int64)


def make_batch(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """The Batch of `chunks`, whose queries lie packed in the order given."""
    described = [(x.first, x.num_queries, x.start, len(x.blocks)) for x in chunks]
    first, num_queries, start, lengths = np.array(described, np.int64).reshape(-1, 4).T.copy()
    table = np.cumsum(lengths) - lengths
    blocks = np.concatenate([np.zeros(0, np.int32), *(chunk.blocks for chunk in chunks)]).astype(np.int32)
    positions = np.repeat(start - first, num_queries) + np.arange(int(num_queries.sum()))
    places = np.repeat(table, num_queries) + positions // block_size
    cells = blocks[places].astype(np.int64) * block_size + positions % block_size
    batch = Batch(block_size, first, num_queries, start, table, blocks, cells)
    assert (num_queries[: batch.num_single] == 1).all(), "chunks of one query come first"
    return batch


class AttentionBackend(ABC):
    """Pools of every layer and the attention over them. `begin` once a step, then `attend` once a layer."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is that of queries; keys and values are kept in `kv_dtype`, in int8 with a scale a token and head.

        Raises ValueError for what the backend cannot do.
        """
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.kv_dtype = kv_dtype or dtype

    @abstractmethod
    def zero(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros, in every layer."""

    def prefault(self, first: int, end: int) -> None:
        """Have the system give blocks [first, end), which hold nothing, their memory now."""
        self.zero(range(first, end))

    @abstractmethod
    def begin(self, batch: Batch) -> None:
        """Take the description of the next step; everything that is the same for all layers is computed here."""

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the step's keys and values into the layer's pool, then attend.

        query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim], positions already
        encoded. Returns [num_tokens, num_heads, head_dim].
        """

    def bind(self, layer: int, tokens: DynamicInt, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Call:
        """What does as `attend` for the first `tokens` tokens of its arguments, into those of `out`."""

        def attend() -> None:
            count = tokens.value
            out[:count].copy_(self.attend(layer, query[:count], key[:count], value[:count]).view_as(out[:count]))

        return attend, ()


SCALE_BYTES = 4
"""Of one key or value of a head that is kept in 8 bits."""


def block_bytes(layers: Sequence[LayerSpec], block_size: int, kv_dtype: torch.dtype) -> int:
    """Memory of one block: keys and values, all layers."""
    scale = SCALE_BYTES if kv_dtype is torch.int8 else 0
    return sum(2 * x.num_kv_heads * (x.head_dim * kv_dtype.itemsize + scale) for x in layers) * block_size


def on_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array as a tensor of `device`, without waiting for the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
