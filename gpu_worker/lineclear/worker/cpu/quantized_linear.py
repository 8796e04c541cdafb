"""Linear layers with 4- and 8-bit weights, multiplied by kernels/grouped_gemm.cpp.

Activations are quantized to 8 bits at each call, in the groups of the weights. Integer sums are exact, so a row's
result does not depend on the other rows.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineclear.worker.device.huge_pages import HugePageArena
from lineclear.worker.kernels.call_graph import Call, DynamicInt, Kernel, fields, pointer, pointer_to
from lineclear.worker.kernels.native_library import ELEMENTS, LANES, selected_library
from lineclear.worker.quantization.grouped_weight import GroupedWeight, quantize

from .linear import Linear, Packer

_MAX_GROUP = 1 << 16  # inputs, of which a sum of products of 8 bits fits in 32 bits
_MAX_OFFSET = 255
_MAX_PLACE = 31  # of a table
INT4_GROUP = 64  # perplexity of groups of 32, in 4.5 bits a weight instead of 5


Form = Callable[[Tensor], GroupedWeight]
"""Quantizes a matrix [outputs, inputs]."""


def pack_quantized(layers: Sequence[Any], arena: HugePageArena, form: Form | None = None) -> Linear:
    """Pack layers with a common input, whose `weight` `form` quantizes; None: it is a GroupedWeight."""
    weights = [layer.weight if form is None else form(layer.weight.detach()) for layer in layers]
    return QuantizedLinear([(weight, layer.bias) for weight, layer in zip(weights, layers, strict=True)], arena)


def by_row(weight: Tensor) -> GroupedWeight:
    """Quantize to 8 bits, with one scale for each output."""
    return quantize(weight, 8, weight.shape[1])


def by_group(weight: Tensor) -> GroupedWeight:
    """Quantize to 4 bits, in the largest groups of at most 64 inputs that divide them."""
    return quantize(weight, 4, math.gcd(weight.shape[1], INT4_GROUP))


FORMS = {"int8": by_row, "int4": by_group}
"""What `--quantization` may choose."""
pack_int8 = partial(pack_quantized, form=by_row)


def packer_of(name: str, output_layer: nn.Linear) -> Packer:
    """Return the Packer that quantizes to a form of `FORMS`. The output layer needs 8 bits: its errors meet no norm."""

    def pack(layers: Sequence[nn.Linear], arena: HugePageArena) -> Linear:
        return pack_quantized(layers, arena, by_row if layers[0] is output_layer else FORMS[name])

    return pack


def stored_packer(plain: Packer) -> Packer:
    """Return the Packer that packs quantized matrices unchanged, and others by `plain`."""

    def pack(layers: Sequence[nn.Linear], arena: HugePageArena) -> Linear:
        weight: Any = layers[0].weight
        return (pack_quantized if isinstance(weight, GroupedWeight) else plain)(layers, arena)

    return pack


def can_pack(products: Iterable[Sequence[Any]]) -> bool:
    """Return whether the weights of each product are all plain, or all such as the kernel can multiply."""
    for weights in products:
        grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
        if len(grouped) != len(weights) and not all(isinstance(weight, Tensor) for weight in weights):
            return False
        try:
            for weight in grouped:
                _check(weight)
        except ValueError:
            return False
    return True


class _Weight(ctypes.Structure):
    """`LineclearGroupedWeight` in kernels/grouped_gemm.cpp."""

    _fields_ = (
        *fields(ctypes.c_int64, "inputs", "outputs", "group", "kind", "offset", "has_minimum", "column", "stride"),
        *fields(ctypes.c_void_p, "blocks", "scale", "bias", "table", "order"),
    )


class QuantizedLinear(Linear):
    """Multiplies with kernels/grouped_gemm.cpp. Owns the arrays that the kernel reads."""

    def __init__(self, parts: Sequence[tuple[GroupedWeight, Tensor | None]], arena: HugePageArena) -> None:
        """`parts` lie side by side in the output; like neighbours are one product. Raises ValueError as `_check`."""
        self._kernels: Any = selected_library()
        self._function = Kernel(self._kernels, "lineclear_grouped_gemm")
        products = [list(same) for _, same in groupby(map(_Part.of, *zip(*parts, strict=True)), _Part.format_key)]
        self._weights = (_Weight * len(products))()
        self._arrays: list[Tensor] = []  # kept alive: the kernel reads them
        stride, column = sum(weight.shape[0] for weight, _ in parts), 0
        for product, weight in zip(products, self._weights, strict=True):
            weight.column, weight.stride = column, stride
            self._pack(product, weight, arena)
            column += weight.outputs

    def bind(self, rows: DynamicInt, x: Tensor, out: Tensor) -> Call:
        count, element = ctypes.c_int64(len(self._weights)), ctypes.c_int64(ELEMENTS[x.dtype])
        return self._function, (pointer_to(self._weights), count, element, rows, pointer(x), pointer(out))

    @classmethod
    def bind_experts(cls, experts: Sequence[Any], counts: Tensor, x: Tensor, out: Tensor) -> Call:
        weights = (ctypes.c_void_p * len(experts))(*(pointer_to(expert._weights).value for expert in experts))
        parts = (ctypes.c_int64 * len(experts))(*(len(expert._weights) for expert in experts))
        tables = (ctypes.cast(table, ctypes.c_void_p) for table in (weights, parts))  # which keep them alive
        sizes = map(ctypes.c_int64, (len(experts), ELEMENTS[x.dtype]))
        arguments = *tables, *sizes, *map(pointer, (counts, x, out))
        return Kernel(selected_library(), "lineclear_grouped_gemm_experts"), arguments

    def _pack(self, parts: Sequence[_Part], packed: _Weight, arena: HugePageArena) -> None:
        """Fill `packed` with the outputs of all parts."""
        first, codes = parts[0], torch.cat([part.weight.codes for part in parts])
        packed.inputs, packed.group, packed.offset = first.weight.shape[1], first.weight.group_size, first.offset
        packed.outputs, packed.has_minimum = len(codes), first.minimum is not None
        packed.kind = first.kind
        packed.table = self._keep(first.weight.table)
        order = first.weight.input_order
        packed.order = self._keep(None if order is None else order.to(torch.int32))
        padding = -len(codes) % self._kernels.lineclear_grouped_channels()
        packed.scale = self._keep(F.pad(torch.cat([part.channel_scale for part in parts]), (0, padding)))
        if any(part.bias is not None for part in parts):
            packed.bias = self._keep(F.pad(torch.cat([part.bias_or_zeros() for part in parts]), (0, padding)))
        blocks = arena.allocate((self._kernels.lineclear_grouped_size(ctypes.byref(packed)),), torch.uint8)
        packed.blocks = self._keep(blocks)
        scale, minima = torch.cat([x.scale for x in parts]), [x.minimum for x in parts if x.minimum is not None]
        minimum = torch.cat(minima) if minima else None
        self._kernels.lineclear_pack_grouped(ctypes.byref(packed), *map(pointer, (codes, scale, minimum)))

    def _keep(self, array: Tensor | None) -> int | None:
        if array is None:
            return None
        self._arrays.append(array.contiguous())
        return self._arrays[-1].data_ptr()


class _Part(NamedTuple):
    """A weight and its bias, with scales and minima as the kernel reads them."""

    weight: GroupedWeight
    bias: Tensor | None
    channel_scale: Tensor
    """float32 [outputs], a factor of the next two."""
    scale: Tensor
    """float16 [outputs, groups]."""
    minimum: Tensor | None
    offset: int
    """Subtracted from the values."""
    kind: int
    """As in `LineclearGroupedWeight`."""

    @classmethod
    def of(cls, weight: GroupedWeight, bias: Tensor | None) -> _Part:
        """Raises ValueError for a weight that the kernel cannot multiply."""
        _check(weight)
        scale, minimum, offset, kind = weight.scale.float(), weight.minimum, 0, _kind(weight)
        if minimum is not None:
            offset = _middle(weight)
            minimum = minimum - offset * scale  # small, so that little is lost by rounding it
            minimum = minimum if minimum.any() else None
        if scale.shape[1] == 1 and minimum is None:
            return cls(weight, bias, scale[:, 0], torch.ones_like(scale, dtype=torch.float16), None, offset, kind)
        # Powers of 2, so that scales which are fp16 numbers do not change.
        largest = scale.abs().amax(dim=1)
        if minimum is not None:
            largest = torch.maximum(largest, minimum.abs().amax(dim=1) / _MAX_OFFSET)
        channel = torch.ldexp(torch.ones_like(largest), largest.frexp().exponent.clamp(min=-100))
        minimum = None if minimum is None else (minimum / channel[:, None]).half()
        return cls(weight, bias, channel, (scale / channel[:, None]).half(), minimum, offset, kind)

    def format_key(self) -> tuple[object, ...]:
        """Return a value that is equal for parts which one product can multiply."""
        table, order = self.weight.table, self.weight.input_order
        return (
            *(self.kind, self.weight.group_size, self.minimum is None, self.offset),
            None if table is None else tuple(table.tolist()),
            None if order is None else order.numpy().tobytes(),
        )

    def bias_or_zeros(self) -> Tensor:
        """Return the bias in float32 [outputs]."""
        return torch.zeros(len(self.weight.codes)) if self.bias is None else self.bias.detach().float()


def _check(weight: GroupedWeight) -> None:
    """Raise ValueError for shapes and values with which the kernel would leave its bounds or overflow."""
    (outputs, inputs), groups, order = weight.shape, weight.scale.shape[1], weight.input_order
    if inputs % groups or weight.group_size % LANES or weight.group_size > _MAX_GROUP:
        raise ValueError(
            f"{groups} groups of {inputs} inputs: groups must have a multiple of {LANES} inputs, up to {_MAX_GROUP}"
        )
    scales = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
    if any(x.shape != (outputs, groups) or not x.isfinite().all() for x in scales):
        raise ValueError(f"scales and minima are not {outputs} x {groups} finite numbers")
    if weight.table is not None and (weight.table.shape != (16,) or int(weight.table.max()) > _MAX_PLACE):
        raise ValueError(f"a table must have 16 values up to {_MAX_PLACE}")
    if order is not None and not torch.equal(order.sort().values, torch.arange(inputs)):
        raise ValueError(f"the order of {inputs} inputs is no permutation")


def _kind(weight: GroupedWeight) -> int:
    """Return the kind of values: 8 bits that hold 5 or 6, as of GGUF files, are a separate kind."""
    if weight.bits == 4:
        return 1 if weight.table is None else 2
    least, most = weight.codes.aminmax()
    return 3 if least >= -32 and most < 32 else 0


def _middle(weight: GroupedWeight) -> int:
    """Return the value that stands for 0, as in symmetric formats, else one from the middle."""
    assert weight.minimum is not None
    at = weight.scale.abs().argmax()
    value = (weight.minimum.flatten()[at] / weight.scale.flatten()[at]).nan_to_num().round()
    is_common = 0 <= value <= _MAX_OFFSET and torch.equal(weight.scale * value, weight.minimum)
    return int(value) if is_common else 8 if weight.bits == 4 else 0
