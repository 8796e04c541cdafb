"""Small integers as checkpoints pack them, and the matrices that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .grouped_weight import GroupedWeight, QuantizedWeight, repacked, unpacked

Parts = Mapping[str, Tensor]
"""The tensors of one matrix by the last part of their names."""


class MatrixBroken(ValueError):
    """Tensors of a quantized matrix do not belong together; the message continues the matrix's name."""


Reader = Callable[[Parts, int], QuantizedWeight | list[GroupedWeight]]
"""Tensors and number of inputs -> the matrix; of experts, all. Raises MatrixBroken."""


@dataclass(frozen=True, slots=True)
class Method:
    """How a method of quantization stores matrices: the tensors `module + joint + part` are one."""

    label: str
    """Its name in logs and statistics."""
    parts: tuple[str, ...]
    markers: tuple[str, ...]
    """Parts that only a quantized matrix has."""
    read: Reader
    joint: str = "."
    parameter: str = ".weight"
    """The suffix of the module's name in a checkpoint that is not quantized."""


def part(parts: Parts, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
    """Return a tensor of this shape and one of these formats. Raises MatrixBroken."""
    tensor = parts.get(name)
    if tensor is None:
        raise MatrixBroken(f"has no {name}")
    if tuple(tensor.shape) != shape or (dtypes and tensor.dtype not in dtypes):
        found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        formats = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise MatrixBroken(f"has a {name} of {found}, not {formats} {list(shape)}".replace("  ", " "))
    return tensor


def width(parts: Parts, name: str, dimension: int) -> int:
    """Return one size of a matrix. Raises MatrixBroken if it is none."""
    tensor = parts.get(name)
    if tensor is None or tensor.dim() != 2:
        raise MatrixBroken(f"has no matrix {name}")
    return tensor.shape[dimension]


def num_groups(inputs: int, group_size: int) -> int:
    """Return the number of groups of one matrix row; a size that is not positive means one. Raises MatrixBroken."""
    if group_size <= 0:
        return 1
    if inputs % group_size:
        raise MatrixBroken(f"has {inputs} inputs, which cannot be divided into groups of {group_size}")
    return inputs // group_size


def packed_bytes(words: Tensor) -> Tensor:
    """Return int32 words [..., n] as uint8 [..., 4 n], the lowest byte first."""
    return words.contiguous().view(torch.uint8)


def affine(
    codes: Tensor, bits: int, scale: Tensor, zero: Tensor | int, input_order: Tensor | None = None
) -> GroupedWeight:
    """Return the matrix of `(code - zero) * scale`, from bytes of codes [outputs, inputs * bits / 8].

    scale [outputs, groups]; zero as well, or one for all. The codes are put in the order `input_order`.
    """
    scale = scale.float()
    if input_order is not None:
        codes = repacked(unpacked(codes, bits)[:, input_order], bits)
    if bits == 8:
        codes, zero = (codes ^ 128).view(torch.int8), zero - 128
    if not isinstance(zero, Tensor):
        return GroupedWeight(codes, bits, scale, scale * zero if zero else None, None, input_order)
    minimum = scale * zero if zero.any() else None
    return GroupedWeight(codes, bits, scale, minimum, None, input_order)


def order_of_groups(group_of_input: Tensor, groups: int) -> Tensor | None:
    """Return the inputs sorted by their group; None if they are. Raises MatrixBroken for groups of unequal size."""
    if group_of_input.numel() and (int(group_of_input.min()) < 0 or int(group_of_input.max()) >= groups):
        raise MatrixBroken(f"has a g_idx with a group outside of the {groups} groups")
    sizes = torch.bincount(group_of_input.long(), minlength=groups)
    if (sizes != sizes[0]).any():
        raise MatrixBroken("has a g_idx with groups of unequal size; quantize the model again without desc_act")
    order = torch.argsort(group_of_input, stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order
