"""Validate SamplingParams and convert them to the worker's Sampling."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lineclear.errors import InvalidRequest, PromptTooLong
from lineclear.scheduler.requests.sampling_ranges import BIAS_RANGE, DEFAULTS, PARAMETERS
from lineclear.scheduler.requests.violations import Violations, add_out_of_vocabulary, checked_ids
from lineclear.v1 import sampling_pb2
from lineclear.wire.sampling import Sampling

MAX_LOGIT_BIAS = 300
MAX_ID_LIST = 4096
MAX_BREAKER_IDS = 16_384


def read_sampling(
    params: sampling_pb2.SamplingParams,
    vocab: int,
    context_length: int,
    defaults: Mapping[str, float],
    violations: Violations,
) -> tuple[Sampling, int | None]:
    """Return the parameters without stop tokens, texts and log probabilities, and max_tokens if it is set."""
    values: dict[str, Any] = {**DEFAULTS, **defaults}
    for field, value in params.ListFields():  # those that are set: asking each takes as long as the rest of this
        if (parameter := PARAMETERS.get(field.name)) is not None:
            values[field.name] = value
            if value not in parameter.range:
                violations.add(f"sampling.{field.name}", f"must be {parameter.range}")
    if params.top_k > vocab:
        violations.add("sampling.top_k", f"must be in [0, vocabulary], which is {vocab}")
    values["top_k"] = min(values["top_k"], vocab)
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    if max_tokens == 0:
        violations.add("sampling.max_tokens", "must be at least 1")
    elif max_tokens is not None and max_tokens >= context_length:
        description = f"must be below the context length, which is {context_length}"
        violations.add("sampling.max_tokens", description, PromptTooLong, context_length=context_length)
    limit = context_length if max_tokens is None else max_tokens
    if params.min_tokens > limit:
        violations.add("sampling.min_tokens", "must be in [0, max_tokens]")
    sampling = Sampling(
        **values,
        logit_bias=_logit_bias(params.logit_bias, vocab, violations),
        allowed_ids=checked_ids("sampling.allowed_token_ids", params.allowed_token_ids, MAX_ID_LIST, vocab, violations),
        banned_ids=checked_ids("sampling.banned_token_ids", params.banned_token_ids, MAX_ID_LIST, vocab, violations),
        begin_banned_ids=checked_ids(
            "sampling.begin_banned_token_ids", params.begin_banned_token_ids, MAX_ID_LIST, vocab, violations
        ),
        forced_first_id=_forced_first_id(params, vocab, violations),
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        min_tokens=params.min_tokens,
    )
    return sampling, max_tokens


def _forced_first_id(params: sampling_pb2.SamplingParams, vocab_size: int, violations: Violations) -> int:
    if not params.HasField("forced_first_token_id"):
        return -1
    if params.forced_first_token_id >= vocab_size:
        add_out_of_vocabulary("sampling.forced_first_token_id", vocab_size, violations)
    return params.forced_first_token_id


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
