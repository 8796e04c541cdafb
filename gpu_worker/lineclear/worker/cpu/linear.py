"""Linear layers with constant weights, packed once for the fastest matrix product of this processor.

Layers with a common input are fused into one product. bf16 weights use the kernel in kernels/gemm.cpp where the
processor's bf16 instruction is slower or missing, and float32 weights with AVX2. Others on a CPU use oneDNN's packed
layout, 1.25 to 1.6 times as fast at up to 32 rows, or torch where oneDNN cannot pack them. With AMX, oneDNN is faster
for many rows and the kernel for few: `pack_twice`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineclear.worker.decoder.decoder_experts import ExpertMatrix
from lineclear.worker.decoder.decoder_layers import fused_weights
from lineclear.worker.device.huge_pages import HugePageArena
from lineclear.worker.kernels.call_graph import Call, DynamicInt, Kernel, pointer, pointers
from lineclear.worker.kernels.native_library import (
    ELEMENTS,
    LANES,
    onednn_packs,
    prefers_bf16_gemm,
    prefers_float32_gemm,
    selected_library,
)


class Linear(ABC):
    """A matrix product with constant weights."""

    @abstractmethod
    def bind(self, rows: DynamicInt, x: Tensor, out: Tensor) -> Call:
        """Return a call that multiplies the first `rows` rows of `x` into those of `out`."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Multiply x [rows, in_features] into `out` [rows, out_features], and return that."""
        multiply, arguments = self.bind(DynamicInt(x.shape[0]), x, out)
        multiply(*arguments)
        return out

    @classmethod
    def bind_experts(cls, experts: Sequence[Any], counts: Tensor, x: Tensor, out: Tensor) -> Call:
        """Return a call that multiplies rows of `x` into those of `out`: the first counts[0] by the first expert, etc.

        All experts are of this class and have the same shape. `counts` is int64 and may have more elements.
        """

        def multiply() -> None:
            start = 0
            for expert, count in zip(experts, counts.tolist(), strict=False):
                if count:
                    expert(x[start : start + count], out[start : start + count])
                start += count

        return multiply, ()


Packer = Callable[[Sequence[nn.Linear], HugePageArena], Linear]
"""Packs layers with a common input into one `Linear`, with the outputs in the order given."""

_TYPICAL_ROWS = 64  # the batch size for which oneDNN chooses its layout
_MAX_FEW_ROWS = 16  # with AMX, the kernel takes 0.55 of oneDNN's time for 1 row, 0.77 for 8, and 1.1 for 32


def pack(layers: Sequence[nn.Linear], arena: HugePageArena) -> Linear:
    """Pack the layers in their own format."""
    if isinstance(layers[0], ExpertMatrix):
        return pack_by_row(layers, arena)
    weight, bias = fused_weights(layers)
    if weight.device.type != "cpu":
        return TorchLinear(lambda x: F.linear(x, weight, bias))
    is_bf16 = weight.dtype is torch.bfloat16
    if _fits_gemm(weight) and (prefers_bf16_gemm() if is_bf16 else prefers_float32_gemm()):
        return KernelLinear(weight, bias, arena)
    return onednn(weight, bias) if onednn_packs(weight.dtype) else TorchLinear(lambda x: F.linear(x, weight, bias))


def pack_twice(layers: Sequence[nn.Linear], arena: HugePageArena) -> Linear:
    """Pack bf16 weights for the kernel, for few rows, and for oneDNN; once if one of the two cannot take them."""
    if isinstance(layers[0], ExpertMatrix):
        return pack_by_row(layers, arena)
    weight, bias = fused_weights(layers)
    if not (weight.dtype is torch.bfloat16 and _fits_gemm(weight) and onednn_packs(weight.dtype)):
        return pack(layers, arena)
    return LinearByRows(KernelLinear(weight, bias, arena), onednn(weight, bias))


def pack_by_row(layers: Sequence[nn.Linear], arena: HugePageArena) -> Linear:
    """Pack for the kernel, on any processor: a row's result does not depend on the batch, nor on the threads."""
    return KernelLinear(*fused_weights(layers), arena)


def leave_unpacked(layers: Sequence[nn.Linear], arena: HugePageArena) -> Linear:
    """Multiply with the layers' own weights, without a copy: slower, for comparisons at load."""
    return TorchLinear(lambda x: torch.cat([F.linear(x, layer.weight, layer.bias) for layer in layers], dim=-1))


def free_after_packing(packer: Packer) -> Packer:
    """Return a Packer that frees each layer's weight after packing. A weight shared with another module stays there."""

    def pack_and_free(layers: Sequence[nn.Linear], arena: HugePageArena) -> Linear:
        packed = packer(layers, arena)
        for layer in layers:
            plain = layer.weight if isinstance(layer, nn.Linear) else torch.empty(0)
            layer.weight = nn.Parameter(plain.new_empty(0), requires_grad=False)
        return packed

    return pack_and_free


class KernelLinear(Linear):
    """Multiplies with kernels/gemm.cpp, in fp32: a row's result is bit for bit independent of the other rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, arena: HugePageArena) -> None:
        native = selected_library()
        assert native is not None
        self._multiply = Kernel(native, "lineclear_gemm")
        self._outputs, self._inputs = weight.shape
        self._element = ELEMENTS[weight.dtype]
        self._panels = arena.allocate((native.lineclear_packed_size(*weight.shape),), weight.dtype)
        weight = weight.contiguous()  # kept alive until it is packed
        native.lineclear_pack(self._element, *weight.shape, weight.data_ptr(), self._panels.data_ptr())
        padding = len(self._panels) // self._inputs - self._outputs
        self._bias = None if bias is None else F.pad(bias.float(), (0, padding)).contiguous()

    def bind(self, rows: DynamicInt, x: Tensor, out: Tensor) -> Call:
        element, *sizes = map(ctypes.c_int64, (self._element, self._inputs, self._outputs))
        return self._multiply, (element, rows, *sizes, *map(pointer, (x, self._panels, self._bias, out)))

    @classmethod
    def bind_experts(cls, experts: Sequence[Any], counts: Tensor, x: Tensor, out: Tensor) -> Call:
        sizes = experts[0]._element, len(experts), experts[0]._inputs, experts[0]._outputs
        tables = pointers([expert._panels for expert in experts]), pointers([expert._bias for expert in experts])
        arguments = *map(ctypes.c_int64, sizes), pointer(counts), pointer(x), *tables, pointer(out)
        return Kernel(selected_library(), "lineclear_gemm_experts"), arguments


class LinearByRows(Linear):
    """Uses one product for few rows and another for many."""

    def __init__(self, few: Linear, many: Linear) -> None:
        self._few, self._many = few, many

    def bind(self, rows: DynamicInt, x: Tensor, out: Tensor) -> Call:
        few, few_arguments = self._few.bind(rows, x, out)
        many, many_arguments = self._many.bind(rows, x, out)

        def multiply() -> None:
            if rows.value <= _MAX_FEW_ROWS:
                few(*few_arguments)
            else:
                many(*many_arguments)

        return multiply, ()


class TorchLinear(Linear):
    """Multiplies with a function that allocates its result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def bind(self, rows: DynamicInt, x: Tensor, out: Tensor) -> Call:
        def multiply() -> None:
            out[: rows.value].copy_(self._function(x[: rows.value]))

        return multiply, ()


def onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    """Pack for oneDNN, in its preferred layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    product = torch.ops.mkldnn._linear_pointwise
    none: list[float] = []
    return TorchLinear(lambda x: product(x, packed, bias, "none", none, ""))


def _fits_gemm(weight: Tensor) -> bool:
    return weight.dtype in ELEMENTS and weight.shape[1] % LANES == 0 and selected_library() is not None
