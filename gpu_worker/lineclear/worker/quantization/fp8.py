"""Float8 weights: scales for blocks (DeepSeek V3's `weight_scale_inv`), for each output, or one for all.

`weight` float8_e4m3fn [outputs, inputs] is multiplied by its scale. Activations are not quantized: that is more exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .float8_weight import Float8Weight
from .packed_codes import MatrixBroken, Method, Parts, part, width

_SCALES = ("weight_scale_inv", "weight_scale")


def method(config: Mapping[str, Any]) -> Method:
    """Return how a checkpoint with this `quantization_config` stores its matrices."""
    block = config.get("weight_block_size")
    read = partial(_read, None if block is None else (int(block[0]), int(block[1])))
    return Method("fp8", ("weight", *_SCALES, "input_scale", "activation_scale"), _SCALES, read)


def _read(block: tuple[int, int] | None, name: str, parts: Parts, inputs: int) -> Float8Weight:
    outputs = width(parts, "weight", 0)
    values = part(parts, "weight", (outputs, inputs), torch.float8_e4m3fn, torch.float8_e5m2)
    scale = next(parts[name] for name in _SCALES if name in parts)
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
