"""Matrix products with weights that never change: laid out once for whatever multiplies fastest here.

Products of one input are fused into one. bf16 weights go through our own kernel where the processor's bf16 instruction
is the slower way (see kernels/bf16_product.cpp), anything else on a CPU through oneDNN's own layout, worth 1.25 to 1.6
times at up to 32 rows. On a processor with AMX, oneDNN is faster for many rows and our kernel for few: `pack_twice`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineclear.worker.huge_pages import HugePageArena
from lineclear.worker.kernels import LANES, library, multiplies_bfloat16
from lineclear.worker.kernels.call_graph import Call, DynamicInt, Kernel, pointer


class Linear(ABC):
    """A product with a matrix."""

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """[rows, in_features], room for the result -> [rows, out_features], in that room or elsewhere. Contiguous."""

    def bind(self, rows: DynamicInt, x: Tensor, out: Tensor) -> Call:
        """What multiplies the first `rows` rows of `x` into those of `out`."""

        def multiply() -> None:
            room = out[: rows.value]
            found = self(x[: rows.value], room)
            if found.data_ptr() != room.data_ptr():
                room.copy_(found)

        return multiply, ()


Packer = Callable[[Sequence[nn.Linear], HugePageArena], Linear]
"""Layers of one input, memory for weights -> their products side by side, outputs in the order given."""

_TYPICAL_ROWS = 64  # what oneDNN's layout is tuned for
_MOST_FEW_ROWS = 16  # with AMX our kernel takes 0.55 of oneDNN's time for 1 row, 0.77 for 8, and 1.1 for 32


def pack(layers: Sequence[nn.Linear], pages: HugePageArena) -> Linear:
    """A Packer that keeps the weights as they are."""
    weight, bias = joined(layers)
    if weight.device.type != "cpu":
        return TorchLinear(lambda x: F.linear(x, weight, bias))
    if weight.dtype == torch.bfloat16 and weight.shape[1] % LANES == 0 and multiplies_bfloat16():
        return Bf16Linear(weight, bias, pages)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return onednn(weight, bias)
    return TorchLinear(lambda x: F.linear(x, weight, bias))


def pack_twice(layers: Sequence[nn.Linear], pages: HugePageArena) -> Linear:
    """A Packer that lays bf16 weights out for our kernel and for oneDNN, which takes twice the memory.

    A row's result depends on whether there are few rows or many.
    """
    weight, bias = joined(layers)
    if weight.shape[1] % LANES:
        return pack(layers, pages)
    return LinearByRows(Bf16Linear(weight, bias, pages), onednn(weight, bias))


def plain(layers: Sequence[nn.Linear], pages: HugePageArena) -> Linear:
    """A Packer that copies nothing: slower, for a decoder that is only to be compared with."""
    return TorchLinear(lambda x: torch.cat([F.linear(x, layer.weight, layer.bias) for layer in layers], dim=-1))


def free_after_packing(packer: Packer) -> Packer:
    """The Packer, after which the layers' own matrices are gone. One that they share with others stays with those."""

    def pack_and_release(layers: Sequence[nn.Linear], pages: HugePageArena) -> Linear:
        packed = packer(layers, pages)
        for layer in layers:
            layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
        return packed

    return pack_and_release


def joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight [sum of out_features, in_features] and bias of the layers as one."""
    weight = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
    biased = any(layer.bias is not None for layer in layers)
    return weight, torch.cat([_bias(layer) for layer in layers]) if biased else None


class Bf16Linear(Linear):
    """Through our own kernel, in fp32 products of bf16 inputs; `library()` is there.

    A row's result is the same bit for bit whatever rows lie beside it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, pages: HugePageArena) -> None:
        native = library()
        assert native is not None
        self._multiply = Kernel(native, "lineclear_bf16_product")
        self._outputs, self._inputs = weight.shape
        self._panels = pages.take((native.lineclear_bf16_size(*weight.shape),), torch.bfloat16)
        native.lineclear_bf16_lay_out(*weight.shape, weight.contiguous().data_ptr(), self._panels.data_ptr())
        padding = len(self._panels) // self._inputs - self._outputs
        self._bias = None if bias is None else F.pad(bias.float(), (0, padding)).contiguous()

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        multiply, arguments = self.bind(DynamicInt(x.shape[0]), x, out)
        multiply(*arguments)
        return out

    def bind(self, rows: DynamicInt, x: Tensor, out: Tensor) -> Call:
        sizes = ctypes.c_int64(self._inputs), ctypes.c_int64(self._outputs)
        return self._multiply, (rows, *sizes, *map(pointer, (x, self._panels, self._bias, out)))


class LinearByRows(Linear):
    """Through one product for few rows and another one for many."""

    def __init__(self, few: Linear, many: Linear) -> None:
        self._few, self._many = few, many

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return (self._few if x.shape[0] <= _MOST_FEW_ROWS else self._many)(x, out)

    def bind(self, rows: DynamicInt, x: Tensor, out: Tensor) -> Call:
        few, few_arguments = self._few.bind(rows, x, out)
        many, many_arguments = self._many.bind(rows, x, out)

        def multiply() -> None:
            if rows.value <= _MOST_FEW_ROWS:
                few(*few_arguments)
            else:
                many(*many_arguments)

        return multiply, ()


class TorchLinear(Linear):
    """Through a function that makes its own room."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return self._function(x)


def onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    """Through oneDNN, in the layout it likes best."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    product = torch.ops.mkldnn._linear_pointwise
    none: list[float] = []
    return TorchLinear(lambda x: product(x, packed, bias, "none", none, ""))


def _bias(layer: nn.Linear) -> Tensor:
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
