"""What a beam search excludes is refused by the name of its field, for each field of the schema."""

from __future__ import annotations

from typing import Any

import pytest

from lineclear.errors import InvalidRequest
from lineclear.scheduler.requests.validate import request as validation
from lineclear.scheduler.requests.validate.request import ModelBounds
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

BOUNDS = ModelBounds(512, 512, SchedulerSettings(max_outputs=8), 256, eos_ids=frozenset({1}))
USED = {"n", "num_beams", "length_penalty", "early_stopping", "min_tokens", "max_tokens", "ignore_eos", "seed"}
VALUES: dict[str, Any] = {
    "best_of": 1,
    "bad_words": ["x"],
    "dry_sequence_breakers": ["x"],
    "dry_base": 2.0,
    "dry_allowed_length": 2,
    "temperature": 0.5,
    "logit_bias": [{"token_id": 5, "bias": 1.0}],
    "allowed_token_ids": [5],
    "banned_token_ids": [5],
    "begin_banned_token_ids": [5],
    "exponential_decay_factor": 1.5,
    "repetition_penalty": 1.5,
    "structured_output": {"regex": "a"},
    "xtc_threshold": 0.25,
}
EXCLUDED = sorted({*sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name} - USED)


def fields_refused(request: pb.GenerateRequest) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        validation.check(request, BOUNDS)
    return [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize("name", EXCLUDED)
def test_each_parameter_that_a_search_does_not_use_is_refused(name: str) -> None:
    params = {name: VALUES.get(name, 1)}
    validation.check(pb.GenerateRequest(text="a", sampling=params), BOUNDS)
    request = pb.GenerateRequest(text="a", sampling={"num_beams": 2, **params})
    assert fields_refused(request) == [f"sampling.{name}"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("stop.strings", {"stop": {"strings": ["x"]}}),
        ("stop.regex", {"stop": {"regex": "x+"}}),
        ("stop.repetition_detection", {"stop": {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}}),
        ("output.token_timings", {"output": {"token_timings": True}}),
        ("output.prompt_logprobs", {"output": {"prompt_logprobs": 0}}),
        ("sampling.early_stopping", {"sampling": {"early_stopping": 99}}),
        ("resume", {"resume": {"model_fingerprint": "m"}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_other_field_that_a_search_does_not_use_is_refused(path: str, fields: dict[str, Any]) -> None:
    request = pb.GenerateRequest(text="a", **fields)
    request.sampling.num_beams, request.sampling.seed = 2, 1
    assert fields_refused(request) == [path]


def test_a_search_takes_the_rest_of_a_request() -> None:
    request = pb.GenerateRequest(
        text="a",
        sampling={"num_beams": 4, "n": 2, "length_penalty": -10.0, "early_stopping": 3, "min_tokens": 2, "seed": 1,
                  "max_tokens": 5, "temperature": 0.0},
        stop={"token_ids": [3], "eos_token_ids": [4]},
        output={"logprobs": True, "top_logprobs": 20, "echo": True, "queue_position": True},
        priority=1, adapter="a", truncate_prompt_tokens=3, expected_tokens=3, num_speculative_tokens=4, cache_salt="s",
    )  # fmt: skip
    beams = validation.check(request, BOUNDS).beams
    assert beams is not None
    assert (beams.num_beams, beams.end_ids, beams.min_tokens) == (4, {3, 4}, 2)
