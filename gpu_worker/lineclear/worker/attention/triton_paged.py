"""Paged attention in Triton: FlashAttention (Dao 2023) over block tables, with split keys for decodes (Flash-Decoding).

Pools are [num_blocks, block_size, num_kv_heads, head_dim]. A program computes one tile: some queries of one chunk with
all query heads of one KV head, so that keys and values are read once for the group. Tiles of one query divide a long
context into splits of a fixed length, which a second kernel combines. The length of the splits does not depend on the
batch, so neither do the values of a row.

A layer is two or three launches: the write of keys and values, the tiles, and the combination where a context is longer
than one split. No cell is read that its sequence did not write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .base import AttentionBackend, Batch

SPLIT_KEYS = 512
"""Positions of one split of a decode's context."""
_TILE_ROWS = 64
"""Rows (queries times heads of the group) of a tile of several queries. tl.dot needs 16 at least."""
_LEAST_ROWS = 16
_LARGE_TILE = 64 * 64
"""Sums (rows times head size) that four warps do not hold in registers."""


@triton.jit
def write_kernel(
    key, value, keys, values, cells,
    key_token, key_head, value_token, value_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    cell = tl.load(cells + token).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, DIM_PAD)[None, :]
    exists = (heads < HEADS) & (dims < DIM)
    target = cell * HEADS * DIM + heads * DIM + dims
    tl.store(keys + target, tl.load(key + token * key_token + heads * key_head + dims, exists), exists)
    tl.store(values + target, tl.load(value + token * value_token + heads * value_head + dims, exists), exists)


@triton.jit
def attend_kernel(
    query, keys, values, out, tiles, blocks, sinks, partial, maxima, sums,
    scaling, softcap, query_token, query_head, num_splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Attend the queries of one tile, for one KV head and, with SPLIT, for one split of the context.

    tiles [num_tiles, 4]: first packed query, number of queries, position of the first, first entry in `blocks`.
    Row r of a tile is query r // GROUP with head r % GROUP of the group. Scores are in units of log2(e).
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    first = tl.load(tiles + tile * 4)
    count = tl.load(tiles + tile * 4 + 1)
    start = tl.load(tiles + tile * 4 + 2)
    table = tl.load(tiles + tile * 4 + 3)
    end = start + count  # keys of the tile: [low, end)
    low = 0
    if WINDOW:
        low = tl.maximum(start - WINDOW + 1, 0)
    if CHUNK:
        low = start // CHUNK * CHUNK
    if SPLIT:
        low = tl.maximum(low, split * SPLIT)
        end = tl.minimum(end, (split + 1) * SPLIT)

    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    row_query, row_head = rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row, is_dim = row_query < count, dims < DIM
    positions = start + row_query
    token = (first + row_query).to(tl.int64)
    is_value = is_row[:, None] & is_dim[None, :]
    q = tl.load(query + token[:, None] * query_token + row_head[:, None] * query_head + dims[None, :], is_value, 0.0)
    q = q.to(keys.dtype.element_ty)  # some models rotate in float32

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # a score without a value; it enters the first split
        if split == 0:
            maximum = tl.load(sinks + row_head, is_row, 0.0).to(tl.float32) * 1.4426950408889634
            total = tl.full([ROWS], 1.0, tl.float32)
    attended = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for base in range(low // TILE_KEYS * TILE_KEYS, end, TILE_KEYS):
        places = base + tl.arange(0, TILE_KEYS)
        is_key = (places >= low) & (places < end)
        block = tl.load(blocks + table + places // BLOCK_SIZE, is_key, 0).to(tl.int64)
        cell = (block * BLOCK_SIZE + places % BLOCK_SIZE) * num_kv_heads + kv_head
        at = cell[:, None] * DIM + dims[None, :]
        is_cell = is_key[:, None] & is_dim[None, :]
        k = tl.load(keys + at, is_cell, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            doubled = tl.exp2(tl.abs(scores) * (-2.0 * 1.4426950408889634 / softcap))
            capped = softcap * (1.0 - doubled) / (1.0 + doubled)  # softcap * tanh(|score| / softcap)
            scores = tl.where(scores < 0, -capped, capped)
        visible = is_key[None, :] & (places[None, :] <= positions[:, None])
        if WINDOW:
            visible &= places[None, :] > positions[:, None] - WINDOW
        if CHUNK:
            visible &= places[None, :] // CHUNK == positions[:, None] // CHUNK
        scores = tl.where(visible, scores * 1.4426950408889634, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, 1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(maximum - shift)
        total = total * decay + tl.sum(weights, 1)
        v = tl.load(values + at, is_cell, 0.0)
        attended = attended * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = highest

    num_heads = num_kv_heads * GROUP
    row = token * num_heads + row_head
    if SPLIT:
        at = row * num_splits + split
        tl.store(partial + at[:, None] * DIM + dims[None, :], attended, is_value)
        tl.store(maxima + at, maximum, is_row)
        tl.store(sums + at, total, is_row)
    else:
        divisor = tl.where(total > 0, total, 1.0)
        result = (attended / divisor[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * DIM + dims[None, :], result, is_value)


@triton.jit
def combine_kernel(
    partial, maxima, sums, out, tiles, num_splits,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one query and head that its context reaches into its output."""
    tile, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    token = tl.load(tiles + tile * 4).to(tl.int64)
    start = tl.load(tiles + tile * 4 + 2)
    dims = tl.arange(0, DIM_PAD)
    is_dim = dims < DIM
    row = token * num_heads + head
    maximum = float("-inf")
    total = 0.0
    attended = tl.zeros([DIM_PAD], tl.float32)
    for split in range(start // SPLIT + 1):  # those before a window hold nothing, or the sinks alone
        at = row * num_splits + split
        highest = tl.maximum(maximum, tl.load(maxima + at))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        decay, share = tl.exp2(maximum - shift), tl.exp2(tl.load(maxima + at) - shift)
        total = total * decay + tl.load(sums + at) * share
        attended = attended * decay + tl.load(partial + at * DIM + dims, is_dim, 0.0) * share
        maximum = highest
    tl.store(out + row * DIM + dims, (attended / total).to(out.dtype.element_ty), is_dim)


class Shape(NamedTuple):
    """Sizes of the tiles of a layer, which its operands in registers and shared memory limit."""

    dim_pad: int
    keys: int
    """Of one iteration."""
    decode_rows: int
    """Of a tile of one query."""
    rows: int
    """Of a tile of several queries."""
    queries: int
    """Of such a tile."""

    @classmethod
    def of(cls, group: int, head_dim: int, dtype: torch.dtype) -> Shape:
        """Return the sizes for `group` query heads of each KV head."""
        dim_pad, least = (max(_LEAST_ROWS, triton.next_power_of_2(x)) for x in (head_dim, group))
        is_wide = dtype.itemsize > 2
        keys = 16 if is_wide else 64 if head_dim in (64, 128) else 32
        rows = max(least, _LEAST_ROWS if is_wide else _TILE_ROWS)
        return cls(dim_pad, keys, least, rows, rows // group)

    def num_warps(self, rows: int) -> int:
        return 8 if rows * self.dim_pad >= _LARGE_TILE else 4


class _Tiles(NamedTuple):
    """Arguments of a launch over tiles."""

    table: Tensor
    """[num_tiles, 4] int32: see `attend_kernel`."""
    num_splits: int
    """Of the longest context; 0: each program attends its whole context."""


class TritonPagedAttention(AttentionBackend):
    """The backend of CUDA devices."""

    reads_unwritten_cells = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_dtype is not self.dtype:
            raise ValueError("the triton_paged attention backend keeps keys and values in the model's number format")
        shapes = [(self.num_blocks, self.block_size, x.num_kv_heads, x.head_dim) for x in self.layers]
        self._make_pools(shapes, self.dtype)
        self._shapes = [Shape.of(x.num_heads // x.num_kv_heads, x.head_dim, self.dtype) for x in self.layers]

    def start_step(self, batch: Batch) -> None:
        self._cells = self.put(batch.cells)
        self._blocks = self.put(batch.blocks) if batch.blocks_on_device is None else batch.blocks_on_device
        single = batch.num_single
        columns = np.stack((batch.first, batch.num_queries, batch.start, batch.table), axis=1)
        longest = int((batch.start[:single] + 1).max(initial=0))
        # A power of two: a captured graph holds for one number.
        num_splits = self.num_splits = triton.next_power_of_2(-(-longest // SPLIT_KEYS)) if longest > SPLIT_KEYS else 0
        self._decodes = _Tiles(self.put(columns[:single].astype(np.int32)), num_splits)
        self._prefills = {
            queries: _Tiles(self.put(_prefill_tiles(columns[single:], queries)), 0)
            for queries in sorted({shape.queries for shape in self._shapes})
        }

    @property
    def step_inputs(self) -> Sequence[Tensor]:
        return self._cells, self._decodes.table

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        shape, prefills = self._shapes[layer], self._prefills[self._shapes[layer].queries]
        value_dim = self.layers[layer].value_dim
        if value_dim:
            value = key
        _launch_write(key, value, self._keys[layer], self._values[layer], self._cells)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if len(self._decodes.table):
            self._attend(layer, query, out, self._decodes, shape.decode_rows)
        if len(prefills.table):
            self._attend(layer, query, out, prefills, shape.rows)
        return out[..., :value_dim] if value_dim else out

    def _attend(self, layer: int, query: Tensor, out: Tensor, tiles: _Tiles, rows: int) -> None:
        spec, shape = self.layers[layer], self._shapes[layer]
        partial, maxima, sums = self._scratch(query, tiles.num_splits)
        grid = (len(tiles.table), spec.num_kv_heads, max(tiles.num_splits, 1))
        split = SPLIT_KEYS if tiles.num_splits else 0
        attend_kernel[grid](
            *(query, self._keys[layer], self._values[layer], out, tiles.table, self._blocks),
            *(query if spec.sinks is None else spec.sinks, partial, maxima, sums),
            *(spec.scaling, spec.softcap, query.stride(0), query.stride(1), tiles.num_splits),
            GROUP=spec.num_heads // spec.num_kv_heads,
            DIM=spec.head_dim,
            DIM_PAD=shape.dim_pad,
            ROWS=rows,
            TILE_KEYS=shape.keys,
            BLOCK_SIZE=self.block_size,
            SPLIT=split,
            WINDOW=spec.window,
            CHUNK=spec.chunk,
            HAS_SOFTCAP=spec.softcap > 0,
            HAS_SINKS=spec.sinks is not None,
            num_warps=shape.num_warps(rows),
        )
        if split:
            combine_kernel[(len(tiles.table), spec.num_heads)](
                *(partial, maxima, sums, out, tiles.table, tiles.num_splits),
                DIM=spec.head_dim,
                DIM_PAD=shape.dim_pad,
                SPLIT=split,
            )

    def _scratch(self, query: Tensor, num_splits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return memory for partial outputs [rows, num_splits, head_dim], maxima and sums [rows, num_splits]."""
        count, dim = query.shape[0] * query.shape[1] * num_splits, query.shape[2]
        scratch = torch.empty(count * (dim + 2), dtype=torch.float32, device=self.device)
        return scratch[: count * dim], scratch[count * dim :], scratch[count * (dim + 1) :]


def _launch_write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, cells: Tensor) -> None:
    num_tokens, heads, dim = key.shape
    assert key.stride(2) == value.stride(2) == 1, "the values of a head are consecutive"
    write_kernel[(num_tokens,)](
        *(key, value, keys, values, cells, key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        HEADS=heads,
        DIM=dim,
        HEADS_PAD=triton.next_power_of_2(heads),
        DIM_PAD=triton.next_power_of_2(dim),
    )


def _prefill_tiles(chunks: np.ndarray, queries: int) -> np.ndarray:
    """Divide chunks [num_chunks, 4] into tiles of at most `queries` queries, int32 [num_tiles, 4]."""
    counts = -(-chunks[:, 1] // queries)
    tiles = np.repeat(chunks, counts, axis=0)
    skipped = (np.arange(len(tiles)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    tiles[:, 0] += skipped
    tiles[:, 1] = np.minimum(tiles[:, 1] - skipped, queries)
    tiles[:, 2] += skipped
    return tiles.astype(np.int32)
