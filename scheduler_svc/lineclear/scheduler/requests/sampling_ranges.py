"""The scalar sampling parameters of requests, and which of them a model's generation_config.json sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lineclear.wire.sampling import SCALARS, Range


@dataclass(frozen=True, slots=True)
class SamplingParameter:
    """A scalar field of SamplingParams."""

    default: float
    range: Range
    in_generation_config: bool


PARAMETERS: Mapping[str, SamplingParameter] = {
    name: SamplingParameter(scalar.default, scalar.range, scalar.in_generation_config)
    for name, scalar in SCALARS.items()
    if scalar.range is not None
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
