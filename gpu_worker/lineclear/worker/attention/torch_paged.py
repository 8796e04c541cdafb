"""Paged attention in plain torch, for any device: few large operations a layer, and no wait for the device.

Pools are [num_kv_heads, num_blocks + 1, block_size, head_dim], heads outermost, so that the pages of a bucket of
sequences are gathered by one `index_select` into a kept buffer that is already the operand of a batched matmul, with
the query heads of a KV head as its rows (no repeat_kv). The one block more stays zero: it pads sequences that are
shorter than the longest of their bucket.

Rows of one query (decodes) are bucketed by length; every longer chunk (prefill) is attended by itself through SDPA with
an offset-causal mask. Everything that all layers share (gather indices, masks) is made once a step, once per distinct
window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import AttentionBackend, Batch, Chunk, LayerSpec, on_device

_BUCKET_WASTE = 0.25
"""A bucket closes when more than this share of its gathered blocks would be padding."""
_BUCKET_TOKENS = 32768
"""A bucket closes at this many gathered positions, so that kept buffers stay small."""
_SCORE_ELEMENTS = 1 << 24
"""The most scores that an explicit softmax holds at once."""


class _Bucket(NamedTuple):
    """Single-query rows [first, first + num_rows) of the packed batch, padded to one context length."""

    first: int
    num_rows: int
    blocks: Tensor  # [num_rows * width] block indices
    hidden: Tensor  # [num_rows, 1, width * block_size], bool


class _Prefill(NamedTuple):
    """One chunk of several queries."""

    first: int
    num_queries: int
    blocks: Tensor | None  # None: its context is the chunk itself, nothing to gather
    context: int  # gathered positions that count
    bias: Tensor | None  # [num_queries, context], 0 or -inf; None: plain causal


class _Step(NamedTuple):
    """What all layers of one window share in a step."""

    buckets: Sequence[_Bucket]
    prefills: Sequence[_Prefill]


class TorchPagedAttention(AttentionBackend):
    """The general fast path: CPU, CUDA and MPS."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_dtype is not self.dtype:
            raise ValueError("the torch_paged attention backend keeps keys and values in the model's own number format")
        shapes = [(x.num_kv_heads, self.num_blocks + 1, self.block_size * x.head_dim) for x in self.layers]
        # Not zeroed: a pool of gigabytes would take seconds to fill and its memory at once instead of as it is used.
        self._keys = [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes]
        self._values = [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes]
        self.zero([self.num_blocks])
        self._windows = sorted({layer.window for layer in self.layers})
        self._kept = [torch.empty(0, dtype=self.dtype, device=self.device) for _ in range(2)]

    def zero(self, blocks: Sequence[int]) -> None:
        self._fill(on_device(np.array(blocks, np.int64), self.device), range(len(self.layers)))

    def begin(self, batch: Batch) -> None:
        self._cells = on_device(batch.cells, self.device)
        self._fresh = on_device(batch.fresh_blocks, self.device)
        self._steps = {window: self._prepare(batch, window) for window in self._windows}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec = self.layers[layer]
        self._write(layer, key, value)
        step = self._steps[spec.window]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        for bucket in step.buckets:
            rows = slice(bucket.first, bucket.first + bucket.num_rows)
            output[rows] = self._attend_bucket(layer, bucket, query[rows])
        for prefill in step.prefills:
            rows = slice(prefill.first, prefill.first + prefill.num_queries)
            if prefill.blocks is None:
                context = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
            else:
                context = self._gather(layer, prefill.blocks, (spec.num_kv_heads, -1, spec.head_dim))
            k, v = (x[:, : prefill.context] for x in context)
            output[rows] = _attend_chunk(spec, query[rows], k, v, prefill.bias)
        return output

    # --- once a step ------------------------------------------------------------------------------------------------

    def _prepare(self, batch: Batch, window: int) -> _Step:
        views = [_View(chunk, window, self.block_size) for chunk in batch.chunks]
        single = views[: batch.num_single]
        buckets = [self._bucket(single[a:b]) for a, b in _bucket_bounds([v.width for v in single], self.block_size)]
        return _Step(buckets, [self._prefill(view) for view in views[batch.num_single :]])

    def _bucket(self, views: Sequence[_View]) -> _Bucket:
        width = max(view.width for view in views)
        blocks = np.full((len(views), width), self.num_blocks, np.int64)
        for i, view in enumerate(views):
            blocks[i, : view.width] = view.blocks
        bases = np.array([view.base for view in views])[:, None]
        lasts = np.array([view.chunk.start for view in views])[:, None]
        lows = np.array([view.low for view in views])[:, None]
        positions = bases + np.arange(width * self.block_size)
        hidden = (positions > lasts) | (positions < lows)
        return _Bucket(
            views[0].chunk.first,
            len(views),
            on_device(blocks.reshape(-1), self.device),
            on_device(hidden[:, None, :], self.device),
        )

    def _prefill(self, view: _View) -> _Prefill:
        chunk = view.chunk
        plain = chunk.start == 0 and not 0 < view.window < chunk.num_queries
        blocks = None if chunk.start == 0 else on_device(np.ascontiguousarray(view.blocks), self.device)
        bias = None if plain else self._bias(view)
        return _Prefill(chunk.first, chunk.num_queries, blocks, chunk.end - view.base, bias)

    def _bias(self, view: _View) -> Tensor:
        chunk = view.chunk
        mine = torch.arange(chunk.start, chunk.end, device=self.device)[:, None]
        theirs = torch.arange(view.base, chunk.end, device=self.device)[None, :]
        hidden = theirs > mine
        if view.window:
            hidden |= theirs <= mine - view.window
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return bias.masked_fill_(hidden, float("-inf"))

    # --- once a layer -----------------------------------------------------------------------------------------------

    def _fill(self, blocks: Tensor, layers: Sequence[int]) -> None:
        for layer in layers:
            self._keys[layer].index_fill_(1, blocks, 0)
            self._values[layer].index_fill_(1, blocks, 0)

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self._fresh.numel():
            self._fill(self._fresh, (layer,))
        spec = self.layers[layer]
        shape = (spec.num_kv_heads, -1, spec.head_dim)
        self._keys[layer].view(shape).index_copy_(1, self._cells, key.transpose(0, 1))
        self._values[layer].view(shape).index_copy_(1, self._cells, value.transpose(0, 1))

    def _gather(self, layer: int, blocks: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of `blocks`, copied into the kept buffers (valid until the next gather), as `shape`."""
        pools = self._keys[layer], self._values[layer]
        heads, _, size = pools[0].shape
        needed = heads * blocks.numel() * size
        if self._kept[0].numel() < needed:
            self._kept = [torch.empty(needed, dtype=self.dtype, device=self.device) for _ in range(2)]
        k, v = (
            torch.index_select(pool, 1, blocks, out=kept[:needed].view(heads, blocks.numel(), size)).view(shape)
            for pool, kept in zip(pools, self._kept, strict=True)
        )
        return k, v

    def _attend_bucket(self, layer: int, bucket: _Bucket, query: Tensor) -> Tensor:
        spec = self.layers[layer]
        heads, group, dim = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim
        k, v = self._gather(layer, bucket.blocks, (heads, bucket.num_rows, -1, dim))
        q = query.view(bucket.num_rows, heads, group, dim).transpose(0, 1)  # [heads, count, group, dim]
        sinks = None if spec.sinks is None else spec.sinks.view(heads, 1, group, 1)
        weights = _softmax(spec, torch.matmul(q * spec.scaling, k.transpose(-1, -2)), bucket.hidden, sinks)
        attended = torch.matmul(weights.to(v.dtype), v)  # [heads, count, group, dim]
        return attended.transpose(0, 1).reshape(bucket.num_rows, spec.num_heads, dim)


class _View:
    """The part of a chunk's context that its window lets it see, in whole blocks."""

    __slots__ = ("base", "blocks", "chunk", "low", "width", "window")

    def __init__(self, chunk: Chunk, window: int, block_size: int) -> None:
        self.chunk = chunk
        self.window = window
        self.low = max(0, chunk.start - window + 1) if window else 0  # first position the first query sees
        first_block = self.low // block_size
        self.base = first_block * block_size
        self.blocks = chunk.blocks[first_block:]
        self.width = len(self.blocks)


def _bucket_bounds(widths: Sequence[int], block_size: int) -> Iterator[tuple[int, int]]:
    """Cut rows of `widths` blocks into consecutive [a, b) that waste little when each is padded to its widest row."""
    cuts = [0]
    widest, total = 0, 0
    for i, width in enumerate(widths):
        rows = i + 1 - cuts[-1]
        padded = max(widest, width) * rows
        too_wasteful = padded - total - width > _BUCKET_WASTE * padded
        if rows > 1 and (too_wasteful or padded * block_size > _BUCKET_TOKENS):
            cuts.append(i)
            widest, total = 0, 0
        widest, total = max(widest, width), total + width
    cuts.append(len(widths))
    return pairwise(cuts) if widths else iter(())


def _softmax(spec: LayerSpec, scores: Tensor, hidden: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention weights in float32 from scaled scores, which it may overwrite; the last dimension is the context."""
    if spec.softcap:
        scores = torch.tanh(scores.float() / spec.softcap) * spec.softcap
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    column = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores.float(), column], dim=-1), dim=-1)[..., :-1]


def _attend_chunk(spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """query [count, num_heads, head_dim], key and value [num_kv_heads, context, head_dim] -> like query."""
    heads, group = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    count, _, dim = query.shape
    q = query.transpose(0, 1).view(heads, group, count, dim)  # KV heads as the batch, those of a group as the heads
    k = key[:, None].expand(-1, group, -1, -1)  # stride 0: nothing is repeated in memory
    v = value[:, None].expand(-1, group, -1, -1)
    if spec.softcap or spec.sinks is not None:
        attended = _attend_explicitly(spec, q, k, v, bias)
    else:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=spec.scaling)
    return attended.flatten(0, 1).transpose(0, 1)


def _attend_explicitly(spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """What SDPA cannot: softcap and sinks. In slices of queries, so that the scores stay small."""
    heads, group, count, _ = q.shape
    context = k.shape[2]
    hidden = _later(count, context, q.device) if bias is None else bias != 0
    sinks = None if spec.sinks is None else spec.sinks.view(heads, group, 1, 1)
    step = max(1, _SCORE_ELEMENTS // (spec.num_heads * context))
    pieces = []
    for a in range(0, count, step):
        rows = slice(a, a + step)
        scores = torch.matmul(q[:, :, rows] * spec.scaling, k.transpose(-1, -2))
        weights = _softmax(spec, scores, hidden[rows], sinks)
        pieces.append(torch.matmul(weights.to(v.dtype), v))
    return torch.cat(pieces, dim=2)


def _later(count: int, context: int, device: torch.device) -> Tensor:
    """[count, context] bool: the key comes after the query, when both begin at position 0."""
    return torch.ones((count, context), dtype=torch.bool, device=device).triu_(1)
