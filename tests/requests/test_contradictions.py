"""Parameters that leave no token to sample are refused; all others are accepted.

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
@settings(max_examples=400, deadline=None)
def test_a_request_is_refused_exactly_if_no_token_is_left(
    params: dict[str, Any], stop: dict[str, Any], words: list[int]
) -> None:
    if params.get("ignore_eos"):
        stop = stop | {"eos_token_ids": []}  # another contradiction
    request = pb.GenerateRequest(text="a", sampling=params, stop=stop)
    expected: Any = contextlib.nullcontext() if is_possible(params, stop, words) else pytest.raises(InvalidRequest)
    with expected:
        with_bad_words(check(request, BOUNDS).sampling, [[(word,)] for word in words], VOCABULARY)


def structured(**fields: Any) -> sampling_pb2.StructuredOutput:
    return sampling_pb2.StructuredOutput(regex="a", **fields)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "forced and not allowed": ({"forced_first_token_id": 2, "allowed_token_ids": [3]}, {}, {}),
    "min_tokens above max_tokens": ({"min_tokens": 3, "max_tokens": 2}, {}, {}),
    "ignore_eos and own ends": ({"ignore_eos": True}, {"eos_token_ids": [2]}, {}),
    "two kinds of stop texts": ({}, {"strings": ["a"], "regex": "b"}, {}),
    "forced token and form": ({"forced_first_token_id": 2, "structured_output": structured()}, {}, {}),
    "form that cannot end": ({"ignore_eos": True, "structured_output": structured()}, {}, {}),
    "fewer candidates than outputs": ({"n": 3, "best_of": 2}, {}, {}),
    "fewer beams than outputs": ({"n": 3, "num_beams": 2}, {}, {}),
    "candidates and beams": ({"best_of": 2, "num_beams": 2}, {}, {}),
    "beams and sampling": ({"num_beams": 2, "top_p": 0.5}, {}, {}),
    "beams and a form": ({"num_beams": 2, "structured_output": structured()}, {}, {}),
    "beams and stop strings": ({"num_beams": 2}, {"strings": ["a"]}, {}),
    "length penalty without beams": ({"length_penalty": 2.0}, {}, {}),
    "early stopping without beams": ({"early_stopping": sampling_pb2.EARLY_STOPPING_NEVER}, {}, {}),
    "top logprobs without logprobs": ({}, {}, {"logprobs": False, "top_logprobs": 1}),
    "token logprobs without logprobs": ({}, {}, {"logprobs": False, "logprob_token_ids": [1]}),
    "echo without text": ({}, {}, {"echo": True, "omit_text": True}),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradicting_parameters_are_refused(name: str) -> None:
    params, stop, output = CONTRADICTIONS[name]
    with pytest.raises(InvalidRequest):
        check(pb.GenerateRequest(text="a", sampling=params, stop=stop, output=output), BOUNDS)
