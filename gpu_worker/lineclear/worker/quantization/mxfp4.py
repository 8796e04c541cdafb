"""MXFP4 (OCP Microscaling Formats 1.0) as gpt-oss stores its experts.

`..._blocks` uint8 [experts, outputs, groups, 16] holds 32 inputs a group as E2M1, the low half of a byte first;
`..._scales` uint8 [experts, outputs, groups] are powers of two with a bias of 127. Both are held without loss: the
table holds twice each value, plus 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .grouped_weight import GroupedWeight
from .packed_codes import MatrixBroken, Method, Parts, part

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_OFFSET = 12
_TABLE = [int(2 * sign * value + _OFFSET) for sign in (1, -1) for value in _VALUES]
_GROUP = 32


def method(config: Mapping[str, Any]) -> Method:
    """Return how a checkpoint with this `quantization_config` stores its matrices."""
    return Method("mxfp4", ("blocks", "scales"), ("blocks",), _read, joint="_", parameter="")


def _read(name: str, parts: Parts, inputs: int) -> list[GroupedWeight]:
    blocks = parts["blocks"]
    if blocks.dim() != 4 or inputs % _GROUP:
        raise MatrixBroken(f"has blocks of shape {list(blocks.shape)} for {inputs} inputs")
    experts, outputs, groups = blocks.shape[0], blocks.shape[1], inputs // _GROUP
    codes = part(parts, "blocks", (experts, outputs, groups, _GROUP // 2), torch.uint8).flatten(2)
    exponents = part(parts, "scales", (experts, outputs, groups), torch.uint8)
    scales = torch.exp2(exponents.float() - 128)  # half of 2 ** (exponent - 127)
    table = torch.tensor(_TABLE, dtype=torch.uint8)
    return [GroupedWeight(codes[i], 4, scales[i], scales[i] * _OFFSET, table) for i in range(experts)]
