"""bitsandbytes' 8 bits (LLM.int8(), Dettmers et al. 2022): `weight` int8, and `SCB`, 127 steps of each output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .grouped_weight import GroupedWeight
from .packed_codes import Method, Parts, part, width


def method(config: Mapping[str, Any]) -> Method:
    """Return how a checkpoint with this `quantization_config` stores its matrices."""
    return Method("bitsandbytes-8bit", ("weight", "SCB", "weight_format"), ("SCB",), _read)


def _read(name: str, parts: Parts, inputs: int) -> GroupedWeight:
    outputs = width(parts, "weight", 0)
    values = part(parts, "weight", (outputs, inputs), torch.int8)
    largest = part(parts, "SCB", (outputs,), torch.float32)
    return GroupedWeight(values.contiguous(), 8, (largest / 127)[:, None].contiguous())
