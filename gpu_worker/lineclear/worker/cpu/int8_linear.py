"""Matrix products with 8-bit weights: quantised here once, multiplied by `kernels/int8_product.cpp`.

A scale an output channel for the weights and one a row for the activations, both symmetric. Half the bytes of bfloat16
to stream, and integer instructions; sums are exact, so what a row gives does not depend on the rows beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineclear.worker.huge_pages import HugePageArena
from lineclear.worker.kernels import ELEMENTS, library
from lineclear.worker.kernels.call_graph import Call, DynamicInt, Kernel, pointer, pointer_to

from .linear import Linear, joined

_LARGEST = 127
_CHANNELS = 64  # of a block: the layout is the kernel's
_OFFSET = 128  # what the kernel adds to activations


class QuantisedWeight(NamedTuple):
    """values * scale[:, None] is about the matrix."""

    values: Tensor
    """[outputs, inputs], int8."""
    scale: Tensor
    """[outputs], float32."""


def quantise(weight: Tensor) -> QuantisedWeight:
    """Each row of `weight` by its largest magnitude."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / _LARGEST
    steps = torch.where(scale > 0, scale, 1.0)  # a row of zeros stays one
    return QuantisedWeight((wide / steps[:, None]).round_().to(torch.int8), scale)


def pack_int8(layers: Sequence[nn.Linear], pages: HugePageArena) -> Linear:
    """A Packer that quantises the weights. For a CPU that there are kernels for; inputs are a multiple of 16."""
    weight, bias = joined(layers)
    return Int8Linear(quantise(weight), bias, pages)


class _Weights(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("correction", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class Int8Linear(Linear):
    """Owns what its description points to."""

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None, pages: HugePageArena) -> None:
        kernels: Any = library()
        self._function = Kernel(kernels, "lineclear_int8_product")
        outputs, inputs = weight.values.shape
        padding = -outputs % _CHANNELS
        values = F.pad(weight.values, (0, 0, 0, padding))
        blocks = values.view(-1, _CHANNELS, inputs // 4, 4)
        laid_out = pages.take((len(blocks), inputs // 4, _CHANNELS, 4), torch.int8)
        laid_out.copy_(blocks.transpose(1, 2))
        self._arrays = (
            laid_out,
            values.sum(dim=1, dtype=torch.int32) * -_OFFSET,
            F.pad(weight.scale, (0, padding)),
            None if bias is None else F.pad(bias.float(), (0, padding)),
        )
        pointers = (None if array is None else array.data_ptr() for array in self._arrays)
        self._weights = _Weights(inputs, outputs, *pointers)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        multiply, arguments = self.bind(DynamicInt(x.shape[0]), x, out)
        multiply(*arguments)
        return out

    def bind(self, rows: DynamicInt, x: Tensor, out: Tensor) -> Call:
        element = ctypes.c_int64(ELEMENTS[x.dtype])
        return self._function, (pointer_to(self._weights), element, rows, pointer(x), pointer(out))
