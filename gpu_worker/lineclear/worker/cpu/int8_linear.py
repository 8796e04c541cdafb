"""Linear layers with int8 weights: quantized here once, multiplied by kernels/int8_gemm.cpp.

Scales are symmetric: one per output channel for the weights, one per row for the activations. Integer sums are exact,
so a row's result does not depend on the other rows. Streams half the bytes of bfloat16 weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineclear.worker.decoder_layers import fused_weights
from lineclear.worker.huge_pages import HugePageArena
from lineclear.worker.kernels.call_graph import Call, DynamicInt, Kernel, pointer, pointer_to
from lineclear.worker.kernels.native_library import ELEMENTS, selected_library

from .linear import Linear

_LARGEST = 127
_CHANNELS = 64  # output channels of a block in the kernel's layout
_OFFSET = 128  # added to activations by the kernel


class QuantizedWeight(NamedTuple):
    """The matrix is about values * scale[:, None]."""

    values: Tensor
    """[outputs, inputs], int8."""
    scale: Tensor
    """[outputs], float32."""


def quantize(weight: Tensor) -> QuantizedWeight:
    """Quantize each row of `weight` [outputs, inputs] by its largest magnitude."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / _LARGEST
    divisor = torch.where(scale > 0, scale, 1.0)  # a row of zeros has scale 0
    return QuantizedWeight((wide / divisor[:, None]).round_().to(torch.int8), scale)


def pack_int8(layers: Sequence[nn.Linear], arena: HugePageArena) -> Linear:
    """Quantize and pack the layers. Needs a selected library; in_features must be a multiple of 16."""
    weight, bias = fused_weights(layers)
    return Int8Linear(quantize(weight), bias, arena)


class _Weights(ctypes.Structure):
    """`LineclearInt8Weights` in kernels/int8_gemm.cpp."""

    _fields_ = (
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("correction", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class Int8Linear(Linear):
    """Multiplies with kernels/int8_gemm.cpp. Owns the arrays that the kernel reads."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, arena: HugePageArena) -> None:
        kernels: Any = selected_library()
        self._function = Kernel(kernels, "lineclear_int8_gemm")
        outputs, inputs = weight.values.shape
        padding = -outputs % _CHANNELS
        values = F.pad(weight.values, (0, 0, 0, padding))
        blocks = values.view(-1, _CHANNELS, inputs // 4, 4)
        packed = arena.allocate((len(blocks), inputs // 4, _CHANNELS, 4), torch.int8)
        packed.copy_(blocks.transpose(1, 2))
        self._arrays = (
            packed,
            values.sum(dim=1, dtype=torch.int32) * -_OFFSET,
            F.pad(weight.scale, (0, padding)),
            None if bias is None else F.pad(bias.float(), (0, padding)),
        )
        pointers = (None if array is None else array.data_ptr() for array in self._arrays)
        self._weights = _Weights(inputs, outputs, *pointers)

    def bind(self, rows: DynamicInt, x: Tensor, out: Tensor) -> Call:
        element = ctypes.c_int64(ELEMENTS[x.dtype])
        return self._function, (pointer_to(self._weights), element, rows, pointer(x), pointer(out))
