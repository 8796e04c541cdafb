"""Requests set every field of the schema and reject values that no field holds."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import numpy as np
import pytest
from client.test_every_parameter import VALUES

from lineclear.client import ChatMessage, Request, Sampling
from lineclear.client.admin_results import update_scheduling_request
from lineclear.client.requests import REQUEST_FIELDS, SAMPLING_FIELDS, Params, pairs, tokenize_request
from lineclear.errors import InvalidRequest, MalformedMessage
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

FORMS = {"json_object", "regex", "choice", "grammar"}
"""Forms of an answer of which a request has one."""
EVERYTHING: dict[str, Any] = {name: VALUES[name] for name in SAMPLING_FIELDS - FORMS}


def fields(message: Any) -> set[str]:
    return set(message.DESCRIPTOR.fields_by_name)


def test_every_schema_field_is_a_parameter() -> None:
    stops = {"strings": "stop", "token_ids": "stop_token_ids", "regex": "stop_regex"}
    stops |= {name: name for name in ("include_stop_string", "eos_token_ids", "repetition_detection")}
    assert fields(sampling_pb2.StopConditions) == stops.keys()
    assert fields(sampling_pb2.StructuredOutput) == FORMS | {"json_schema", "json_whitespace", "constraint_start"}
    params = fields(sampling_pb2.SamplingParams) - {"structured_output"} | fields(sampling_pb2.StructuredOutput)
    assert params | set(stops.values()) == SAMPLING_FIELDS
    own = {"timeout_seconds", "metadata", "add_generation_prompt", "on_model_change", "tenant", "response_format"}
    own |= {"on_queued", "tools", "tool_choice", "parallel_tool_calls"}
    elsewhere = {"text", "token_ids", "chat", "sampling", "stop", "output"}
    elsewhere.add("resume")  # the clients do that by themselves
    assert (fields(pb.GenerateRequest) - elsewhere) | fields(pb.OutputOptions) | own == REQUEST_FIELDS


def test_params_match_sampling_and_request() -> None:
    hints = {**typing.get_type_hints(Sampling), **typing.get_type_hints(Request)}
    keywords = typing.get_type_hints(Params)
    assert keywords.keys() == SAMPLING_FIELDS | REQUEST_FIELDS
    for name in keywords.keys() - {"timeout_seconds"}:
        assert keywords[name] == hints[name], name


def test_every_parameter_sets_its_field() -> None:
    message = Request.of("hi", **EVERYTHING, request_id="a", priority=0, expected_tokens=4, top_logprobs=2).to_proto()
    assert (message.text, message.request_id, message.priority, message.expected_tokens) == ("hi", "a", 0, 4)
    of_that_name = EVERYTHING.keys() & fields(sampling_pb2.SamplingParams) - {"logit_bias", "early_stopping"}
    assert message.sampling == sampling_pb2.SamplingParams(
        **{name: EVERYTHING[name] for name in of_that_name},
        logit_bias=[sampling_pb2.LogitBias(token_id=5, bias=1.0)],
        early_stopping=sampling_pb2.EARLY_STOPPING_NEVER,
        structured_output=sampling_pb2.StructuredOutput(
            json_schema='{"type": "integer"}', json_whitespace=sampling_pb2.JSON_WHITESPACE_ANY, constraint_start="go"
        ),
    )
    assert message.stop == sampling_pb2.StopConditions(
        strings=["x"],
        regex="x+",
        token_ids=[5],
        eos_token_ids=[5],
        include_stop_string=True,
        repetition_detection={"max_pattern_size": 2, "min_count": 3},
    )
    assert message.output == pb.OutputOptions(logprobs=True, top_logprobs=2)


def test_logprob_token_ids_ask_for_logprobs() -> None:
    assert Request.of("", logprob_token_ids=(3, 1)).to_proto().output == pb.OutputOptions(
        logprobs=True, logprob_token_ids=[3, 1]
    )
    with pytest.raises(InvalidRequest, match="logprob_token_ids"):
        Request.of("", logprob_token_ids=[-1]).to_proto()


def test_none_leaves_a_field_unset_and_zero_sets_it() -> None:
    assert Request.of("").to_proto() == pb.GenerateRequest(text="")
    assert Request.of("").to_proto().WhichOneof("prompt") == "text"
    message = Request.of("hi", temperature=0, priority=0, ignore_eos=False).to_proto()
    assert message.sampling.HasField("temperature")
    assert message.HasField("priority")
    assert message.sampling.HasField("ignore_eos")


def test_prompt_kinds() -> None:
    assert list(Request.of([1, 2]).to_proto().token_ids.ids) == [1, 2]
    assert Request.of([]).to_proto().HasField("token_ids")
    turns = [{"role": "system", "content": "be"}, ChatMessage("user", "hi")]
    chat = Request.of(turns, add_generation_prompt=False).to_proto().chat
    assert [(turn.role, turn.content) for turn in chat.messages] == [("system", "be"), ("user", "hi")]
    assert chat.HasField("add_generation_prompt")


def test_a_bool_is_no_token_id() -> None:
    with pytest.raises(InvalidRequest, match=r"token_ids\.ids: must be a list of whole numbers"):
        Request.of([True, 2]).to_proto()
    assert list(Request.of(np.array([1, 2])).to_proto().token_ids.ids) == [1, 2]  # type: ignore[arg-type]


def test_sampling_precedence() -> None:
    base = Sampling(temperature=0.5, max_tokens=5)
    request = Request.of("hi", base, max_tokens=6)
    message = request.to_proto(Sampling(temperature=0.25, max_tokens=4, top_k=3)).sampling
    assert (message.temperature, message.max_tokens, message.top_k) == (0.5, 6, 3)
    again = Request.of(request, temperature=0.75, priority=1)
    assert (again.sampling, again.priority) == (Sampling(temperature=0.75, max_tokens=6), 1)
    assert request.priority is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"top_k": -1}, "sampling.top_k"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"logit_bias": {"a": 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": [1]}, "sampling.logit_bias"),
        ({"logit_bias": {5: None}}, "sampling.logit_bias"),
        ({"allowed_token_ids": [-1]}, "sampling.allowed_token_ids"),
        ({"stop_token_ids": "12"}, "stop.token_ids"),
        ({"stop_token_ids": [5, np.bool_(True)]}, "stop.token_ids"),
        ({"stop": [1]}, "stop.strings"),
        ({"bad_words": [1]}, "sampling.bad_words"),
        ({"dry_penalty_last_n": "all"}, "sampling.dry_penalty_last_n"),
        ({"bad_words": "word"}, "sampling.bad_words"),
        ({"stop": 5}, "stop.strings"),
        ({"repetition_detection": {"size": 4}}, "stop.repetition_detection"),
        ({"repetition_detection": 4}, "stop.repetition_detection"),
        ({"repetition_detection": {"min_count": -1}}, "stop.repetition_detection.min_count"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"request_id": 5}, "request_id"),
        ({"prompt": [1, -77]}, "token_ids.ids"),
        ({"prompt": [{"role": "user"}]}, "chat.messages[0]"),
        ({"prompt": [{"role": "user", "content": 5}]}, "chat.messages[0].content"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": b"bytes"}, "prompt"),
    ],
)
def test_invalid_value_names_only_its_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request.of(**({"prompt": "hi"} | wrong)).to_proto()
    assert [violation.field for violation in caught.value.violations] == [field]
    assert field in str(caught.value)
    assert "-77" not in str(caught.value)


@pytest.mark.parametrize("wrong", [{"prompt": "\ud800"}, {"stop": "\ud800"}])
def test_invalid_unicode_is_malformed(wrong: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        Request.of(**({"prompt": "hi"} | wrong)).to_proto()


def test_unknown_parameter_lists_the_parameters() -> None:
    with pytest.raises(TypeError, match=r"no such parameter: temprature; the parameters are .*temperature"):
        Request.of("hi", temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "wrong", [{"a b": "x"}, {"grpc-x": "x"}, {"a": "\n"}, {"a": "ü"}, {"a": b"x"}, {"a-bin": "x"}, {"": "x"}]
)
def test_invalid_metadata_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="metadata"):
        pairs(wrong)


def test_metadata_is_a_mapping_or_pairs() -> None:
    assert pairs({"A": "1"}, [("b-bin", b"\x00"), ("a", "2")]) == (("a", "1"), ("b-bin", b"\x00"), ("a", "2"))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([{"role": "user", "content": None}], r"chat\.messages\[0\]\.content: must be a text"),
        ([{"role": None, "content": "x"}], r"chat\.messages\[0\]\.role: must be a text"),
        (None, "prompt: must be"),
    ],
)
def test_invalid_prompt_of_tokenize_is_rejected(prompt: Any, says: str) -> None:
    for make in (lambda: Request.of(prompt).to_proto(), lambda: tokenize_request(prompt)):
        with pytest.raises(InvalidRequest, match=says):
            make()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_batch_size", "abc", "changes.max_batch_size: must be a whole number"),
        ("max_batch_sise", 3, "changes.max_batch_sise: is no scheduling setting; is it max_batch_size?"),
        ("colour", 3, "changes.colour: is no scheduling setting; there are batching_strategy, "),
    ],
)
def test_invalid_scheduling_change_is_rejected(name: str, value: str | int, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        update_scheduling_request({name: value})
    assert str(caught.value).startswith(says)
