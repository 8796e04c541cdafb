"""Calls of the row operations between the matrix products of a layer: gather, norm, heads, activation, argmax."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from lineclear.worker.decoder.decoder_layers import DecoderModel, Norm
from lineclear.worker.kernels.call_graph import Call, DynamicInt, DynamicPointer, Kernel, pointer
from lineclear.worker.kernels.native_library import ELEMENTS, selected_library


class Heads(NamedTuple):
    """Buffers of `RowKernels.split_heads`: its inputs, then its outputs [num_rows, heads, head_dim]."""

    qkv: Tensor
    cosine: Tensor
    """[num_rows, width], as `sine`: the first 2 * width values of a head rotate."""
    sine: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


class RowKernels:
    """Makes calls on the first rows of buffers [num_rows, width] of one number format, which the caller keeps alive."""

    def __init__(self, model: DecoderModel) -> None:
        self._element = ctypes.c_int64(ELEMENTS[model.dtype])
        self._residual_scale = ctypes.c_float(model.residual_scale)
        self._layout = ctypes.c_int64(model.rotates_pairs), ctypes.c_int64(model.has_grouped_heads)
        names = "gather_rows", "add_norm", "split_heads", "activation", "argmax", "cap"
        kernels = [Kernel(selected_library(), f"lineclear_{name}") for name in names]
        self._gather, self._add_norm, self._split_heads, self._activate, self._argmax, self._cap = kernels

    def gather(self, count: DynamicInt, table: DynamicPointer, indices: DynamicPointer, out: Tensor) -> Call:
        """Return the call out[i] = table[indices[i]]; the rows of both have the width of `out`."""
        size = ctypes.c_int64(out.stride(0) * out.itemsize)
        return self._gather, (count, size, table, indices, pointer(out))

    def add_norm(self, count: DynamicInt, residual: Tensor, add: Tensor | None, norm: Norm | None, out: Tensor) -> Call:
        """Return the call that adds `add` to the residual, in place, and writes the normed residual to `out`."""
        sizes, eps = (self._element, count, ctypes.c_int64(residual.shape[1])), 0.0 if norm is None else norm.eps
        of_norm = (None, None) if norm is None else (norm.weight, norm.bias)
        arrays = map(pointer, (residual, *of_norm))
        return self._add_norm, (*sizes, pointer(add), self._residual_scale, *arrays, ctypes.c_float(eps), pointer(out))

    def split_heads(self, count: DynamicInt, q_norm: Norm | None, k_norm: Norm | None, heads: Heads) -> Call:
        """Return the call that splits, norms and rotates queries and keys; a wide weight norms the whole row."""
        num_heads, head_dim = heads.query.shape[1:]
        norms_whole_row = q_norm is not None and q_norm.weight.numel() != head_dim
        sizes = num_heads, heads.key.shape[1], head_dim, heads.cosine.shape[1]
        return self._split_heads, (
            self._element,
            count,
            *map(ctypes.c_int64, sizes),
            *self._layout,
            *map(pointer, (heads.qkv, heads.cosine, heads.sine)),
            pointer(None if q_norm is None else q_norm.weight),
            pointer(None if k_norm is None else k_norm.weight),
            ctypes.c_int64(norms_whole_row),
            ctypes.c_float(0.0 if q_norm is None else q_norm.eps),
            *map(pointer, (heads.query, heads.key, heads.value)),
        )

    def activate(self, count: DynamicInt, activation: int, x: Tensor, out: Tensor) -> Call:
        """Return the call out = activation(x), or activation(gate) * up where `x` has both side by side."""
        is_gated = x.shape[1] != out.shape[1]
        sizes = map(ctypes.c_int64, (out.shape[1], activation, is_gated))
        return self._activate, (self._element, count, *sizes, pointer(x), pointer(out))

    def cap(self, count: DynamicInt, x: Tensor, cap: float) -> Call:
        """Return the call x = cap * tanh(x / cap), in place. torch's bits depend on where it divides among threads."""
        return self._cap, (self._element, count, ctypes.c_int64(x.shape[1]), ctypes.c_float(cap), pointer(x))

    def argmax(self, count: DynamicInt, logits: Tensor, max_values: Tensor, ids: Tensor) -> Call:
        """Return the call that writes the largest logit of each row, and its index."""
        width = ctypes.c_int64(logits.shape[1])
        return self._argmax, (self._element, count, width, *map(pointer, (logits, max_values, ids)))
