"""What a sampling parameter may be, and what it is where a request leaves it open.

What is left open comes from the model's generation_config.json (unless that is switched off), then from the defaults
written in sampling.proto. Requests are checked in validation.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """[lowest, highest], and zero besides where zero is allowed. NaN is in no range.

    The bounds are rounded as a protobuf float rounds what a caller wrote, so that a caller may write the bound.
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


RANGES: Mapping[str, Range] = {
    "temperature": Range(0.01, 10, or_zero=True),
    "top_p": Range(0, 1, above_lowest=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0.01, 10),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
BIAS_RANGE = Range(-100, 100)
DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_SET_BY_MODELS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters that a generation_config.json sets within our bounds; others are as if not there."""
    found: dict[str, float] = {}
    for name in _SET_BY_MODELS:
        value = generation_config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if (name == "top_k" and isinstance(value, int) and value >= 0) or (name in RANGES and value in RANGES[name]):
            found[name] = value
    return found


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
