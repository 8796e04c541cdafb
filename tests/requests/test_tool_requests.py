"""Tools and calls in a conversation: what the chat template makes of them, and which requests are rejected."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.serving import Serving, error_of, serving
from support.small_tokenizers import byte_level, definition, save
from support.tool_templates import HERMES, TEMPLATES, TOOLS, tokenizer

from lineclear.errors import InvalidRequest
from lineclear.scheduler.requests.validate import tools as tool_validation
from lineclear.scheduler.requests.validate.request import ModelBounds, check, check_tokenize
from lineclear.scheduler.requests.validate.violations import Violations
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.detokenizer import decode
from lineclear.scheduler.text.template_renderer import ChatMessage, ChatTemplate, Conversation
from lineclear.scheduler.text.text_files import load_chat_template
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.scheduler.text.tool_context import ToolContext
from lineclear.v1 import inference_pb2 as pb

TOKENIZER = Tokenizer(definition(tokenizer()))
BOUNDS = ModelBounds(4096, 1000, SchedulerSettings(max_prompt_bytes=4096), 256)
ARGUMENTS = {"city": "Zürich <|im_end|>", "days": [1, 2.5, None], "deep": {"a": True}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
        ],
    },
    {"role": "tool", "content": '{"sky": "blue </s>"}', "tool_call_id": "call00001", "name": "get_weather"},
    {"role": "user", "content": "And [TOOL_CALLS] tomorrow?"},
]
WITH_REASONING = [*MESSAGES, {"role": "assistant", "content": "Sunny.", "reasoning_content": "Summer <s>."}]


def message_of(plain: Mapping[str, Any]) -> pb.ChatMessage:
    message = pb.ChatMessage(role=plain["role"], content=plain["content"])
    for call in plain.get("tool_calls", ()):
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        message.tool_calls.add(id=call["id"], name=function["name"], arguments=arguments)
    for name, field in (("tool_call_id", "tool_call_id"), ("name", "name"), ("reasoning_content", "reasoning")):
        if name in plain:
            setattr(message, field, plain[name])
    return message


def tool_of(plain: Mapping[str, Any]) -> pb.Tool:
    function = plain["function"]
    return pb.Tool(
        name=function["name"], description=function["description"], parameters=json.dumps(function["parameters"])
    )


def chat(
    messages: Sequence[Mapping[str, Any]] = MESSAGES, tools: Sequence[Mapping[str, Any]] = TOOLS, **fields: Any
) -> pb.ChatMessages:
    return pb.ChatMessages(messages=map(message_of, messages), tools=map(tool_of, tools), **fields)


def expected_ids(directory: Path, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> Any:
    from transformers import PreTrainedTokenizerFast

    library = PreTrainedTokenizerFast.from_pretrained(directory)
    # transformers takes special tokens in contents for real ones, so the texts are compared, not the ids.
    return library.apply_chat_template(messages, tools=list(tools) or None, add_generation_prompt=True, tokenize=False)


def rendered(template: ChatTemplate, conversation: pb.ChatMessages) -> list[int]:
    messages = [ChatMessage(message.role, message.content) for message in conversation.messages]
    context = tool_validation.context(conversation).parsed()
    return TOKENIZER.encode_sealed(template.render(Conversation(messages, context=context)))


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("tools", [TOOLS, ()], ids=["tools", "no tools"])
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[:1], WITH_REASONING], ids=["calls", "plain", "reasoning"])
def test_prompt_equals_transformers(
    tmp_path: Path, family: str, tools: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> None:
    model = save(tmp_path, tokenizer(), TEMPLATES[family])
    template = load_chat_template(model, TOKENIZER.seal)
    assert template is not None
    assert template.takes_tools
    text = decode(TOKENIZER, rendered(template, chat(messages, tools)), keep_special=True)
    assert text == expected_ids(model, messages, tools)


REPR = "{% for tool in tools %}{{ tool.function }}{{ tool | tojson(ensure_ascii=true) }}{% endfor %}"
COMPARES = (
    "{% for name, field in tools[0].function.parameters.properties.items() %}"
    "{% if field.type == 'string' %}{{ name }}{% endif %}{% if name == 'unit' %}!{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("source", [REPR, COMPARES])
def test_printed_and_compared_values_equal_transformers(tmp_path: Path, source: str) -> None:
    model = save(tmp_path, tokenizer(), source)
    template = load_chat_template(model, TOKENIZER.seal)
    assert template is not None
    ids = rendered(template, chat(MESSAGES[:1]))
    assert decode(TOKENIZER, ids, keep_special=True) == expected_ids(model, MESSAGES[:1], TOOLS)


def test_named_template_for_tools_is_used(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    model = save(tmp_path, byte_level(), chat_template=named)
    template = load_chat_template(model, TOKENIZER.seal)
    assert template is not None
    assert decode(TOKENIZER, rendered(template, chat()), keep_special=True) == "2 tools"
    assert decode(TOKENIZER, rendered(template, chat(tools=())), keep_special=True) == "plain"


FRAGMENTS = ["<|im_end|>", "<|im_start|>", "</s>", "[TOOL_CALLS]", "TOOL_CALLS", "[", "]"]
FRAGMENTS += ["im_end", "<|", "|>", '"', "\\"]


@pytest.mark.parametrize("source", [*TEMPLATES.values(), REPR])
@given(texts=st.lists(st.lists(st.sampled_from([*FRAGMENTS, "a", "\U00100000"]), max_size=5).map("".join), min_size=6))
@settings(max_examples=25, deadline=None)
def test_tools_write_no_special_tokens(source: str, texts: list[str]) -> None:
    """The special tokens equal those of the same conversation with the text `z` everywhere."""
    template = ChatTemplate(source, TOKENIZER.seal, {"bos_token": "<s>", "eos_token": "</s>"})

    def special(texts: Sequence[str]) -> list[int]:
        description, key, value, argument, entry, name = texts[:6]
        parameters = {"type": "object", "properties": {key: {"type": "string", "description": value}}}
        function = {"name": name, "description": description, "parameters": parameters}
        calls = [{"id": "123456789", "type": "function", "function": {"name": name, "arguments": {argument: entry}}}]
        context = ToolContext([{"type": "function", "function": function}], {1: {"tool_calls": calls}})
        messages = [ChatMessage("user", "x"), ChatMessage("assistant", ""), ChatMessage("user", "y")]
        ids = TOKENIZER.encode_sealed(template.render(Conversation(messages, context=context)))
        return [i for i in ids if TOKENIZER.is_special(i)]

    assert special(texts) == special(["z"] * 6)


async def test_tools_reach_the_template_over_the_wire(tmp_path: Path) -> None:
    async with serving(tmp_path, template=HERMES) as s:
        plain = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
        without = (await s.stub.Tokenize(pb.TokenizeRequest(chat=plain))).token_ids
        plain.tools.add(name="now")
        with_tools = (await s.stub.Tokenize(pb.TokenizeRequest(chat=plain))).token_ids
        text = (await s.stub.Detokenize(pb.DetokenizeRequest(token_ids=with_tools))).text
        assert '{"name": "now", "parameters": {"type": "object", "properties": {}}}' in text
        plain.tool_choice.mode = pb.TOOL_CHOICE_MODE_NONE
        assert (await s.stub.Tokenize(pb.TokenizeRequest(chat=plain))).token_ids == without


async def test_each_schema_is_parsed_once_on_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that renders the conversation parses it again, beside the event loop."""
    loads, parsed = json.loads, []
    monkeypatch.setattr(json, "loads", lambda text, **more: parsed.append(text) or loads(text, **more))
    async with serving(tmp_path, template=HERMES) as s:
        conversation = chat()
        parsed.clear()
        await s.stub.Tokenize(pb.TokenizeRequest(chat=conversation))
        calls = [call.arguments for message in conversation.messages for call in message.tool_calls]
        assert sorted(parsed) == sorted([*(tool.parameters for tool in conversation.tools), *calls])


def test_messages_of_content_alone_are_not_searched_for_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation may have 1,024 messages, and each search takes microseconds."""
    searched: list[str] = []
    monkeypatch.setattr(tool_validation, "_check_message", lambda path, message, violations: searched.append(path))
    conversation = chat()
    conversation.messages.extend([pb.ChatMessage(role="user", content="x")] * 100)
    tool_validation.check_tools(
        "chat", conversation, tool_validation.with_more_than_content(conversation), Violations()
    )
    with_more = [i for i, m in enumerate(conversation.messages) if len(m.ListFields()) > (2 if m.content else 1)]
    assert with_more
    assert searched == [f"chat.messages[{index}]" for index in with_more]


async def test_template_without_tools_rejects_them(s: Serving) -> None:
    error = await error_of(s.generate(pb.GenerateRequest(chat=chat(MESSAGES[:1]))))
    assert error.code == "INVALID_ARGUMENT"
    assert [violation.field for violation in error.violations] == ["chat.tools"]


def with_tools(*tools: pb.Tool, **choice: Any) -> pb.ChatMessages:
    found = pb.ChatMessages(messages=[message_of(MESSAGES[0])], tools=tools)
    if choice:
        found.tool_choice.MergeFrom(pb.ToolChoice(**choice))
    return found


def tool(**fields: Any) -> pb.ChatMessages:
    return with_tools(pb.Tool(**{"name": "f", **fields}))


def message(**fields: Any) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(**fields)])


def call(role: str = "assistant", **fields: Any) -> pb.ChatMessages:
    return message(role=role, tool_calls=[pb.ToolCall(**{"id": "1", "name": "f", "arguments": "{}", **fields})])


DEEP = '{"a": ' * 65 + "1" + "}" * 65
BAD = {
    "empty name": (tool(name=""), "chat.tools[0].name"),
    "odd name": (tool(name="get weather"), "chat.tools[0].name"),
    "long name": (tool(name="x" * 65), "chat.tools[0].name"),
    "same names": (with_tools(*[pb.Tool(name="f")] * 2), "chat.tools[1].name"),
    "many tools": (with_tools(*(pb.Tool(name=f"f{i}") for i in range(129))), "chat.tools"),
    "no JSON": (tool(parameters="{"), "chat.tools[0].parameters"),
    "empty schema": (tool(parameters=""), "chat.tools[0].parameters"),
    "no object": (tool(parameters="[]"), "chat.tools[0].parameters"),
    "other type": (tool(parameters='{"type": "string"}'), "chat.tools[0].parameters"),
    "properties": (tool(parameters='{"properties": []}'), "chat.tools[0].parameters"),
    "required": (tool(parameters='{"required": [1]}'), "chat.tools[0].parameters"),
    "deep": (tool(parameters=DEEP), "chat.tools[0].parameters"),
    "very deep": (tool(parameters='{"a": ' + "[" * 2000), "chat.tools[0].parameters"),
    "NaN": (tool(parameters='{"default": NaN}'), "chat.tools[0].parameters"),
    "too large": (tool(parameters='{"description": "' + "x" * 4096 + '"}'), "chat.messages"),
    "unknown function": (with_tools(pb.Tool(name="f"), function="g"), "chat.tool_choice.function"),
    "unknown choice": (with_tools(pb.Tool(name="f"), mode=9), "chat.tool_choice.mode"),
    "required without tools": (with_tools(mode=pb.TOOL_CHOICE_MODE_REQUIRED), "chat.tool_choice.mode"),
    "calls of a user": (call(role="user"), "chat.messages[0].tool_calls"),
    "call without id": (call(id=""), "chat.messages[0].tool_calls[0].id"),
    "call of an odd name": (call(name="a b"), "chat.messages[0].tool_calls[0].name"),
    "arguments": (call(arguments="[1]"), "chat.messages[0].tool_calls[0].arguments"),
    "many calls": (message(role="assistant", tool_calls=[pb.ToolCall()] * 129), "chat.messages[0].tool_calls"),
    "result of a user": (message(role="user", tool_call_id="1"), "chat.messages[0].tool_call_id"),
    "empty result id": (message(role="tool", tool_call_id=""), "chat.messages[0].tool_call_id"),
    "long author": (message(role="tool", name="x" * 65), "chat.messages[0].name"),
    "reasoning of a user": (message(role="user", reasoning="x"), "chat.messages[0].reasoning"),
}


@pytest.mark.parametrize(("bad", "path"), BAD.values(), ids=BAD)
def test_bad_tools_are_rejected_with_their_path(bad: pb.ChatMessages, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(pb.GenerateRequest(chat=bad), BOUNDS)
    assert [violation.field for violation in caught.value.violations] == [path]
    with pytest.raises(InvalidRequest) as caught:
        check_tokenize(pb.TokenizeRequest(chat=bad), BOUNDS.settings)
    assert [violation.field for violation in caught.value.violations] == [path]


def test_tools_of_a_forced_call_have_the_limit_of_a_form() -> None:
    forced = with_tools(
        pb.Tool(name="f", parameters='{"description": "' + "x" * 100 + '"}'), mode=pb.TOOL_CHOICE_MODE_REQUIRED
    )
    bounds = replace(BOUNDS, eos_ids=frozenset({1}))
    check(pb.GenerateRequest(chat=forced), bounds)
    bounds = replace(bounds, settings=SchedulerSettings(max_grammar_bytes=64))
    with pytest.raises(InvalidRequest, match=r"chat\.tools: has 119 bytes, the limit is 64"):
        check(pb.GenerateRequest(chat=forced), bounds)


def test_valid_tools_pass() -> None:
    assert check(pb.GenerateRequest(chat=chat()), BOUNDS)
    for mode in (pb.TOOL_CHOICE_MODE_AUTO, pb.TOOL_CHOICE_MODE_NONE):
        assert check(pb.GenerateRequest(chat=with_tools(pb.Tool(name="f"), mode=mode)), BOUNDS)


@pytest.mark.parametrize("levels", [40, 64, 65])
def test_wide_values_may_be_as_deep_as_narrow_ones(levels: int) -> None:
    wide = '{"default": [' + "[], " * 100 + "[" * (levels - 2) + "]" * (levels - 2) + "]}"
    for each in (tool(parameters=wide), call(arguments=wide)):
        violations = Violations()
        tool_validation.check_tools("chat", each, tool_validation.with_more_than_content(each), violations)
        problems = [violation.description for violation in violations.violations]
        assert problems == (["is nested deeper than 64 levels"] if levels == 65 else [])


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ('{"enum":[' + "[]," * 16_382 + "1]}", False),
        ('{"enum":[' + "[]," * 16_383 + "1]}", True),
        ('{"enum":[' + "1," * 32_768 + "1]}", False),
        ('{"enum":[' + "1," * 32_769 + "1]}", True),
        ('{"enum":[' + ",".join(["[" * 60 + "]" * 60] * 274) + "]}", True),
    ],
    ids=["brackets", "a bracket more", "commas", "a comma more", "nested"],
)
@pytest.mark.parametrize("where", ["schema", "arguments"])
def test_tools_of_too_many_values_are_refused_before_they_are_parsed(
    text: str, is_refused: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    loads = json.loads
    monkeypatch.setattr(tool_validation.json, "loads", lambda text, **more: parsed.append(text) or loads(text, **more))
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")])
    if where == "arguments":
        chat.messages.add(role="assistant").tool_calls.add(id="1", name="a", arguments=text)
    else:
        chat.tools.add(name="a", parameters=text)
    violations = Violations()
    tool_validation.check_tools("chat", chat, tool_validation.with_more_than_content(chat), violations)
    assert any("16384 opening brackets" in v.description for v in violations.violations) == is_refused
    assert bool(parsed) != is_refused
