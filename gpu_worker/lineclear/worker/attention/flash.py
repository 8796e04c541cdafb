"""Paged attention by FlashAttention 3 or 4 (Shah et al. 2024) through torch's `varlen_attn`, on CUDA.

Pools are [num_blocks, block_size, num_kv_heads, head_dim]; one call computes all chunks of a step in a layer. The
kernels are in packages of their own, and take block tables on one generation of devices each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import varlen

from .base import AttentionBackend, Batch

_IMPLEMENTATIONS = {9: "FA3", 10: "FA4"}
"""Those with block tables, by the major number of the device's compute capability."""


class FlashAttention(AttentionBackend):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_dtype is not self.dtype or self.dtype is torch.float32:
            raise ValueError("the flash attention backend computes in bfloat16 or float16")
        if any(x.softcap or x.sinks is not None or x.chunk or x.value_dim for x in self.layers):
            raise ValueError(
                "the flash attention backend has no softcap, no sinks, no chunks and no latents: choose triton_paged"
            )
        self._attention = varlen_attention(self.device)
        shapes = [(self.num_blocks, self.block_size, x.num_kv_heads, x.head_dim) for x in self.layers]
        self._make_pools(shapes, self.dtype)

    def start_step(self, batch: Batch) -> None:
        self._cells, self._fresh = self.put(batch.cells), self.put(batch.fresh_blocks)
        ends = batch.start + batch.num_queries
        num_used = -(-ends // self.block_size)
        # Behind its last block a row repeats it: those positions are not attended.
        places = np.minimum(np.arange(num_used.max()), num_used[:, None] - 1)
        self._tables = self.put(batch.blocks[batch.table[:, None] + places].astype(np.int32))
        self._ends = self.put(ends.astype(np.int32))
        self._first = self.put(np.append(batch.first, len(batch.cells)).astype(np.int32))
        self._longest = int(batch.num_queries.max()), int(ends.max())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec, keys, values = self.layers[layer], self._keys[layer], self._values[layer]
        for pool, new in ((keys, key), (values, value)):
            if self._fresh.numel():
                pool.index_fill_(0, self._fresh, 0)
            pool.flatten(0, 1).index_copy_(0, self._cells, new)
        # Queries are the last positions of their sequence: a mask to the left of each is causal.
        output: Tensor = self._attention(
            *(query.contiguous(), keys, values, self._first, None, *self._longest),
            scale=spec.scaling,
            window_size=(spec.window - 1, 0),
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            seqused_k=self._ends,
            block_table=self._tables,
        )
        return output


def varlen_attention(device: torch.device) -> Callable[..., Any]:
    """Return torch's varlen_attn with kernels that take block tables. Raises ValueError if it has none here."""
    major = torch.cuda.get_device_capability(device)[0]
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        raise ValueError(f"torch {torch.__version__} has no varlen_attn with block tables: choose triton_paged")
    name = _IMPLEMENTATIONS.get(major)
    if name is None:
        raise ValueError(f"FlashAttention has no block tables on compute capability {major}.x: choose triton_paged")
    try:
        attention.activate_flash_attention_impl(name)
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"the flash attention backend needs the package flash-attn-{name[2:]}: {error}") from None
    return varlen.varlen_attn
