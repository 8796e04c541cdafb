"""Attention as the papers write it, one sequence after another, in float32. The oracle of the other backends; slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import AttentionBackend, Batch, LayerSpec, on_device


class ReferenceAttention(AttentionBackend):
    """Pools [num_blocks * block_size, num_kv_heads, head_dim]; loops and an explicit softmax."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        cells = self.num_blocks * self.block_size
        shapes = [(cells, layer.num_kv_heads, layer.head_dim) for layer in self.layers]
        self._in_bytes = self.kv_dtype is torch.int8
        dtype = torch.float32 if self._in_bytes else self.kv_dtype  # whole numbers times a scale
        self._keys = [torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]
        self._values = [torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]

    def zero(self, blocks: Sequence[int]) -> None:
        for pool in (*self._keys, *self._values):
            for block in blocks:
                pool[block * self.block_size : (block + 1) * self.block_size] = 0

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._cells = on_device(batch.cells, self.device)
        offsets = torch.arange(self.block_size, device=self.device)
        self._contexts = []  # for each chunk, the cells of positions [0, end)
        for chunk in batch.chunks:
            cells = (on_device(chunk.blocks, self.device)[:, None] * self.block_size + offsets).flatten()
            self._contexts.append(cells[: chunk.end])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        if self._in_bytes:
            query, key, value = (as_bytes(x) for x in (query, key, value))
        keys[self._cells] = key
        values[self._cells] = value
        output = torch.empty(query.shape, dtype=self.dtype if self._in_bytes else query.dtype, device=query.device)
        for chunk, cells in zip(self._batch.chunks, self._contexts, strict=True):
            rows = slice(chunk.first, chunk.first + chunk.num_queries)
            output[rows] = attention(self.layers[layer], query[rows], keys[cells], values[cells], chunk.start)
        return output


def as_bytes(x: Tensor) -> Tensor:
    """What is left of `x` [..., head_dim] when each head is kept as whole numbers up to 127 and a scale."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    steps = torch.where(largest < 1e-30, 0.0, torch.full_like(largest, 127.0).div(largest))
    # In double: the kernel multiplies and rounds in one operation, and a half is to go the same way here.
    whole = (wide.double() * steps.double()).round().float()
    return whole * (largest / 127)


def attention(layer: LayerSpec, query: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Queries at positions [start, start + count) over keys and values of positions [0, start + count)."""
    group = layer.num_heads // layer.num_kv_heads
    k = keys.float().repeat_interleave(group, dim=1)  # [context, num_heads, head_dim]
    v = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * layer.scaling
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    mine = torch.arange(start, start + query.shape[0], device=query.device)[:, None]
    theirs = torch.arange(keys.shape[0], device=query.device)[None, :]
    hidden = theirs > mine
    if layer.window:
        hidden |= theirs <= mine - layer.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        probabilities = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        probabilities = torch.softmax(scores, dim=-1)
    # [window] a hidden key has probability 0, but 0 * NaN is NaN: keys out of the window are its owner's, never stale.
    return torch.einsum("hqk,khd->qhd", probabilities, v).to(query.dtype)
