"""An answer that must call tools is valid calls, whatever the model would write."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.serving import EOS, Serving, error_of, read_all
from support.small_tokenizers import save
from support.tool_answers import TOKENIZER, ids, larger_serving, parts_of
from support.tool_templates import ADD, HERMES, LLAMA3, MISTRAL, WEATHER
from support.tool_templates import tokenizer as with_markers

from lineclear.model_files.token_table import token_table
from lineclear.scheduler.core.sequence import Request
from lineclear.v1 import inference_pb2 as pb

CLOSED = {"additionalProperties": False}
BOOK = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"$ref": "#/$defs/name"}, "minItems": 1, "maxItems": 2},
        "class": {"enum": ["first", "é </tool_call>"]},
    },
    "required": ["names"],
    "$defs": {"name": {"type": "string", "maxLength": 5}},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "book": BOOK,
    "add": ADD["function"]["parameters"],
    "get_weather": WEATHER["function"]["parameters"],
    "now": {"type": "object", "maxProperties": 0},
}
NAMED_MISTRAL = MISTRAL + "{# [TOOL_CALLS]name[ARGS]{} #}"
IDENTIFIED_MISTRAL = MISTRAL + "{# [TOOL_CALLS]name[CALL_ID]id[ARGS]{} #}"
THINKING = HERMES.replace("<|im_start|>assistant\\n' }}{%- endif", "<|im_start|>assistant\\n<think>\\n' }}{%- endif")
TEMPLATES = {
    "hermes": HERMES,
    "hermes of a model that thinks": THINKING,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "mistral named": NAMED_MISTRAL,
    "mistral with ids": IDENTIFIED_MISTRAL,
}


def calls_request(seed: int, choice: pb.ToolChoice, **chat: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(chat=pb.ChatMessages(tool_choice=choice, **chat))
    request.chat.messages.add(role="user", content="quick")
    for name, schema in SCHEMAS.items():
        request.chat.tools.add(name=name, parameters=None if name == "now" else json.dumps(schema))
    request.sampling.seed = seed
    request.sampling.max_tokens = 2000
    return request


REQUIRED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)


def random_model(tokens: LLTokenizer) -> Callable[[Request], Sequence[int]]:
    """Return a model that writes any token that the grammar allows, often one that closes a part, and ends early."""
    closing = (b'"', b"}", b"]", b"\n", b"</think>", b"</tool_call>")
    closes = np.array([tokens.decode_bytes([token]) in closing for token in range(tokens.vocab_size)])

    def answer(request: Request) -> list[int]:
        matcher = LLMatcher(tokens, request.sampling.grammar)
        draw = np.random.default_rng(request.sampling.seed)
        output: list[int] = []
        while not (matcher.is_accepting() and (matcher.is_stopped() or draw.random() < 0.3)):
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: tokens.vocab_size])
            weights = (allowed != EOS) * (1.0 + (draw.random() < 0.3) * 1000 * closes[allowed])
            output.append(int(draw.choice(allowed, p=weights / weights.sum())))
            assert matcher.consume_token(output[-1])
            if len(output) > 600:
                return output
        return [*output, EOS]

    return answer


@pytest.mark.parametrize("name", TEMPLATES)
async def test_each_forced_answer_is_valid_calls(tmp_path: Path, name: str) -> None:
    model = save(tmp_path / "model", with_markers())
    async with larger_serving(tmp_path, template=TEMPLATES[name], tokenizer=TOKENIZER, model=model) as s:
        s.engine.answer = random_model(token_table(model))
        found: list[str] = []
        for seed in range(5):
            responses = await read_all(s.generate(calls_request(seed, REQUIRED)))
            text, reasoning, calls = parts_of(responses)
            if responses[-1].finished.finish_reason == pb.FINISH_REASON_LENGTH:
                continue
            assert responses[-1].finished.finish_reason == pb.FINISH_REASON_TOOL_CALLS
            assert (text, calls != []) == ("", True)
            assert not reasoning or "think" in name or "hermes" in name
            for _, tool, arguments in calls:
                jsonschema.validate(json.loads(arguments), {**SCHEMAS[tool], **CLOSED})
                found.append(tool)
        assert len(set(found)) > 1


@pytest.mark.parametrize("name", TEMPLATES)
async def test_named_function_is_called_once(tmp_path: Path, name: str) -> None:
    model = save(tmp_path / "model", with_markers())
    async with larger_serving(tmp_path, template=TEMPLATES[name], tokenizer=TOKENIZER, model=model) as s:
        s.engine.answer = random_model(token_table(model))
        for choice, chat in ((pb.ToolChoice(function="add"), {}), (REQUIRED, {"parallel_tool_calls": False})):
            for seed in range(2):
                calls = parts_of(await read_all(s.generate(calls_request(seed, choice, **chat))))[2]
                assert len(calls) == 1
                assert calls[0][1] == "add" or not choice.function


async def refusal(s: Serving, request: pb.GenerateRequest) -> tuple[str, list[tuple[str, str]]]:
    error = await error_of(s.generate(request))
    assert not s.engine.submitted
    return error.reason, [(violation.field, violation.description) for violation in error.violations]


async def test_call_that_cannot_be_forced_is_refused(tmp_path: Path) -> None:
    model = save(tmp_path / "model", with_markers())
    async with larger_serving(tmp_path, template=HERMES, tokenizer=TOKENIZER, model=model) as s:
        request = calls_request(1, REQUIRED)
        request.chat.tools[2].parameters = '{"type": "object", "not": {}}'
        reason, ((field, description),) = await refusal(s, request)
        assert (reason, field) == ("INVALID_REQUEST", "chat.tools")
        assert "tool 2" in description
        assert "not" in description
        request = calls_request(1, REQUIRED)
        request.chat.tools[0].parameters = '{"type": "object", "properties": {"a": ' + "[" * 9 + "]" * 9 + "}}"
        assert (await refusal(s, request))[0] == "INVALID_REQUEST"
        for path, change in (
            ("sampling.structured_output", {"structured_output": {"regex": "a"}}),
            ("sampling.num_beams", {"num_beams": 2}),
            ("chat.tool_choice", {"ignore_eos": True}),
        ):
            request = calls_request(1, REQUIRED)
            request.sampling.MergeFrom(type(request.sampling)(**change))
            fields = [field for field, _ in (await refusal(s, request))[1]]
            assert path in fields
    async with larger_serving(
        tmp_path, template=HERMES, tokenizer=TOKENIZER, model=model, tool_call_parser="none"
    ) as s:
        assert [field for field, _ in (await refusal(s, calls_request(1, REQUIRED)))[1]] == ["chat.tool_choice"]
    async with larger_serving(tmp_path, template=HERMES, tokenizer=TOKENIZER) as s:
        assert (await refusal(s, calls_request(1, REQUIRED)))[0] == "NO_STRUCTURED_OUTPUT"


async def test_unused_parameters_are_not_compiled(tmp_path: Path) -> None:
    """A model that may choose, or that must call another tool, gets tools that no grammar can express."""
    model = save(tmp_path / "model", with_markers())
    async with larger_serving(tmp_path, template=HERMES, tokenizer=TOKENIZER, model=model) as s:
        s.engine.answer = lambda request: ids("ok</s>")
        for choice in (pb.ToolChoice(), pb.ToolChoice(function="add")):
            request = calls_request(1, choice)
            request.chat.tools[2].parameters = '{"type": "object", "not": {}}'
            assert await read_all(s.generate(request))
        assert [bool(request.sampling.grammar) for request in s.engine.submitted] == [False, True]


@pytest.mark.parametrize("is_parallel", [True, False])
async def test_free_answer_ends_after_its_only_call(tmp_path: Path, is_parallel: bool) -> None:
    text = 'Yes <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "now"}</tool_call></s>'
    async with larger_serving(tmp_path, template=HERMES, tokenizer=TOKENIZER) as s:
        s.engine.answer = lambda request: ids(text)
        responses = await read_all(s.generate(calls_request(1, pb.ToolChoice(), parallel_tool_calls=is_parallel)))
        content, _, calls = parts_of(responses)
        assert content == "Yes "
        assert [call[1] for call in calls] == (["add", "now"] if is_parallel else ["add"])
        assert responses[-1].finished.finish_reason == pb.FINISH_REASON_TOOL_CALLS
        assert bool(s.engine.stopped) != is_parallel
