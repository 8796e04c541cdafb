"""The forms of a quantized matrix: small integers, or 8-bit floating-point numbers, with scales for groups of inputs.

`GroupedWeight` holds without loss what is multiplied of GPTQ, AWQ, compressed-tensors, MXFP4 and the formats of GGUF,
whose codes, zero points and tables differ only in how they are stored. Kernels pack it; `dequantized` is what they are
held to. It cannot hold E4M3: values of one group differ by a factor of up to 2^17, and 8-bit integers with one scale
would round small ones more coarsely. So `Float8Weight` keeps the numbers, and products are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from lineclear.worker.kernels.native_library import ELEMENTS, LANES, selected_library

_PIECE_ELEMENTS = 1 << 22
"""Elements of a matrix that are quantized at once, in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """A matrix [outputs, inputs] in some tensors."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to(self, device: torch.device) -> Self:
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight(_Stored):
    """A matrix [outputs, inputs] of `value * scale - minimum`, by row and by group of consecutive inputs."""

    codes: Tensor
    """8 bits: int8 [outputs, inputs], the values. 4 bits: uint8 [outputs, inputs / 2], values of 0 to 15 or places in
    `table`; an input with an even number lies in the low half of its byte, and the next one in the high half."""
    bits: int
    """4 or 8."""
    scale: Tensor
    """float32 [outputs, groups]."""
    minimum: Tensor | None = None
    """float32 [outputs, groups]; None: 0."""
    table: Tensor | None = None
    """uint8 [16]: the value of each 4-bit code, at most 31; None: the code itself."""
    input_order: Tensor | None = None
    """int64 [inputs]: column j multiplies input `input_order[j]` (GPTQ's act-order); None: input j."""

    @property
    def shape(self) -> tuple[int, int]:
        outputs, columns = self.codes.shape
        return outputs, columns * 8 // self.bits

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scale.shape[1]

    def rows(self, rows: slice | Tensor) -> GroupedWeight:
        """Return the matrix of these outputs. One of a slice shares this one's memory."""
        minimum = None if self.minimum is None else self.minimum[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], minimum=minimum)

    def values(self) -> Tensor:
        """Return the values, int8 [outputs, inputs]."""
        if self.bits == 8:
            return self.codes
        codes = unpacked(self.codes, self.bits)
        return (codes if self.table is None else self.table[codes.int()]).to(torch.int8)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix in the order of the inputs, computed in float32 and rounded once to `dtype`."""
        native = selected_library()
        if native is not None and self.codes.is_cpu and dtype in ELEMENTS and self.group_size % LANES == 0:
            matrix = self._dequantized_at_once(native, dtype)
        else:
            wide = self.values().view(*self.scale.shape, -1) * self.scale[:, :, None]
            if self.minimum is not None:
                wide -= self.minimum[:, :, None]
            matrix = wide.view(self.shape).to(dtype)
        if self.input_order is not None:
            matrix = torch.empty_like(matrix).index_copy_(1, self.input_order, matrix)
        return matrix

    def _dequantized_at_once(self, native: Any, dtype: torch.dtype) -> Tensor:
        """Return what torch computes in many passes over memory."""
        matrix = self.scale.new_empty(self.shape, dtype=dtype)
        optional = (self.codes, self.table, self.scale, self.minimum)
        arrays = [None if tensor is None else tensor.contiguous() for tensor in optional]
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in (*arrays, matrix))
        native.lineclear_dequantize(ELEMENTS[dtype], self.bits, self.scale.numel(), self.group_size, *pointers)
        return matrix


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight(_Stored):
    """A matrix [outputs, inputs] whose element is `value * scale` of its row and group."""

    codes: Tensor
    """float8_e4m3fn or float8_e5m2 [outputs, inputs]."""
    scale: Tensor
    """float32 [outputs, groups]."""
    group_size: int
    """Consecutive inputs of a group; the last group may have fewer."""

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def rows(self, rows: slice | Tensor) -> Float8Weight:
        """Return the matrix of these outputs. One of a slice shares this one's memory."""
        return replace(self, codes=self.codes[rows], scale=self.scale[rows])

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix, computed in float32 and rounded once to `dtype`."""
        wide = self.codes.float()
        if self.scale.shape[1] == 1:
            return wide.mul_(self.scale).to(dtype)
        return wide.mul_(self.scale.repeat_interleave(self.group_size, 1)[:, : wide.shape[1]]).to(dtype)


QuantizedWeight = GroupedWeight | Float8Weight


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of bytes, uint8 [..., n * 8 / bits], the lowest bits first."""
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def repacked(codes: Tensor, bits: int) -> Tensor:
    """Return codes of `bits` bits [..., n] as bytes: the inverse of `unpacked`."""
    return codes.contiguous() if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4


def quantize(weight: Tensor, bits: int, group_size: int) -> GroupedWeight:
    """Quantize a matrix [outputs, inputs] by the largest magnitude (8 bits) or the range (4 bits) of each group.

    Checkpoints can hold the result: scales are bfloat16 numbers, and minima are 0 to 15 times their scales. Raises
    ValueError if `inputs` is no multiple of `group_size`.
    """
    inputs = weight.shape[1]
    if inputs % group_size:
        raise ValueError(f"{inputs} inputs cannot be divided into groups of {group_size}")
    native = selected_library()
    if native is not None and weight.is_cpu and weight.dtype in ELEMENTS and group_size % LANES == 0:
        return _quantized_at_once(native, weight, bits, group_size)
    step = max(1, _PIECE_ELEMENTS // inputs)
    parts = (weight[start : start + step] for start in range(0, len(weight), step))
    pieces = [_quantized(part.float().view(len(part), -1, group_size), bits) for part in parts]
    codes, scale, *minimum = map(torch.cat, zip(*pieces, strict=True))
    return GroupedWeight(codes, bits, scale, *minimum)


def _quantized_at_once(native: Any, weight: Tensor, bits: int, group_size: int) -> GroupedWeight:
    """Return what `_quantized` does, without tensors in between."""
    weight, (outputs, inputs) = weight.contiguous(), weight.shape
    codes = weight.new_empty(outputs, inputs * bits // 8, dtype=torch.uint8 if bits == 4 else torch.int8)
    scale, minimum = torch.empty(2, outputs, inputs // group_size)
    arrays = (tensor.data_ptr() for tensor in (weight, codes, scale, minimum))
    native.lineclear_quantize_groups(ELEMENTS[weight.dtype], bits, scale.numel(), group_size, *arrays)
    return GroupedWeight(codes, bits, scale, minimum if bits == 4 else None)


def _quantized(groups: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Return codes and scales, and with 4 bits minima, of [outputs, groups, inputs of a group]."""
    if bits == 8:
        scale = _bfloat16_above(groups.abs().amax(dim=2) / 127)
        return (groups / _divisor(scale)).round_().to(torch.int8).flatten(1), scale
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)  # so that 0 lies in the range
    scale = _bfloat16_above((high - low) / 15)
    zero = (-low[:, :, None] / _divisor(scale)).round_()
    codes = (groups / _divisor(scale)).add_(zero).round_().clamp_(0, 15).to(torch.uint8).flatten(1)
    return repacked(codes, bits), scale, zero[:, :, 0] * scale


def _bfloat16_above(scale: Tensor) -> Tensor:
    """Round positive numbers up to those of bfloat16: with a smaller scale, values would not fit."""
    return ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)[:, :, None]  # a group of zeros has scale 0
