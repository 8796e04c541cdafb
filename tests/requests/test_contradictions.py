"""Parameters that contradict each other are refused by name: no token is left, or a beam search does not use them.

The oracle keeps the sets of tokens that remain, by docs/sampling.md. Token sets and limits are drawn at random over a
small vocabulary, so that each pair of parameters contradicts itself in some examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineclear.errors import InvalidRequest
from lineclear.scheduler.requests.validate.request import ModelBounds, check
from lineclear.scheduler.requests.validate.sampling import with_bad_words
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

VOCABULARY = 4
EOS = 1
BOUNDS = ModelBounds(64, VOCABULARY, SchedulerSettings(max_outputs=4), 256, eos_ids=frozenset({EOS}))
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), unique=True)
NAMES = ("allowed_token_ids", "banned_token_ids", "begin_banned_token_ids")


def is_possible(params: dict[str, Any], stop: dict[str, Any], words: Sequence[int]) -> bool:
    """Whether there is a first token, and a later one before min_tokens."""
    ends = set() if params.get("ignore_eos") else set(stop["eos_token_ids"]) or {EOS}
    ends |= set(stop["token_ids"])
    later = set(params["allowed_token_ids"] or range(VOCABULARY)) - set(params["banned_token_ids"]) - set(words)
    if params["min_tokens"]:
        later -= ends
    first = later - set(params["begin_banned_token_ids"])
    if "forced_first_token_id" in params:
        first &= {params["forced_first_token_id"]}
    return bool(first and later)


@given(
    st.fixed_dictionaries(
        dict.fromkeys(NAMES, TOKENS) | {"min_tokens": st.integers(0, 2)},
        optional={"forced_first_token_id": st.integers(0, VOCABULARY - 1), "ignore_eos": st.booleans()},
    ),
    st.fixed_dictionaries({"token_ids": TOKENS, "eos_token_ids": TOKENS}),
    TOKENS,
)
@settings(max_examples=150, deadline=None)
def test_a_request_is_refused_exactly_if_no_token_is_left(
    params: dict[str, Any], stop: dict[str, Any], words: list[int]
) -> None:
    if params.get("ignore_eos"):
        stop = stop | {"eos_token_ids": []}  # another contradiction
    request = pb.GenerateRequest(text="a", sampling=params, stop=stop)
    expected: Any = contextlib.nullcontext() if is_possible(params, stop, words) else pytest.raises(InvalidRequest)
    with expected:
        with_bad_words(check(request, BOUNDS).sampling, [[(word,)] for word in words], VOCABULARY)


BEAMS = {"num_beams": 2, "seed": 1}
USED = {"n", "num_beams", "length_penalty", "early_stopping", "min_tokens", "max_tokens", "ignore_eos", "seed"}
"""Sampling parameters that a beam search uses."""
VALUES: dict[str, Any] = {
    **{name: ["x"] for name in ("bad_words", "dry_sequence_breakers")},
    **{name: [2] for name in NAMES},
    **dict.fromkeys(("temperature", "exponential_decay_factor", "repetition_penalty"), 1.5),
    **dict.fromkeys(("dry_base", "dry_allowed_length"), 2),
    "logit_bias": [{"token_id": 2, "bias": 1.0}],
    "structured_output": {"regex": "a"},
    "xtc_threshold": 0.25,
}
"""Values of those that do not take 1."""


REPETITION = {"max_pattern_size": 2, "min_count": 2}


def fields_refused(request: pb.GenerateRequest) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        check(request, BOUNDS)
    return [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize("name", sorted({*sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name} - USED))
def test_each_parameter_that_a_beam_search_does_not_use_is_refused(name: str) -> None:
    params = {name: VALUES.get(name, 1)}
    check(pb.GenerateRequest(text="a", sampling=params), BOUNDS)
    assert fields_refused(pb.GenerateRequest(text="a", sampling=BEAMS | params)) == [f"sampling.{name}"]


@pytest.mark.parametrize(
    ("path", "sampling", "fields"),
    [
        ("stop.strings", BEAMS, {"stop": {"strings": ["x"]}}),
        ("stop.regex", BEAMS, {"stop": {"regex": "x+"}}),
        ("stop.repetition_detection", BEAMS, {"stop": {"repetition_detection": REPETITION}}),
        ("output.token_timings", BEAMS, {"output": {"token_timings": True}}),
        ("output.prompt_logprobs", BEAMS, {"output": {"prompt_logprobs": 0}}),
        ("sampling.early_stopping", {**BEAMS, "early_stopping": 99}, {}),
        ("resume", BEAMS, {"resume": {"model_fingerprint": "m"}}),
        ("sampling.num_beams", {"n": 3, "num_beams": 2}, {}),
        ("sampling.best_of", {"n": 3, "best_of": 2}, {}),
        ("resume", {"best_of": 2, "seed": 1}, {"resume": {"model_fingerprint": "m"}}),
        ("sampling.forced_first_token_id", {"forced_first_token_id": 2, "structured_output": {"regex": "a"}}, {}),
    ],
)  # fmt: skip
def test_each_other_contradiction_is_refused(path: str, sampling: dict[str, Any], fields: dict[str, Any]) -> None:
    assert fields_refused(pb.GenerateRequest(text="a", sampling=sampling, **fields)) == [path]


def test_a_beam_search_takes_the_rest_of_a_request() -> None:
    request = pb.GenerateRequest(
        text="a",
        sampling={"num_beams": 4, "n": 2, "length_penalty": -10.0, "early_stopping": 3, "min_tokens": 2, "seed": 1,
                  "max_tokens": 5, "temperature": 0.0},
        stop={"token_ids": [3], "eos_token_ids": [2]},
        output={"logprobs": True, "top_logprobs": 20, "echo": True, "queue_position": True},
        priority=1, adapter="a", truncate_prompt_tokens=3, expected_tokens=3, num_speculative_tokens=4, cache_salt="s",
    )  # fmt: skip
    beams = check(request, BOUNDS).beams
    assert beams is not None
    assert (beams.num_beams, beams.end_ids, beams.min_tokens) == (4, {2, 3}, 2)
