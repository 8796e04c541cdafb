"""The formats of compressed-tensors (llm-compressor): packed integers (W4A16, W8A16), int8 (W8A8) and float8.

pack-quantized: `weight_packed` int32 [outputs, inputs * bits / 32] holds unsigned codes, `weight_scale` [outputs,
groups], with zero points `weight_zero_point` int32 [outputs * bits / 32, groups] packed along the outputs, and with
act-order `weight_g_idx`. int-quantized and float-quantized: `weight` [outputs, inputs] itself is int8 or float8_e4m3fn,
with one scale for all, for each output, or for each group or block. Activations are not quantized: that is more exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .formats import block_scales
from .grouped_weight import Float8Weight, GroupedWeight, QuantizedWeight, repacked, unpacked
from .packed_codes import MatrixBroken, Method, Parts, affine, order_of_groups, packed_bytes, part, width

_PARTS = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale")


def method(config: Mapping[str, Any]) -> Method:
    """Return how a checkpoint with this `quantization_config` stores its matrices.

    Which group of it a matrix belongs to is not looked up: its tensors show all but the size of blocks.
    """
    weights = [group["weights"] for group in config["config_groups"].values()]
    kinds = {"fp8" if each.get("type") == "float" else f"{each['num_bits']}bit" for each in weights}
    rows, columns = next((each["block_structure"] for each in weights if each.get("strategy") == "block"), (0, 0))
    read = partial(_read, (int(rows), int(columns)))
    return Method(f"compressed-tensors-{'+'.join(sorted(kinds))}", _PARTS, ("weight_packed", "weight_scale"), read)


def _read(block: tuple[int, int], parts: Parts, inputs: int) -> QuantizedWeight:
    if "weight_packed" in parts:
        return _read_packed(parts, inputs)
    outputs = width(parts, "weight", 0)
    values = part(parts, "weight", (outputs, inputs), torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    if (scale := parts.get("weight_scale")) is None:
        raise MatrixBroken("has no weight_scale")
    if block[0] and scale.dim() == 2 and scale.shape[0] != outputs:
        scale, size = block_scales(scale, outputs, inputs, block)
    else:
        scale, size = _row_scales(scale, outputs, inputs)
    if values.dtype is not torch.int8:
        return Float8Weight(values, scale, size)
    if inputs % size:
        raise MatrixBroken(f"has {inputs} inputs, which cannot be divided into groups of {size}")
    minimum, zero = None, parts.get("weight_zero_point")
    if zero is not None and zero.any():
        zero = _row_scales(zero, outputs, inputs)[0]
        if zero.shape != scale.shape:
            raise MatrixBroken(f"has zero points of shape {list(zero.shape)} and scales of {list(scale.shape)}")
        minimum = zero * scale
    return GroupedWeight(values.contiguous(), 8, scale, minimum)


def _read_packed(parts: Parts, inputs: int) -> GroupedWeight:
    outputs, groups = width(parts, "weight_packed", 0), width(parts, "weight_scale", 1)
    bits = width(parts, "weight_packed", 1) * 32 // inputs
    if bits not in (4, 8) or groups < 1 or inputs % groups or inputs * bits % 32:
        raise MatrixBroken(
            f"has {inputs} inputs of {bits} bits in {groups} groups, which are not whole words of 4 or 8"
        )
    words = part(parts, "weight_packed", (outputs, inputs * bits // 32), torch.int32)
    scale = part(parts, "weight_scale", (outputs, groups))
    zero: Tensor | int = 1 << bits - 1
    if "weight_zero_point" in parts:
        packed = part(parts, "weight_zero_point", (-(-outputs * bits // 32), groups), torch.int32)
        zero = unpacked(packed_bytes(packed.t()), bits).t()[:outputs].int()
    order = None
    if "weight_g_idx" in parts:
        g_idx = part(parts, "weight_g_idx", (inputs,), torch.int32, torch.int64)
        order = None if (g_idx < 0).any() else order_of_groups(g_idx, groups)
    return affine(packed_bytes(words), bits, scale, zero, order)


def stored(weight: GroupedWeight) -> dict[str, Tensor]:
    """Return a matrix of `grouped_weight.quantize` as pack-quantized holds it."""
    outputs, inputs = weight.shape
    codes = weight.codes if weight.bits == 4 else weight.codes.view(torch.uint8) ^ 128
    parts = {"weight_packed": codes.view(torch.int32), "weight_scale": weight.scale.bfloat16()}
    if weight.minimum is not None:
        zero = (weight.minimum / weight.scale).nan_to_num().to(torch.uint8)  # 0 / 0 in groups of zeros
        padded = repacked(functional.pad(zero.t(), (0, -outputs % 8)), weight.bits)
        parts["weight_zero_point"] = padded.flatten().view(torch.int32).view(len(padded), -1).t()
    return {**parts, "weight_shape": torch.tensor([outputs, inputs])}


def _row_scales(scale: Tensor, outputs: int, inputs: int) -> tuple[Tensor, int]:
    """Return scales [outputs, groups] from one, one for each output, or several; and the size of a group."""
    if scale.numel() == 1:
        return scale.float().reshape(1, 1).expand(outputs, 1).contiguous(), inputs
    if scale.dim() == 1:
        scale = scale[:, None]
    if scale.dim() != 2 or scale.shape[0] != outputs or not scale.shape[1] or scale.shape[1] > inputs:
        raise MatrixBroken(f"has scales of shape {list(scale.shape)} for {outputs} outputs")
    return scale.float().contiguous(), -(-inputs // scale.shape[1])
