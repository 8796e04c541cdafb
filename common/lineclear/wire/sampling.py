"""Resolved sampling parameters of a sequence, and the range, default and use of each scalar.

The one table of scalar parameters: validation, codec, the worker's columns and their tests read it.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
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


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


class Use(Enum):
    """The part of the sampler that receives a scalar parameter."""

    PENALTY = auto()
    """Changes the logits of rows that differ from the neutral value."""
    DRY = auto()
    """Penalizes what continues a repetition."""
    NGRAM = auto()
    """Bans repeated n-grams."""
    DRAW = auto()
    """For all rows that are not greedy."""
    TRUNCATION = auto()
    """Restricts the distribution of drawn rows that differ from the neutral value."""
    RESHAPE = auto()
    """As TRUNCATION; rarely used, so that other rows do not pay for the columns."""
    HOST = auto()
    """Read on the host only."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar field of `Sampling`. With a `range` it is a field of SamplingParams, too, by the same name."""

    use: Use
    range: Range | None = None
    default: float = 0
    """Of a request that leaves it open. The neutral value, which changes nothing, is the default of `Sampling`."""
    in_generation_config: bool = False
    """Whether the model's generation_config.json may set the default."""
    format: str = ""
    """Its code in `struct` and NumPy."""
    is_switch: bool = True
    """Whether another value than the neutral one has an effect without other parameters."""


def _scalar(
    neutral: float,
    use: Use,
    allowed: Range | None = None,
    *,
    default: float | None = None,
    in_generation_config: bool = False,
    format: str = "",
    is_switch: bool = True,
) -> Any:
    code = format or ("f" if isinstance(neutral, float) else "q")
    entry = Scalar(use, allowed, neutral if default is None else default, in_generation_config, code, is_switch)
    return dataclasses.field(default=neutral, metadata={"scalar": entry})


@dataclass(frozen=True, slots=True)
class Sampling:
    """Resolved sampling parameters of one sequence. Meaning: protos/lineclear/v1/sampling.proto."""

    temperature: float = _scalar(0.0, Use.DRAW, Range(0.01, 10, or_zero=True), default=1.0, in_generation_config=True)
    top_k: int = _scalar(0, Use.TRUNCATION, Range(0, math.inf), in_generation_config=True)  # at most the vocabulary
    top_p: float = _scalar(1.0, Use.TRUNCATION, Range(0, 1, above_lowest=True), in_generation_config=True)
    min_p: float = _scalar(0.0, Use.TRUNCATION, Range(0, 1), in_generation_config=True)
    typical_p: float = _scalar(1.0, Use.RESHAPE, Range(0, 1, above_lowest=True), in_generation_config=True)
    top_n_sigma: float = _scalar(0.0, Use.RESHAPE, Range(0, 100))
    xtc_probability: float = _scalar(0.0, Use.RESHAPE, Range(0, 1))
    xtc_threshold: float = _scalar(
        _float32(0.1), Use.RESHAPE, Range(0, 0.5, above_lowest=True), default=0.1, is_switch=False
    )
    dynatemp_range: float = _scalar(0.0, Use.RESHAPE, Range(0, 10))
    dynatemp_exponent: float = _scalar(1.0, Use.RESHAPE, Range(0, 10), is_switch=False)
    repetition_penalty: float = _scalar(1.0, Use.PENALTY, Range(0.01, 10), in_generation_config=True)
    presence_penalty: float = _scalar(0.0, Use.PENALTY, Range(-2, 2))
    frequency_penalty: float = _scalar(0.0, Use.PENALTY, Range(-2, 2))
    dry_multiplier: float = _scalar(0.0, Use.DRY, Range(0, 100))
    dry_base: float = _scalar(1.75, Use.DRY, Range(1, 10), is_switch=False)
    dry_allowed_length: int = _scalar(2, Use.DRY, Range(1, 1000), is_switch=False)
    dry_penalty_last_n: int = _scalar(-1, Use.DRY, Range(-1, 100_000), is_switch=False)
    dry_breaker_ids: tuple[int, ...] = ()
    """Tokens that are or contain a sequence breaker."""
    dry_breaker_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequence breakers of two or more tokens."""
    no_repeat_ngram_size: int = _scalar(0, Use.NGRAM, Range(0, 100), in_generation_config=True)
    exponential_decay_start: int = _scalar(0, Use.HOST, Range(0, 100_000))
    exponential_decay_factor: float = _scalar(1.0, Use.HOST, Range(1, 10))
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    begin_banned_ids: tuple[int, ...] = ()
    """Banned as the first output token."""
    forced_first_id: int = _scalar(-1, Use.HOST)
    """The first output token; -1: any."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Each of two or more tokens, of which the last is banned behind the others in the output."""
    seed: int = _scalar(0, Use.HOST, format="Q")
    min_tokens: int = _scalar(0, Use.HOST)
    stop_ids: tuple[int, ...] = ()
    """End-of-sequence and stop tokens: banned by the worker until `min_tokens` outputs are there."""
    logprobs: int = _scalar(-1, Use.HOST)
    """-1: none. k >= 0: the sampled token's, and those of the k most likely."""
    logprob_ids: tuple[int, ...] = ()
    """Tokens whose log-probabilities are reported, too."""
    grammar: str = ""
    """Grammar that the output matches, in the format of llguidance; empty: any output. It ends with one of `stop_ids`.
    """
    grammar_start: str = ""
    """The grammar holds behind the first occurrence of this text in the output; empty: from the first token on."""


SCALARS: Mapping[str, Scalar] = {
    field.name: field.metadata["scalar"] for field in dataclasses.fields(Sampling) if "scalar" in field.metadata
}
LISTS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Sampling) if field.name not in SCALARS)
"""The other fields of `Sampling`: tuples and strings, empty by default."""
