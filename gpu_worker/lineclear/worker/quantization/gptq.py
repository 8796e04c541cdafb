"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it, with 4 and 8 bits.

`qweight` int32 [inputs * bits / 32, outputs] holds the codes of consecutive inputs, `qzeros` int32 [groups,
outputs * bits / 32] the zero points of consecutive outputs, `scales` [groups, outputs]. With act-order, `g_idx`
[inputs] is the group of each input. Version 1 stores zero points less one, version 2 (`checkpoint_format: gptq_v2`)
as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from .grouped_weight import GroupedWeight
from .packed_codes import (
    MatrixBroken,
    Method,
    Parts,
    affine,
    order_of_groups,
    packed_bytes,
    part,
    repacked,
    unpacked,
    width,
)


def method(config: Mapping[str, Any]) -> Method:
    """Return how a checkpoint with this `quantization_config` stores its matrices."""
    offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    parts = ("qweight", "qzeros", "scales", "g_idx")
    return Method(f"gptq-{config['bits']}bit", parts, ("qweight",), partial(_read, offset))


def _read(offset: int, name: str, parts: Parts, inputs: int) -> GroupedWeight:
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
    if order is not None:
        codes = repacked(unpacked(codes, bits)[:, order], bits)
    zero = (unpacked(packed_bytes(zeros), bits).int() + offset) % (1 << bits)
    return affine(codes, bits, scales.t().contiguous(), zero.t().contiguous(), order)
