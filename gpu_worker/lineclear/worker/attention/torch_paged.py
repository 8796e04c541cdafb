"""Paged attention in plain torch, for CPU, CUDA and MPS: few large operations per layer, no wait for the device.

Pools are [num_kv_heads, num_blocks + 1, block_size, head_dim], heads outermost. One `index_select` gathers the blocks
of a bucket of sequences into a buffer that is the operand of a batched matmul. The query heads of a KV head are its
rows, so keys and values are not repeated. The last block of a pool stays zero and pads the shorter sequences of a
bucket.

Chunks of one query (decodes) are bucketed by length. Each longer chunk (prefill) runs alone through SDPA with an
offset-causal mask. Gather indices and masks are computed once a step for each distinct window or chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .base import AttentionBackend, Batch, Chunk, LayerSpec

_BUCKET_WASTE = 0.25
"""Largest share of padding among the gathered blocks of a bucket."""
_BUCKET_TOKENS = 32768
"""Largest number of gathered positions of a bucket; bounds the gather buffers."""
_MAX_SCORES = 1 << 24
"""Largest number of scores that `_attend_with_softmax` holds at once."""


class _Bucket(NamedTuple):
    """Single-query chunks [first, first + num_rows) of the packed batch, padded to one context length."""

    first: int
    num_rows: int
    blocks: Tensor  # [num_rows * width] block indices
    masked: Tensor  # [num_rows, 1, width * block_size], bool


class _Prefill(NamedTuple):
    """One chunk of several queries."""

    first: int
    num_queries: int
    blocks: Tensor | None  # None: the context is the chunk itself
    context: int  # gathered positions that are used
    bias: Tensor | None  # [num_queries, context], 0 or -inf; None: causal


class TorchPagedAttention(AttentionBackend):
    """The default backend where the native kernels do not apply."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_dtype is not self.dtype:
            raise ValueError("the torch_paged attention backend keeps keys and values in the model's own number format")
        shapes = [(x.num_kv_heads, self.num_blocks + 1, self.block_size * x.head_dim) for x in self.layers]
        self._make_pools(shapes, self.dtype)
        self.zero([self.num_blocks])
        self._masks = {(layer.window, layer.chunk): layer for layer in self.layers}
        self._gather_buffers = [torch.empty(0, dtype=self.dtype, device=self.device) for _ in range(2)]

    @property
    def block_views(self) -> Sequence[Tensor]:
        sizes = self.num_blocks + 1, self.block_size, -1
        return [pool.view(len(pool), *sizes).permute(1, 2, 0, 3) for pool in self._pools]

    def start_step(self, batch: Batch) -> None:
        self._cells, self._fresh = self.put(batch.cells), self.put(batch.fresh_blocks)
        self._steps = {key: self._prepare(batch, layer) for key, layer in self._masks.items()}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec = self.layers[layer]
        self._write(layer, key, value)
        buckets, prefills = self._steps[spec.window, spec.chunk]
        output = torch.empty((*query.shape[:2], value.shape[-1]), dtype=query.dtype, device=query.device)
        for bucket in buckets:
            rows = slice(bucket.first, bucket.first + bucket.num_rows)
            output[rows] = self._attend_bucket(layer, bucket, query[rows])
        for prefill in prefills:
            rows = slice(prefill.first, prefill.first + prefill.num_queries)
            if prefill.blocks is None:
                context = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
            else:
                context = self._gather(layer, prefill.blocks, (spec.num_kv_heads, -1, spec.head_dim))
            k, v = (x[:, : prefill.context] for x in context)
            output[rows] = _attend_chunk(spec, query[rows], k, v, prefill.bias)
        return output

    # --- once a step ------------------------------------------------------------------------------------------------

    def _prepare(self, batch: Batch, layer: LayerSpec) -> tuple[Sequence[_Bucket], Sequence[_Prefill]]:
        """Return gather indices and masks of a step, shared by all layers with one window or chunk."""
        contexts = [_VisibleContext(chunk, layer, self.block_size) for chunk in batch.chunks]
        single = contexts[: batch.num_single]
        buckets = [self._bucket(single[a:b]) for a, b in _bucket_bounds([v.width for v in single], self.block_size)]
        return buckets, [self._prefill(context) for context in contexts[batch.num_single :]]

    def _bucket(self, contexts: Sequence[_VisibleContext]) -> _Bucket:
        width = max(context.width for context in contexts)
        blocks = np.full((len(contexts), width), self.num_blocks, np.int64)
        for i, context in enumerate(contexts):
            blocks[i, : context.width] = context.blocks
        bases = np.array([context.base for context in contexts])[:, None]
        lasts = np.array([context.chunk.start for context in contexts])[:, None]
        lows = np.array([context.low for context in contexts])[:, None]
        positions = bases + np.arange(width * self.block_size)
        masked = (positions > lasts) | (positions < lows)
        gathered = self.put(blocks.reshape(-1)), self.put(masked[:, None, :])
        return _Bucket(contexts[0].chunk.first, len(contexts), *gathered)

    def _prefill(self, context: _VisibleContext) -> _Prefill:
        chunk = context.chunk
        plain = chunk.start == 0 and context.layer.first_visible(chunk.end - 1) <= 0
        blocks = None if chunk.start == 0 else self.put(np.ascontiguousarray(context.blocks))
        bias = None if plain else self._bias(context)
        return _Prefill(chunk.first, chunk.num_queries, blocks, chunk.end - context.base, bias)

    def _bias(self, context: _VisibleContext) -> Tensor:
        chunk = context.chunk
        query_positions = torch.arange(chunk.start, chunk.end, device=self.device)[:, None]
        key_positions = torch.arange(context.base, chunk.end, device=self.device)[None, :]
        masked = (key_positions > query_positions) | (key_positions < context.layer.first_visible(query_positions))
        bias = torch.zeros(masked.shape, dtype=self.dtype, device=self.device)
        return bias.masked_fill_(masked, float("-inf"))

    # --- once a layer -----------------------------------------------------------------------------------------------

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        spec = self.layers[layer]
        shape = (spec.num_kv_heads, -1, spec.head_dim)
        written = (self._keys[layer], key), (self._values[layer], value)
        for pool, new in written[: 1 if spec.value_dim else 2]:
            if self._fresh.numel():
                pool.index_fill_(1, self._fresh, 0)
            pool.view(shape).index_copy_(1, self._cells, new.transpose(0, 1))

    def _gather(self, layer: int, blocks: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Gather keys and values of `blocks`. Returns views of `shape` into buffers, valid until the next call."""
        keys, values, value_dim = self._keys[layer], self._values[layer], self.layers[layer].value_dim
        heads, _, size = keys.shape
        needed = heads * blocks.numel() * size
        if self._gather_buffers[0].numel() < needed:
            self._gather_buffers = [torch.empty(needed, dtype=self.dtype, device=self.device) for _ in range(2)]
        gathered = [
            torch.index_select(pool, 1, blocks, out=buffer[:needed].view(heads, blocks.numel(), size)).view(shape)
            for pool, buffer in zip((keys,) if value_dim else (keys, values), self._gather_buffers, strict=False)
        ]
        return gathered[0], gathered[-1][..., : value_dim or None]

    def _attend_bucket(self, layer: int, bucket: _Bucket, query: Tensor) -> Tensor:
        spec = self.layers[layer]
        heads, group, dim = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim
        k, v = self._gather(layer, bucket.blocks, (heads, bucket.num_rows, -1, dim))
        q = query.view(bucket.num_rows, heads, group, dim).transpose(0, 1)  # [heads, count, group, dim]
        sinks = None if spec.sinks is None else spec.sinks.view(heads, 1, group, 1)
        weights = _softmax(spec, torch.matmul(q * spec.scaling, k.transpose(-1, -2)), bucket.masked, sinks)
        attended = torch.matmul(weights.to(v.dtype), v)  # [heads, count, group, dim]
        return attended.transpose(0, 1).reshape(bucket.num_rows, spec.num_heads, -1)


class _VisibleContext:
    """The part of a chunk's context that its layer sees, in whole blocks."""

    __slots__ = ("base", "blocks", "chunk", "layer", "low", "width")

    def __init__(self, chunk: Chunk, layer: LayerSpec, block_size: int) -> None:
        self.chunk, self.layer = chunk, layer
        self.low = max(0, layer.first_visible(chunk.start))  # first position visible to the first query
        first_block = self.low // block_size
        self.base = first_block * block_size
        self.blocks = chunk.blocks[first_block:]
        self.width = len(self.blocks)


def _bucket_bounds(widths: Sequence[int], block_size: int) -> Iterator[tuple[int, int]]:
    """Split rows of `widths` blocks into consecutive ranges [a, b) with little padding to their widest row."""
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


def _softmax(spec: LayerSpec, scores: Tensor, masked: Tensor, sinks: Tensor | None) -> Tensor:
    """Return float32 attention weights for scaled scores [..., context], which may be overwritten."""
    if spec.softcap:
        scores = torch.tanh(scores.float() / spec.softcap) * spec.softcap
    scores.masked_fill_(masked, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    column = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores.float(), column], dim=-1), dim=-1)[..., :-1]


def _attend_chunk(spec: LayerSpec, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Attend query [count, num_heads, head_dim] over key and value [num_kv_heads, context, head_dim]."""
    heads, group = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    count, _, dim = query.shape
    q = query.transpose(0, 1).view(heads, group, count, dim)  # batch: KV heads; heads: the group
    k = key[:, None].expand(-1, group, -1, -1)  # stride 0: no copies
    v = value[:, None].expand(-1, group, -1, -1)
    if spec.softcap or spec.sinks is not None or spec.value_dim:
        attended = _attend_with_softmax(spec, q, k, v, bias)
    else:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=spec.scaling)
    return attended.flatten(0, 1).transpose(0, 1)


def _attend_with_softmax(spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attend as SDPA cannot (softcap, sinks, values narrower than keys), in slices that bound the scores."""
    heads, group, count, _ = q.shape
    context = k.shape[2]
    # Without a bias, queries and keys start at position 0.
    later = torch.ones((count, context), dtype=torch.bool, device=q.device).triu_(1) if bias is None else bias != 0
    sinks = None if spec.sinks is None else spec.sinks.view(heads, group, 1, 1)
    step = max(1, _MAX_SCORES // (spec.num_heads * context))
    outputs = []
    for a in range(0, count, step):
        rows = slice(a, a + step)
        scores = torch.matmul(q[:, :, rows] * spec.scaling, k.transpose(-1, -2))
        weights = _softmax(spec, scores, later[rows], sinks)
        outputs.append(torch.matmul(weights.to(v.dtype), v))
    return torch.cat(outputs, dim=2)
