"""Reference attention: one sequence after another, in float32, with an explicit softmax.

Slow. The oracle for the tests of the other backends, for the compatibility probe and for the self-test.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .base import AttentionBackend, Batch, LayerSpec


class ReferenceAttention(AttentionBackend):
    """Pools are [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shapes = [(self.num_blocks, self.block_size, x.num_kv_heads, x.head_dim) for x in self.layers]
        self._is_int8 = self.kv_dtype is torch.int8
        self._make_pools(shapes, torch.float32 if self._is_int8 else self.kv_dtype)  # int8: the dequantized values

    def start_step(self, batch: Batch) -> None:
        self._batch = batch
        self._cells = self.put(batch.cells)
        offsets = np.arange(self.block_size)
        self._contexts = []  # per chunk: the cells of positions [0, end)
        for chunk in batch.chunks:
            cells = (chunk.blocks[:, None] * self.block_size + offsets).reshape(-1)
            self._contexts.append(self.put(cells[: chunk.end]))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._keys[layer].flatten(0, 1), self._values[layer].flatten(0, 1)
        if self._is_int8:
            query, key, value = (quantize_dequantize(x) for x in (query, key, value))
        keys[self._cells] = key
        if not self.layers[layer].value_dim:
            values[self._cells] = value
        shape = (*query.shape[:2], value.shape[-1])
        output = torch.empty(shape, dtype=self.dtype if self._is_int8 else query.dtype, device=query.device)
        for chunk, cells in zip(self._batch.chunks, self._contexts, strict=True):
            rows = slice(chunk.first, chunk.first + chunk.num_queries)
            context = keys[cells], values[cells][..., : value.shape[-1]]
            output[rows] = attention(self.layers[layer], query[rows], *context, chunk.start)
        return output


def quantize_dequantize(x: Tensor) -> Tensor:
    """Round `x` [..., head_dim] to symmetric int8 with one scale per head, and return it in float32."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    inverse_scale = torch.where(largest < 1e-30, 0.0, torch.full_like(largest, 127.0).div(largest))
    # In float64: the kernel multiplies and rounds in one operation, and halves must round the same way here.
    quantized = (wide.double() * inverse_scale.double()).round().float()
    return quantized * (largest / 127)


def attention(layer: LayerSpec, query: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """Attend queries at positions [start, start + num_queries) over keys and values of [0, start + num_queries)."""
    group = layer.num_heads // layer.num_kv_heads
    k = keys.float().repeat_interleave(group, dim=1)  # [context, num_heads, head_dim]
    v = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * layer.scaling
    if layer.softcap:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    query_positions = torch.arange(start, start + query.shape[0], device=query.device)[:, None]
    key_positions = torch.arange(keys.shape[0], device=query.device)[None, :]
    masked = (key_positions > query_positions) | (key_positions < layer.first_visible(query_positions))
    scores = scores.masked_fill(masked, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        probabilities = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        probabilities = torch.softmax(scores, dim=-1)
    # Masked keys have probability 0, but 0 * NaN is NaN: keys outside the window belong to the same sequence, never to
    # a previous owner of the block.
    return torch.einsum("hqk,khd->qhd", probabilities, v).to(query.dtype)
