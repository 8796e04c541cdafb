"""Validate SamplingParams and StopConditions, and convert them to the worker's Sampling.

`wire.sampling` has the ranges.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lineclear.errors import InvalidRequest, PromptTooLong
from lineclear.scheduler.requests.validate.violations import (
    Violations,
    add_out_of_vocabulary,
    checked_ids,
    checked_texts,
)
from lineclear.scheduler.text.stop_regex import MAX_PATTERN_BYTES, BadPattern, StopRegex
from lineclear.scheduler.text.stop_strings import RepetitionLimits, StopStrings
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2
from lineclear.wire.sampling import SCALARS, Range, Sampling

MAX_LOGIT_BIAS = 300
MAX_ID_LIST = 4096
MAX_BREAKER_IDS = 16_384
_ID_LISTS = {
    "allowed_token_ids": "allowed_ids",
    "banned_token_ids": "banned_ids",
    "begin_banned_token_ids": "begin_banned_ids",
}
"""Fields of SamplingParams: those of Sampling."""


RANGES: Mapping[str, Range] = {name: scalar.range for name, scalar in SCALARS.items() if scalar.range is not None}
"""Of the scalar fields of SamplingParams."""
DEFAULTS: Mapping[str, float] = {name: SCALARS[name].default for name in RANGES}
BIAS_RANGE = Range(-100, 100)


def model_defaults(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """Return the valid sampling parameters of a generation_config.json. Invalid ones are ignored."""
    found: dict[str, float] = {}
    for name, allowed in RANGES.items():
        value: Any = generation_config.get(name)
        numbers = int if isinstance(DEFAULTS[name], int) else int | float
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        if SCALARS[name].in_generation_config and is_number and value in allowed:
            found[name] = value
    return found


def read_sampling(
    given: Mapping[str, Any], vocab: int, context_length: int, defaults: Mapping[str, float], violations: Violations
) -> tuple[dict[str, Any], int | None]:
    """Return fields of Sampling, without stop tokens, texts and log probabilities, and max_tokens if it is set."""
    values: dict[str, Any] = {**DEFAULTS, **defaults}
    for name, value in given.items():
        if (allowed := RANGES.get(name)) is not None:
            values[name] = value
            if value not in allowed:
                violations.add(f"sampling.{name}", f"must be {allowed}")
    if given.get("top_k", 0) > vocab:
        violations.add("sampling.top_k", f"must be in [0, vocabulary], which is {vocab}")
    values["top_k"] = min(values["top_k"], vocab)
    max_tokens: int | None = given.get("max_tokens")
    if max_tokens == 0:
        violations.add("sampling.max_tokens", "must be at least 1")
    elif max_tokens is not None and max_tokens >= context_length:
        description = f"must be below the context length, which is {context_length}"
        violations.add("sampling.max_tokens", description, PromptTooLong, context_length=context_length)
    limit = context_length if max_tokens is None else max_tokens
    values["min_tokens"] = given.get("min_tokens", 0)
    if values["min_tokens"] > limit:
        violations.add("sampling.min_tokens", "must be in [0, max_tokens]")
    if "logit_bias" in given:
        values["logit_bias"] = _logit_bias(given["logit_bias"], vocab, violations)
    for name, field in _ID_LISTS.items():
        if name in given:
            values[field] = checked_ids(f"sampling.{name}", given[name], MAX_ID_LIST, vocab, violations)
    if "forced_first_token_id" in given:
        values["forced_first_id"] = given["forced_first_token_id"]
        if values["forced_first_id"] >= vocab:
            add_out_of_vocabulary("sampling.forced_first_token_id", vocab, violations)
    seed: int | None = given.get("seed")
    values["seed"] = int.from_bytes(os.urandom(8), "little") if seed is None else seed
    return values, max_tokens


def _logit_bias(
    entries: Sequence[sampling_pb2.LogitBias], vocab_size: int, violations: Violations
) -> tuple[tuple[int, float], ...]:
    path = "sampling.logit_bias"
    if len(entries) > MAX_LOGIT_BIAS:
        violations.add(path, f"has more than {MAX_LOGIT_BIAS} entries")
        return ()
    seen: set[int] = set()
    for index, entry in enumerate(entries):
        if entry.token_id >= vocab_size:
            add_out_of_vocabulary(f"{path}[{index}].token_id", vocab_size, violations)
        elif entry.token_id in seen:
            violations.add(f"{path}[{index}].token_id", "repeats the token of an earlier entry")
        seen.add(entry.token_id)
        if entry.bias not in BIAS_RANGE:
            violations.add(f"{path}[{index}].bias", f"must be {BIAS_RANGE}")
    return tuple((entry.token_id, entry.bias) for entry in entries)


def check_allowed(sampling: Sampling, stop_ids: frozenset[int], vocab_size: int, violations: Violations) -> None:
    """Require a token that can be sampled, as the first one and before min_tokens too."""
    if not (sampling.banned_ids or sampling.begin_banned_ids or sampling.allowed_ids or sampling.min_tokens):
        return
    banned = set(sampling.banned_ids) | (stop_ids if sampling.min_tokens > 0 else set())
    first_banned = banned | set(sampling.begin_banned_ids)
    if sampling.forced_first_id in first_banned:
        violations.add("sampling.forced_first_token_id", "must not be banned, by min_tokens neither")
    elif sampling.allowed_ids and sampling.forced_first_id not in (-1, *sampling.allowed_ids):
        violations.add("sampling.forced_first_token_id", "must be one of allowed_token_ids")
    if sampling.allowed_ids:
        if banned.issuperset(sampling.allowed_ids):
            violations.add(
                "sampling.allowed_token_ids", "leaves no token to sample with banned_token_ids and min_tokens"
            )
        elif first_banned.issuperset(sampling.allowed_ids):
            violations.add("sampling.begin_banned_token_ids", "leaves no first token with allowed_token_ids")
    elif len(banned) >= vocab_size:
        violations.add("sampling.banned_token_ids", "leaves no token to sample")
    elif len(first_banned) >= vocab_size:
        violations.add("sampling.begin_banned_token_ids", "leaves no first token to sample")


def with_bad_words(sampling: Sampling, words: Sequence[Sequence[tuple[int, ...]]], vocab_size: int) -> Sampling:
    """Return `sampling` with the token sequences of each bad word. Those of one token are banned ids.

    Raises InvalidRequest for a word without tokens, or if no token is left.
    """
    violations = Violations()
    path = "sampling.bad_words"
    for index, sequences in enumerate(words):
        if not sequences:
            violations.add(f"{path}[{index}]", "has no tokens")
        elif max(map(max, sequences)) >= vocab_size:
            add_out_of_vocabulary(f"{path}[{index}]", vocab_size, violations)
    violations.raise_if_any()
    distinct = sorted({sequence for sequences in words for sequence in sequences})
    single = tuple(sequence[0] for sequence in distinct if len(sequence) == 1)
    several = tuple(sequence for sequence in distinct if len(sequence) > 1)
    sampling = replace(sampling, banned_ids=(*sampling.banned_ids, *single), bad_words=several)
    check_allowed(sampling, frozenset(sampling.stop_ids), vocab_size, violations)
    if violations.violations:
        raise InvalidRequest.at(path, "leaves no token to sample")
    return sampling


def with_breakers(
    sampling: Sampling, ids: Sequence[int], sequences: Sequence[tuple[int, ...]], vocab_size: int
) -> Sampling:
    """Return `sampling` with the tokens of DRY's sequence breakers. Raises InvalidRequest for too many."""
    if len(ids) > MAX_BREAKER_IDS:
        raise InvalidRequest.at(
            "sampling.dry_sequence_breakers",
            f"is in {len(ids)} tokens of the vocabulary, the limit is {MAX_BREAKER_IDS}; use longer texts",
        )
    return replace(
        sampling,
        dry_breaker_ids=tuple(i for i in ids if i < vocab_size),
        dry_breaker_sequences=tuple(x for x in sequences if max(x) < vocab_size),
    )


MAX_STOP_STRINGS = 8
MAX_STOP_STRING_BYTES = 64
MAX_STOP_IDS = 16
MAX_PATTERN_SIZE = 128
MAX_PATTERN_COUNT = 1000


def end_ids(request: pb.GenerateRequest, vocab: int, violations: Violations) -> tuple[frozenset[int], frozenset[int]]:
    """Return the stop tokens and the end-of-sequence tokens that the request names."""
    stop = request.stop
    if stop.eos_token_ids and request.sampling.ignore_eos:
        violations.add("stop.eos_token_ids", "must be empty with sampling.ignore_eos")
    stop_ids = checked_ids("stop.token_ids", stop.token_ids, MAX_STOP_IDS, vocab, violations)
    eos_ids = checked_ids("stop.eos_token_ids", stop.eos_token_ids, MAX_STOP_IDS, vocab, violations)
    return frozenset(stop_ids), frozenset(eos_ids)


def text_options(stop: sampling_pb2.StopConditions, violations: Violations) -> dict[str, Any]:
    """Return the options of AnswerText for ends in the text."""
    return {
        "stops": _stops(stop, violations),
        "repetition": _repetition(stop, violations),
        "include_stop_string": stop.include_stop_string,
    }


def _stops(stop: sampling_pb2.StopConditions, violations: Violations) -> StopStrings | StopRegex | None:
    strings = checked_texts("stop.strings", stop.strings, MAX_STOP_STRINGS, MAX_STOP_STRING_BYTES, violations)
    if not stop.HasField("regex"):
        return StopStrings(strings) if strings else None
    if stop.strings:
        violations.add("stop.regex", "must be unset with stop.strings")
    elif not 1 <= len(stop.regex.encode()) <= MAX_PATTERN_BYTES:
        violations.add("stop.regex", f"must have 1 to {MAX_PATTERN_BYTES} bytes")
    else:
        try:
            return StopRegex(stop.regex)
        except BadPattern as error:
            violations.add("stop.regex", str(error))
    return None


def _repetition(stop: sampling_pb2.StopConditions, violations: Violations) -> RepetitionLimits | None:
    if not stop.HasField("repetition_detection"):
        return None
    given, path = stop.repetition_detection, "stop.repetition_detection"
    least = given.min_pattern_size if given.HasField("min_pattern_size") else 1
    if not 1 <= given.max_pattern_size <= MAX_PATTERN_SIZE:
        violations.add(f"{path}.max_pattern_size", f"must be in [1, {MAX_PATTERN_SIZE}]")
    elif not 1 <= least <= given.max_pattern_size:
        violations.add(f"{path}.min_pattern_size", "must be in [1, max_pattern_size]")
    if not 2 <= given.min_count <= MAX_PATTERN_COUNT:
        violations.add(f"{path}.min_count", f"must be in [2, {MAX_PATTERN_COUNT}]")
    return RepetitionLimits(given.max_pattern_size, least, given.min_count)
