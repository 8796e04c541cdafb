"""The scalar sampling parameters: ranges, defaults, and which of them a model's generation_config.json sets.

To add a parameter: sampling.proto, the wire's `Sampling` (step.proto and messages.py), an entry here, and the worker's
`SCALARS` and sampler. Validation, codec and their tests iterate over these tables.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """[lowest, highest], with `or_zero` also 0, with `above_lowest` (lowest, highest]. NaN is in no range.

    The bounds are rounded to float32 like a request's values, so that the bound itself is valid.
    """

    lowest: float
    highest: float
    or_zero: bool = False
    above_lowest: bool = False

    def __contains__(self, value: float) -> bool:
        if self.or_zero and value == 0:
            return True
        if self.above_lowest and value <= self.lowest:
            return False
        return _float32(self.lowest) <= value <= _float32(self.highest)

    def __str__(self) -> str:
        interval = f"{'(' if self.above_lowest else '['}{self.lowest:g}, {self.highest:g}]"
        return f"0 or in {interval}" if self.or_zero else f"in {interval}"


@dataclass(frozen=True, slots=True)
class SamplingParameter:
    """A scalar field of SamplingParams and of the wire's Sampling, by the same name."""

    default: float
    range: Range
    in_generation_config: bool = False
    """Whether the model's generation_config.json may set the default."""


PARAMETERS: Mapping[str, SamplingParameter] = {
    "temperature": SamplingParameter(1.0, Range(0.01, 10, or_zero=True), in_generation_config=True),
    "top_k": SamplingParameter(0, Range(0, math.inf), in_generation_config=True),  # at most the vocabulary
    "top_p": SamplingParameter(1.0, Range(0, 1, above_lowest=True), in_generation_config=True),
    "min_p": SamplingParameter(0.0, Range(0, 1), in_generation_config=True),
    "repetition_penalty": SamplingParameter(1.0, Range(0.01, 10), in_generation_config=True),
    "presence_penalty": SamplingParameter(0.0, Range(-2, 2)),
    "frequency_penalty": SamplingParameter(0.0, Range(-2, 2)),
}
DEFAULTS: Mapping[str, float] = {name: parameter.default for name, parameter in PARAMETERS.items()}
BIAS_RANGE = Range(-100, 100)


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Return the valid sampling parameters of a generation_config.json. Invalid ones are ignored."""
    found: dict[str, float] = {}
    for name, parameter in PARAMETERS.items():
        value: Any = generation_config.get(name)
        numbers = int if isinstance(parameter.default, int) else int | float
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        if parameter.in_generation_config and is_number and value in parameter.range:
            found[name] = value
    return found


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
