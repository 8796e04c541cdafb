"""KV pools whose cells hold what earlier sequences left."""

from __future__ import annotations

import numpy as np
import torch

from lineclear.worker.attention.base import AttentionBackend, Chunk, pack_chunks


def fill_pools(backend: AttentionBackend, value: float) -> None:
    """Leave `value` in every key and value, by a sequence that has all blocks."""
    num_tokens = backend.num_blocks * backend.block_size
    backend.start_step(pack_chunks([Chunk(0, num_tokens, 0, np.arange(backend.num_blocks))], backend.block_size))
    for index, layer in enumerate(backend.layers):
        heads = layer.num_heads, layer.num_kv_heads, layer.num_kv_heads
        widths = layer.head_dim, layer.head_dim, layer.value_dim or layer.head_dim
        shapes = [(num_tokens, *size) for size in zip(heads, widths, strict=True)]
        backend.attend(index, *(torch.full(x, value, dtype=backend.dtype, device=backend.device) for x in shapes))
