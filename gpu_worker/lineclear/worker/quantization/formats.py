"""The formats of AutoAWQ, bitsandbytes, GPTQ, float8 checkpoints and gpt-oss: how each stores a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .grouped_weight import Float8Weight, GroupedWeight, repacked, unpacked
from .packed_codes import MatrixBroken, Method, Parts, affine, num_groups, order_of_groups, packed_bytes, part, width

_AWQ_BITS = 4
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the codes of eight consecutive outputs lie in a word."""
_FLOAT8_SCALES = ("weight_scale_inv", "weight_scale")
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4_OFFSET = 12
_MXFP4_TABLE = [int(2 * sign * value + _MXFP4_OFFSET) for sign in (1, -1) for value in _MXFP4_VALUES]
_MXFP4_GROUP = 32


def awq(config: Mapping[str, Any]) -> Method:
    """AWQ (Lin et al. 2023) as AutoAWQ stores it, with 4 bits.

    Version GEMM: `qweight` int32 [inputs, outputs / 8], `qzeros` int32 [groups, outputs / 8] and `scales` [groups,
    outputs]. The eight codes of a word belong to outputs in the order of `_AWQ_ORDER`. Version GEMV: `qweight` int32
    [outputs, inputs / 8] in plain order; `qzeros` and `scales` are padded at the end of their rows.
    """
    read = _read_gemv if str(config.get("version", "gemm")).lower() == "gemv" else _read_gemm
    group_size = int(config.get("group_size", config.get("q_group_size", 128)))
    return Method(f"awq-{_AWQ_BITS}bit", ("qweight", "qzeros", "scales"), ("qweight",), partial(read, group_size))


def _read_gemm(group_size: int, parts: Parts, inputs: int) -> GroupedWeight:
    words, groups = width(parts, "qweight", 1), num_groups(inputs, group_size)
    qweight = part(parts, "qweight", (inputs, words), torch.int32)
    qzeros = part(parts, "qzeros", (groups, words), torch.int32)
    scales = part(parts, "scales", (groups, words * 8))
    codes = repacked(_outputs(qweight).t(), _AWQ_BITS)
    return affine(codes, _AWQ_BITS, scales.t().contiguous(), _outputs(qzeros).t().contiguous())


def _outputs(words: Tensor) -> Tensor:
    """Return the codes of words [rows, n], uint8 [rows, 8 n] in the order of the outputs."""
    codes = unpacked(packed_bytes(words), _AWQ_BITS)
    return codes.view(len(words), -1, 8)[:, :, _AWQ_ORDER].flatten(1)


def _read_gemv(group_size: int, parts: Parts, inputs: int) -> GroupedWeight:
    outputs, groups = width(parts, "qweight", 0), num_groups(inputs, group_size)
    qweight = part(parts, "qweight", (outputs, inputs // 8), torch.int32)
    qzeros = part(parts, "qzeros", (outputs, width(parts, "qzeros", 1)), torch.int32)
    scales = part(parts, "scales", (outputs, width(parts, "scales", 1)))
    zeros = unpacked(packed_bytes(qzeros), _AWQ_BITS)
    if min(zeros.shape[1], scales.shape[1]) < groups:
        raise MatrixBroken(f"has fewer than {groups} scales or zero points for an output")
    return affine(packed_bytes(qweight), _AWQ_BITS, scales[:, :groups], zeros[:, :groups])


def bitsandbytes(config: Mapping[str, Any]) -> Method:
    """bitsandbytes' 8 bits (LLM.int8(), Dettmers et al. 2022): `weight` int8, and `SCB`, 127 steps of each output."""
    return Method("bitsandbytes-8bit", ("weight", "SCB", "weight_format"), ("SCB",), _read_int8)


def _read_int8(parts: Parts, inputs: int) -> GroupedWeight:
    outputs = width(parts, "weight", 0)
    values = part(parts, "weight", (outputs, inputs), torch.int8)
    largest = part(parts, "SCB", (outputs,), torch.float32)
    return GroupedWeight(values.contiguous(), 8, (largest / 127)[:, None].contiguous())


def gptq(config: Mapping[str, Any]) -> Method:
    """GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it, with 4 and 8 bits.

    `qweight` int32 [inputs * bits / 32, outputs] holds the codes of consecutive inputs, `qzeros` int32 [groups,
    outputs * bits / 32] the zero points of consecutive outputs, `scales` [groups, outputs]. With act-order, `g_idx`
    [inputs] is the group of each input. Version 1 stores zero points less one, version 2 (`checkpoint_format: gptq_v2`)
    as they are.
    """
    offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    parts = ("qweight", "qzeros", "scales", "g_idx")
    return Method(f"gptq-{config['bits']}bit", parts, ("qweight",), partial(_read_gptq, offset))


def _read_gptq(offset: int, parts: Parts, inputs: int) -> GroupedWeight:
    outputs, groups = width(parts, "qweight", 1), width(parts, "scales", 0)
    bits = width(parts, "qweight", 0) * 32 // inputs  # GPTQModel's `dynamic` sets it by module
    if bits not in (4, 8) or groups < 1 or inputs % groups:
        raise MatrixBroken(f"has {inputs} inputs of {bits} bits in {groups} groups; 4 and 8 bits are supported")
    words = part(parts, "qweight", (inputs * bits // 32, outputs), torch.int32)
    scales = part(parts, "scales", (groups, outputs))
    zeros = part(parts, "qzeros", (groups, outputs * bits // 32), torch.int32)
    order = None
    if "g_idx" in parts:
        order = order_of_groups(part(parts, "g_idx", (inputs,), torch.int32, torch.int64), groups)
    codes = packed_bytes(words[:, :, None]).transpose(0, 1).reshape(outputs, -1)
    zero = (unpacked(packed_bytes(zeros), bits).int() + offset) % (1 << bits)
    return affine(codes, bits, scales.t().contiguous(), zero.t().contiguous(), order)


def float8(config: Mapping[str, Any]) -> Method:
    """Float8 weights: scales for blocks (DeepSeek V3's `weight_scale_inv`), for each output, or one for all.

    `weight` float8_e4m3fn [outputs, inputs] is multiplied by its scale. Activations are not quantized, which is more
    exact.
    """
    block = config.get("weight_block_size")
    read = partial(_read_float8, None if block is None else (int(block[0]), int(block[1])))
    return Method("fp8", ("weight", *_FLOAT8_SCALES, "input_scale", "activation_scale"), _FLOAT8_SCALES, read)


def _read_float8(block: tuple[int, int] | None, parts: Parts, inputs: int) -> Float8Weight:
    outputs = width(parts, "weight", 0)
    values = part(parts, "weight", (outputs, inputs), torch.float8_e4m3fn, torch.float8_e5m2)
    scale = next(parts[name] for name in _FLOAT8_SCALES if name in parts)
    if block is not None:
        return Float8Weight(values, *block_scales(scale, outputs, inputs, block))
    if scale.numel() not in (1, outputs):
        raise MatrixBroken(f"has scales of shape {list(scale.shape)}, and config.json has no weight_block_size")
    return Float8Weight(values, scale.float().reshape(-1, 1).expand(outputs, 1).contiguous(), inputs)


def block_scales(scale: Tensor, outputs: int, inputs: int, block: tuple[int, ...]) -> tuple[Tensor, int]:
    """Return scales [outputs, groups] of blocks [outputs, inputs] of the matrix, and the inputs of a group."""
    rows, columns = block
    if rows < 1 or columns < 1 or tuple(scale.shape) != (-(-outputs // rows), -(-inputs // columns)):
        raise MatrixBroken(
            f"has scales of shape {list(scale.shape)} for blocks of {rows} x {columns} in {outputs} x {inputs}"
        )
    return scale.float().repeat_interleave(rows, 0)[:outputs].contiguous(), columns


def mxfp4(config: Mapping[str, Any]) -> Method:
    """MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss stores its experts.

    `..._blocks` uint8 [experts, outputs, groups, 16] holds 32 inputs a group as E2M1, the low half of a byte first;
    `..._scales` uint8 [experts, outputs, groups] are powers of two with a bias of 127. Both are held without loss: the
    table holds twice each value, plus 12.
    """
    return Method("mxfp4", ("blocks", "scales"), ("blocks",), _read_mxfp4, joint="_", parameter="")


def _read_mxfp4(parts: Parts, inputs: int) -> list[GroupedWeight]:
    blocks = parts["blocks"]
    if blocks.dim() != 4 or inputs % _MXFP4_GROUP:
        raise MatrixBroken(f"has blocks of shape {list(blocks.shape)} for {inputs} inputs")
    experts, outputs, groups = blocks.shape[0], blocks.shape[1], inputs // _MXFP4_GROUP
    codes = part(parts, "blocks", (experts, outputs, groups, _MXFP4_GROUP // 2), torch.uint8).flatten(2)
    exponents = part(parts, "scales", (experts, outputs, groups), torch.uint8)
    scales = torch.exp2(exponents.float() - 128)  # half of 2 ** (exponent - 127)
    table = torch.tensor(_MXFP4_TABLE, dtype=torch.uint8)
    return [GroupedWeight(codes[i], 4, scales[i], scales[i] * _MXFP4_OFFSET, table) for i in range(experts)]
