"""AWQ (Lin et al. 2023) as AutoAWQ stores it, with 4 bits.

Version GEMM: `qweight` int32 [inputs, outputs / 8], `qzeros` int32 [groups, outputs / 8] and `scales` [groups,
outputs]. The eight codes of a word belong to outputs in the order of `_ORDER`. Version GEMV: `qweight` int32 [outputs,
inputs / 8] in plain order; `qzeros` and `scales` are padded at the end of their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .grouped_weight import GroupedWeight
from .packed_codes import MatrixBroken, Method, Parts, affine, num_groups, packed_bytes, part, repacked, unpacked, width

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the codes of eight consecutive outputs lie in a word."""
_BITS = 4


def method(config: Mapping[str, Any]) -> Method:
    """Return how a checkpoint with this `quantization_config` stores its matrices."""
    read = _read_gemv if str(config.get("version", "gemm")).lower() == "gemv" else _read_gemm
    group_size = int(config.get("group_size", config.get("q_group_size", 128)))
    return Method(f"awq-{_BITS}bit", ("qweight", "qzeros", "scales"), ("qweight",), partial(read, group_size))


def _read_gemm(group_size: int, name: str, parts: Parts, inputs: int) -> GroupedWeight:
    words, groups = width(parts, "qweight", 1), num_groups(inputs, group_size)
    qweight = part(parts, "qweight", (inputs, words), torch.int32)
    qzeros = part(parts, "qzeros", (groups, words), torch.int32)
    scales = part(parts, "scales", (groups, words * 8))
    codes = repacked(_outputs(qweight).t(), _BITS)
    return affine(codes, _BITS, scales.t().contiguous(), _outputs(qzeros).t().contiguous())


def _outputs(words: Tensor) -> Tensor:
    """Return the codes of words [rows, n], uint8 [rows, 8 n] in the order of the outputs."""
    codes = unpacked(packed_bytes(words), _BITS)
    return codes.view(len(words), -1, 8)[:, :, _ORDER].flatten(1)


def _read_gemv(group_size: int, name: str, parts: Parts, inputs: int) -> GroupedWeight:
    outputs, groups = width(parts, "qweight", 0), num_groups(inputs, group_size)
    qweight = part(parts, "qweight", (outputs, inputs // 8), torch.int32)
    zeros = unpacked(packed_bytes(part(parts, "qzeros", (outputs, width(parts, "qzeros", 1)), torch.int32)), _BITS)
    scales = part(parts, "scales", (outputs, width(parts, "scales", 1)))
    if min(zeros.shape[1], scales.shape[1]) < groups:
        raise MatrixBroken(f"has fewer than {groups} scales or zero points for an output")
    return affine(packed_bytes(qweight), _BITS, scales[:, :groups], zeros[:, :groups])
