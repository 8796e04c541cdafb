"""Paged attention for CPUs in C++ (`kernels/paged_attention.cpp`), which reads the KV blocks in place."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lineclear.wire.messages import BlockCopy
from lineclear.worker.device.huge_pages import HugePageArena
from lineclear.worker.kernels.call_graph import Call, DynamicInt, Kernel, address, fields, pointer, pointer_to
from lineclear.worker.kernels.native_library import ELEMENTS, LANES, MAX_HEAD_DIM, selected_library

from .base import AttentionBackend, Batch, LayerSpec


class _Layer(ctypes.Structure):
    """`LineclearLayer` in kernels/paged_attention.cpp."""

    _fields_ = (
        *fields(ctypes.c_int64, "element", "block_size", "num_heads", "num_kv_heads", "head_dim", "block_stride"),
        *fields(ctypes.c_int64, "window", "chunk"),
        *fields(ctypes.c_float, "scaling", "softcap"),
        *fields(ctypes.c_void_p, "k_pool", "v_pool", "sinks", "k_scales", "v_scales"),
    )


class _Batch(ctypes.Structure):
    """`LineclearBatch` in kernels/paged_attention.cpp."""

    _fields_ = (
        *fields(ctypes.c_int64, "num_tokens", "num_chunks", "num_items"),
        *fields(ctypes.c_void_p, "cells", "first", "num_queries", "start", "table", "blocks"),
    )


class _Step:
    """The step's batch as a C struct at a fixed address, for layers with one number of heads."""

    def __init__(self, queries_per_item: int) -> None:
        self._queries_per_item = queries_per_item
        self._batch: Batch | None = None  # kept alive: the description points to its arrays
        self.description = _Batch()

    def describe(self, batch: Batch) -> None:
        """Point the struct to the arrays of `batch`."""
        self._batch = batch
        d = self.description
        d.num_tokens, d.num_chunks = len(batch.cells), len(batch.first)
        d.num_items = sum(-(-count // self._queries_per_item) for count in batch.num_queries.tolist())
        columns = batch.cells, batch.first, batch.num_queries, batch.start, batch.table, batch.blocks
        d.cells, d.first, d.num_queries, d.start, d.table, d.blocks = (address(x) for x in columns)


class NativeAttention(AttentionBackend):
    """Attention in float32 and bfloat16, with pools of either or int8. Reads only cells that their owner wrote."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        problem = unsupported_reason(self.layers, self.block_size, self.dtype, self.device)
        if problem:
            raise ValueError(f"the native attention backend cannot be used: {problem}")
        native: Any = selected_library()
        self._attend = Kernel(native, "lineclear_paged_attention")
        # A block holds its keys and values of all layers side by side. The first write to a huge page may take
        # milliseconds: a step that starts a block then waits for one page fault instead of one per layer.
        sizes = [x.num_kv_heads * x.head_dim * self.block_size for x in self.layers for _ in range(2)]
        self._pool = HugePageArena().allocate((self.num_blocks, sum(sizes)), self.kv_dtype)
        pools = torch.split(self._pool, sizes, dim=1)
        self._keys, self._values = list(pools[::2]), list(pools[1::2])  # [block, elements]
        shapes = [(2, self.num_blocks, x.num_kv_heads * self.block_size) for x in self.layers]
        self._scales = [torch.empty(shape) for shape in shapes] if self.kv_dtype is torch.int8 else []
        self._sinks = [None if x.sinks is None else x.sinks.detach().float().contiguous() for x in self.layers]
        self._descriptions = [self._describe(index) for index in range(len(self.layers))]
        self._steps = {
            counts: _Step(int(native.lineclear_queries_per_item(*counts)))
            for counts in {(x.num_heads, x.num_kv_heads) for x in self.layers}
        }

    def _describe(self, index: int) -> _Layer:
        spec, keys = self.layers[index], self._keys[index]
        sizes = ELEMENTS[self.dtype], self.block_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, keys.stride(0)
        arrays = keys, self._values[index], self._sinks[index], *(self._scales[index] if self._scales else ())
        return _Layer(*sizes, spec.window, spec.chunk, spec.scaling, spec.softcap, *map(pointer, arrays))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        # Whole blocks, since only the kernel knows their layout: it reads no copied cell that the owner did not write.
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        for view in self.block_views:
            view[targets] = view[sources]

    @property
    def block_views(self) -> Sequence[Tensor]:
        return [self._pool, *(scales.transpose(0, 1) for scales in self._scales)]

    def prefault(self, first: int, end: int) -> None:
        # One byte per page, by one thread: a fill runs on all threads, which then wait for each other's page faults.
        memory = self._pool[first:end].view(-1).view(torch.uint8)
        memory[:: mmap.PAGESIZE] = 0
        memory[-1:] = 0
        for scales in self._scales:
            scales[:, first:end] = 0

    def start_step(self, batch: Batch) -> None:
        for step in self._steps.values():
            step.describe(batch)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Some models rotate in float32 and pass that; the kernel reads the element type of the pool.
        query, key, value = self._to_pool_format(query), self._to_pool_format(key), self._to_pool_format(value)
        output = torch.empty_like(query)
        attend, arguments = self.bind(layer, DynamicInt(len(query)), query, key, value, output)
        attend(*arguments)
        return output

    def bind(self, layer: int, tokens: DynamicInt, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Call:
        assert all(x.dtype is self.dtype and x.is_contiguous() for x in (query, key, value, out))
        spec = self.layers[layer]
        step = self._steps[spec.num_heads, spec.num_kv_heads].description  # holds the number of tokens
        described = pointer_to(self._descriptions[layer]), pointer_to(step)
        return self._attend, (*described, *map(pointer, (query, key, value, out)))

    def _to_pool_format(self, x: Tensor) -> Tensor:
        return x if x.dtype is self.dtype and x.is_contiguous() else x.to(self.dtype).contiguous()


def unsupported_reason(layers: Sequence[LayerSpec], block_size: int, dtype: torch.dtype, device: torch.device) -> str:
    """Return why this backend cannot serve such layers; empty when it can."""
    if device.type != "cpu":
        return f"it runs on CPUs, the device is {device.type}"
    if dtype not in ELEMENTS:
        return f"it computes in float32 and bfloat16, the model is {str(dtype).removeprefix('torch.')}"
    if block_size % LANES:
        return f"a block must be a multiple of {LANES} tokens, it is {block_size}"
    if any(x.value_dim for x in layers):
        return "it keeps values beside keys, and the model's are latents, which are both"
    unsupported_dims = [x.head_dim for x in layers if x.head_dim % LANES or x.head_dim > MAX_HEAD_DIM]
    if unsupported_dims:
        return f"a head must be a multiple of {LANES} wide, at most {MAX_HEAD_DIM}; it is {unsupported_dims[0]}"
    return "" if selected_library() is not None else "there are no native kernels for it here (see docs/performance.md)"
