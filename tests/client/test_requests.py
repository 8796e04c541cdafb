"""Requests set every field of the schema and reject values that no field holds."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, cast

import pytest

from lineclear.client import ChatMessage, RepetitionDetection, Request, Sampling
from lineclear.client.requests import REQUEST_FIELDS, SAMPLING_FIELDS, Params, pairs, tokenize_request
from lineclear.errors import InvalidRequest, MalformedMessage
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

EVERYTHING: dict[str, Any] = {
    "temperature": 0.5, "top_k": 40, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "logit_bias": {5: 1.5}, "allowed_token_ids": [1, 2], "banned_token_ids": [3],
    "seed": 2**64 - 1, "min_tokens": 1, "max_tokens": 9, "ignore_eos": True, "stop": ["x", "y"],
    "n": 2, "best_of": 3, "num_beams": 4, "length_penalty": 0.5,
    "early_stopping": "never",
    "bad_words": ["x", "y z"], "begin_banned_token_ids": [4], "forced_first_token_id": 0, "no_repeat_ngram_size": 3,
    "exponential_decay_start": 2, "exponential_decay_factor": 1.5, "typical_p": 0.5, "top_n_sigma": 1.5,
    "xtc_probability": 0.5, "xtc_threshold": 0.25, "dynatemp_range": 0.5, "dynatemp_exponent": 2.0,
    "dry_multiplier": 0.5, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": -1,
    "dry_sequence_breakers": [":"],
    "stop_regex": "z+", "stop_token_ids": [7], "eos_token_ids": [8], "include_stop_string": True,
    "repetition_detection": RepetitionDetection(20, 4),
    "json_schema": {"type": "integer"}, "json_whitespace": "any", "constraint_start": "</think>",
}  # fmt: skip


def fields(message: Any) -> set[str]:
    return set(message.DESCRIPTOR.fields_by_name)


def test_every_schema_field_is_a_parameter() -> None:
    stops = {"strings": "stop", "token_ids": "stop_token_ids", "regex": "stop_regex"}
    stops |= {name: name for name in ("include_stop_string", "eos_token_ids", "repetition_detection")}
    assert fields(sampling_pb2.StopConditions) == stops.keys()
    forms = {"json_object", "regex", "choice", "grammar"}  # of which a request has one
    assert fields(sampling_pb2.StructuredOutput) == forms | {"json_schema", "json_whitespace", "constraint_start"}
    params = fields(sampling_pb2.SamplingParams) - {"structured_output"} | fields(sampling_pb2.StructuredOutput)
    assert params | set(stops.values()) == SAMPLING_FIELDS == EVERYTHING.keys() | forms
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
    assert message.sampling == sampling_pb2.SamplingParams(
        temperature=0.5, top_k=40, top_p=0.75, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias=[sampling_pb2.LogitBias(token_id=5, bias=1.5)], allowed_token_ids=[1, 2],
        banned_token_ids=[3], seed=2**64 - 1, min_tokens=1, max_tokens=9, ignore_eos=True, bad_words=["x", "y z"],
        begin_banned_token_ids=[4], forced_first_token_id=0, no_repeat_ngram_size=3, exponential_decay_start=2,
        exponential_decay_factor=1.5, typical_p=0.5, top_n_sigma=1.5, xtc_probability=0.5, xtc_threshold=0.25,
        dynatemp_range=0.5, dynatemp_exponent=2.0, dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=3,
        dry_penalty_last_n=-1, dry_sequence_breakers=[":"],
        structured_output=sampling_pb2.StructuredOutput(
            json_schema='{"type": "integer"}', json_whitespace=sampling_pb2.JSON_WHITESPACE_ANY,
            constraint_start="</think>",
        ),
        n=2, best_of=3, num_beams=4, length_penalty=0.5,
        early_stopping=sampling_pb2.EARLY_STOPPING_NEVER,
    )  # fmt: skip
    assert message.stop == sampling_pb2.StopConditions(
        strings=["x", "y"],
        regex="z+",
        token_ids=[7],
        eos_token_ids=[8],
        include_stop_string=True,
        repetition_detection={"max_pattern_size": 20, "min_count": 4, "min_pattern_size": 1},
    )
    assert message.output == pb.OutputOptions(logprobs=True, top_logprobs=2)


def test_logprob_token_ids_ask_for_logprobs() -> None:
    assert Request.of("", logprob_token_ids=(3, 1)).to_proto().output == pb.OutputOptions(
        logprobs=True, logprob_token_ids=[3, 1]
    )
    with pytest.raises(InvalidRequest, match="logprob_token_ids"):
        Request.of("", logprob_token_ids=[-1]).to_proto()


def test_none_leaves_a_field_unset() -> None:
    assert Request.of("").to_proto() == pb.GenerateRequest(text="")
    assert Request.of("").to_proto().WhichOneof("prompt") == "text"


def test_zero_is_not_unset() -> None:
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
        ({"top_k": "many"}, "sampling.top_k"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"logit_bias": {"a": 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": [1]}, "sampling.logit_bias"),
        ({"logit_bias": {5: None}}, "sampling.logit_bias"),
        ({"allowed_token_ids": [-1]}, "sampling.allowed_token_ids"),
        ({"stop_token_ids": "12"}, "stop.token_ids"),
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


@pytest.mark.parametrize("turn", [{"role": "user", "content": None}, {"role": None, "content": "x"}])
def test_chat_message_without_content_is_rejected(turn: Any) -> None:
    for make in (lambda: Request.of([turn]).to_proto(), lambda: tokenize_request([turn])):
        with pytest.raises(InvalidRequest, match=r"chat\.messages\[0\]\.(role|content): must be a text"):
            make()


def test_tokenize_of_none_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="prompt: must be"):
        tokenize_request(cast("Any", None))
