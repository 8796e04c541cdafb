"""Paged attention (Kwon et al. 2023): layers, the batch of a step, and the interface of the backends.

A backend owns the key and value pools of every layer, in a layout of its choice. The runner describes a step once
(`Batch`); each layer then passes its new keys and values and gets its attention output.

A cell is one position of one block. Every backend keeps one rule, so that a NaN of one sequence never reaches another:
**a cell is read only after its owner wrote it, or after it was copied or zeroed for its owner** (`copy`,
`Batch.fresh_blocks`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lineclear.wire.messages import BlockCopy
from lineclear.worker.device.staging import Put, to_device
from lineclear.worker.kernels.call_graph import Call, DynamicInt

IntArray = npt.NDArray[np.int64]
Indices = IntArray | Tensor
"""int64, on the host or on the model's device."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    """Attention parameters of one layer, as the loaded model passes them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    window: int = 0
    """Sliding window: a query sees itself and the `window - 1` positions before it; 0: all positions."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: unchanged."""
    sinks: Tensor | None = None
    """[num_heads]: attention sinks, a score per head that enters the softmax without a value (gpt-oss)."""
    chunk: int = 0
    """Chunked attention (Llama 4): a query sees the positions of its own chunk of this many; 0: of all chunks."""
    value_dim: int = 0
    """Latent attention: values are this many leading features of the keys, and only keys are kept; 0: both are."""

    def first_visible(self, positions: Any) -> Any:
        """Return the first position that queries at `positions` see: integers, arrays or tensors, maybe negative."""
        if self.chunk:
            return positions - positions % self.chunk
        return positions - self.window + 1 if self.window else positions * 0


class Chunk(NamedTuple):
    """Positions [start, end) of one sequence, as packed queries from `first` on. `blocks` hold [0, end), in order."""

    first: int
    num_queries: int
    start: int
    blocks: IntArray

    @property
    def end(self) -> int:
        return self.start + self.num_queries


@dataclass(frozen=True, eq=False)
class Batch:
    """Attention metadata of one step, as columns over its chunks. Chunks of one query come first."""

    block_size: int
    first: IntArray
    """[num_chunks], like the next three. `first`, `num_queries` and `start` are those of `Chunk`."""
    num_queries: IntArray
    start: IntArray
    table: IntArray
    """Index in `blocks` of the chunk's first block. Its table may hold more blocks than the chunk uses."""
    blocks: npt.NDArray[np.int32]
    """Block tables; valid until the step has been launched."""
    cells: IntArray
    """[num_tokens]: cell (block * block_size + offset) of each packed token; vLLM's `slot_mapping`."""
    blocks_on_device: Tensor | None = None
    """`blocks` on the device, where they are kept between steps; None: they are not."""

    @property
    def num_single(self) -> int:
        return int((self.num_queries == 1).sum())

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Return the columns as chunks, each with a copy of its blocks."""
        columns = (column.tolist() for column in (self.first, self.num_queries, self.start, self.table))
        return [
            Chunk(first, count, start, self.blocks[at : at - (-(start + count) // self.block_size)].astype(np.int64))
            for first, count, start, at in zip(*columns, strict=True)
        ]

    @property
    def fresh_blocks(self) -> IntArray:
        """Return the blocks that this step starts and does not fill; backends zero them before the first write."""
        ends = self.start + self.num_queries
        tail = ends % self.block_size
        fresh = np.flatnonzero((tail > 0) & (self.start <= ends - tail))
        return self.blocks[self.table[fresh] + ends[fresh] // self.block_size].astype(np.int64)


def pack_chunks(chunks: Sequence[Chunk], block_size: int) -> Batch:
    """Return the Batch of `chunks`, whose queries are packed in the order given."""
    rows = [(x.first, x.num_queries, x.start, len(x.blocks)) for x in chunks]
    first, num_queries, start, lengths = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    table = np.cumsum(lengths) - lengths
    blocks = np.concatenate([np.zeros(0, np.int32), *(chunk.blocks for chunk in chunks)]).astype(np.int32)
    positions = np.repeat(start - first, num_queries) + np.arange(int(num_queries.sum()))
    block_indices = np.repeat(table, num_queries) + positions // block_size
    cells = blocks[block_indices].astype(np.int64) * block_size + positions % block_size
    batch = Batch(block_size, first, num_queries, start, table, blocks, cells)
    assert (num_queries[: batch.num_single] == 1).all(), "chunks of one query come first"
    return batch


class AttentionBackend(ABC):
    """KV pools of every layer and attention over them. Call `start_step` once a step, then `attend` once a layer."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the pools.

        `dtype`: of queries and outputs. `kv_dtype`: of the pools; int8 adds a scale per token and head.
        Raises ValueError for layers or formats that the backend does not support.
        """
        self.layers = tuple(layers)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.dtype, self.device = dtype, device
        self.kv_dtype = kv_dtype or dtype
        self.put: Put = partial(to_device, device=device)

    reads_unwritten_cells = True
    """Cells behind the end of a sequence in its last block are read and masked: they have to be finite."""

    num_splits: int | None = None
    """Set by `start_step` of a backend whose kernels can be captured in a CUDA graph: part of the shape of the step."""

    def _make_pools(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        """Allocate keys and values of each layer. Not zeroed: that would take all memory at once, not as it is used."""
        self._keys = [torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]
        kept = list(zip(self.layers, self._keys, strict=True))
        self._values = [keys if layer.value_dim else torch.empty_like(keys) for layer, keys in kept]
        values = [pool for pool, layer in zip(self._values, self.layers, strict=True) if not layer.value_dim]
        self._pools = [*self._keys, *values]

    def zero(self, blocks: Sequence[int]) -> None:
        places = to_device(np.array(blocks, np.int64), self.device)
        for view in self.block_views:
            view.index_fill_(0, places, 0)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy leading positions of blocks in every layer: all reads come before all writes.

        The other cells of a target become zero, unless the backend never reads cells that the owner did not write.
        """
        sources, targets, lengths = (to_device(column, self.device) for column in np.array(copies, np.int64).T.copy())
        is_left = torch.arange(self.block_size, device=self.device) >= lengths[:, None]
        for view in self.block_views:
            read = view.index_select(0, sources)
            view.index_copy_(0, targets, read.masked_fill_(is_left[:, :, None, None], 0))

    @property
    def block_views(self) -> Sequence[Tensor]:
        """Return views of the pools by block, and then by position. Together they hold all values of a block."""
        return self._pools

    def prefault(self, first: int, end: int) -> None:
        """Fault in the memory of the unused blocks [first, end)."""
        self.zero(range(first, end))

    @abstractmethod
    def start_step(self, batch: Batch) -> None:
        """Prepare the next step: compute everything that its layers share."""

    @property
    def step_inputs(self) -> Sequence[Tensor]:
        """Return the tensors on the device that `start_step` has put and that kernels read."""
        return ()

    @abstractmethod
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the step's keys and values into the layer's pool and return the attention output.

        query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim], already rotated.
        Returns [num_tokens, num_heads, head_dim]; with `value_dim`, values and outputs are as wide as that says.
        """

    def bind(self, layer: int, tokens: DynamicInt, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Call:
        """Return a call that runs `attend` on the first `tokens` rows of its arguments and writes those of `out`."""

        def attend() -> None:
            count = tokens.value
            out[:count].copy_(self.attend(layer, query[:count], key[:count], value[:count]).view_as(out[:count]))

        return attend, ()


SCALE_BYTES = 4
"""Bytes of the scale of one int8 key or value of a head."""


def block_bytes(layers: Sequence[LayerSpec], block_size: int, kv_dtype: torch.dtype) -> int:
    """Return the bytes of one block: keys and values of all layers."""
    scale = SCALE_BYTES if kv_dtype is torch.int8 else 0
    heads = [((1 if x.value_dim else 2) * x.num_kv_heads, x.head_dim) for x in layers]
    return sum(count * (dim * kv_dtype.itemsize + scale) for count, dim in heads) * block_size
