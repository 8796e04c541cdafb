"""Validate the tools of a conversation and the calls in its messages; convert them for template and grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

from lineclear.errors import InvalidRequest
from lineclear.scheduler.requests.validate.violations import Violations
from lineclear.scheduler.text.call_formats import FORMATS
from lineclear.scheduler.text.call_grammar import ForcedCalls
from lineclear.scheduler.text.parsed_answer import AnswerParsers, phase_of
from lineclear.scheduler.text.reasoning_parser import MARKERS
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.scheduler.text.tool_context import ToolContext
from lineclear.v1 import inference_pb2 as pb

MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_CALL_ID = 64
MAX_JSON_DEPTH = 64
MAX_JSON_BRACKETS, MAX_JSON_COMMAS = 16_384, 32_768  # in all schemas and arguments: parsing 1 MB of them takes 150 ms
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS = '{"type": "object", "properties": {}}'


IndexedMessages: TypeAlias = Sequence[tuple[int, pb.ChatMessage]]


def check_tools(path: str, chat: pb.ChatMessages, messages: IndexedMessages, violations: Violations) -> None:
    """Add the violations of the tools, of the choice among them, and of the calls in messages.

    `messages` are those that `with_more_than_content` returns.
    """
    if len(chat.tools) > MAX_TOOLS:
        violations.add(f"{path}.tools", f"has {len(chat.tools)} entries, the limit is {MAX_TOOLS}")
        return
    if _has_too_many_values(chat.tools, messages):
        limits = f"{MAX_JSON_BRACKETS} opening brackets or {MAX_JSON_COMMAS} commas"
        violations.add(f"{path}.tools", f"and the calls in messages have more than {limits}; send smaller schemas")
        return
    names = [tool.name for tool in chat.tools]
    for index, tool in enumerate(chat.tools):
        _check_tool(f"{path}.tools[{index}]", tool, names[:index], violations)
    _check_choice(f"{path}.tool_choice", chat, names, violations)
    for index, message in messages:
        _check_message(f"{path}.messages[{index}]", message, violations)


def with_more_than_content(chat: pb.ChatMessages) -> list[tuple[int, pb.ChatMessage]]:
    """Return the messages that have more than a role and a content, with their indices."""
    return [
        (index, message)
        for index, message in enumerate(chat.messages)
        if message.tool_calls
        or message.HasField("tool_call_id")
        or message.HasField("name")
        or message.HasField("reasoning")
    ]


def texts(chat: pb.ChatMessages, messages: IndexedMessages) -> Iterator[str]:
    """Yield all texts of a conversation but roles and ids, for a limit on their size. `messages` as `check_tools`."""
    for message in chat.messages:
        yield message.content
    for _, message in messages:
        yield message.reasoning
        for call in message.tool_calls:
            yield call.name
            yield call.arguments
    for tool in chat.tools:
        yield tool.name
        yield tool.description
        yield tool.parameters


class AnswerTools(NamedTuple):
    """What the answer to a conversation may call, and must."""

    names: frozenset[str]
    """Tools that the model may call."""
    is_call_forced: bool
    has_parallel_calls: bool
    """Whether the answer may have several calls."""


def answer_tools(chat: pb.ChatMessages) -> AnswerTools:
    """Return what the answer to a conversation may call."""
    is_none = chat.tool_choice.mode == pb.TOOL_CHOICE_MODE_NONE
    names = frozenset() if is_none else frozenset(tool.name for tool in chat.tools)
    return AnswerTools(names, is_forced(chat), has_parallel_calls(chat))


def has_parallel_calls(chat: pb.ChatMessages) -> bool:
    """Return whether the answer may have several calls; the default is yes."""
    return chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls")


def is_forced(chat: pb.ChatMessages) -> bool:
    """Return whether the answer must be a call of one of the tools."""
    choice = chat.tool_choice
    if choice.WhichOneof("choice") == "function":
        return any(tool.name == choice.function for tool in chat.tools)
    return choice.mode == pb.TOOL_CHOICE_MODE_REQUIRED and bool(chat.tools)


def forced_calls(
    chat: pb.ChatMessages, parsers: AnswerParsers, tokenizer: Tokenizer, prompt: Sequence[int]
) -> ForcedCalls:
    """Return the calls that the answer to a prompt must make. Raises InvalidRequest if their format is not known."""
    if not parsers.tool_calls:
        raise InvalidRequest.at(
            "chat.tool_choice",
            "cannot force a call: the format of calls is not known for this chat template (--tool-call-parser)",
        )
    function = chat.tool_choice.function
    tools = [tool for tool in chat.tools if not function or tool.name == function]
    markers = tokenizer.token_ids(FORMATS[parsers.tool_calls].markers | MARKERS)
    return ForcedCalls(
        parser=parsers.tool_calls,
        names=tuple(tool.name for tool in tools),
        parameters=tuple(tool.parameters for tool in tools),
        is_parallel=not function and has_parallel_calls(chat),
        phase=phase_of(parsers, tokenizer, prompt).value,
        markers=markers,
        tags=parsers.call_tags,
    )


def context(chat: pb.ChatMessages) -> ToolContext:
    """Return what the template gets of a valid conversation, in the form of transformers and OpenAI.

    Schemas and arguments remain JSON texts: the process that renders parses them.
    """
    fields = {index: _message_fields(message) for index, message in with_more_than_content(chat)}
    tools = [] if chat.tool_choice.mode == pb.TOOL_CHOICE_MODE_NONE else list(map(_tool, chat.tools))
    return ToolContext(tools, fields)


def check_template_support(chat: pb.ChatMessages, *, takes_tools: bool) -> None:
    """Raises InvalidRequest for tools that the chat template does not show to the model."""
    if chat.tools and not takes_tools and chat.tool_choice.mode != pb.TOOL_CHOICE_MODE_NONE:
        raise InvalidRequest.at("chat.tools", "must be empty: the model's chat template takes no tools")


def _has_too_many_values(tools: Iterable[pb.Tool], messages: IndexedMessages) -> bool:
    """Count at least the values of all JSON texts, without parsing them."""
    brackets = commas = 0
    for text in (*(tool.parameters for tool in tools), *(c.arguments for _, m in messages for c in m.tool_calls)):
        brackets += _num_brackets(text)
        commas += text.count(",")
    return brackets > MAX_JSON_BRACKETS or commas > MAX_JSON_COMMAS


def _check_tool(path: str, tool: pb.Tool, earlier: Sequence[str], violations: Violations) -> None:
    if not _NAME.fullmatch(tool.name):
        violations.add(f"{path}.name", "must be 1 to 64 of [A-Za-z0-9_.-]")
    elif tool.name in earlier:
        violations.add(f"{path}.name", "repeats the name of an earlier tool")
    if not tool.HasField("parameters"):
        return
    schema = _json_object(f"{path}.parameters", tool.parameters, violations)
    if schema is None:
        return
    if schema.get("type", "object") != "object":
        violations.add(f"{path}.parameters", 'must have the type "object"')
    if not isinstance(schema.get("properties", {}), dict):
        violations.add(f"{path}.parameters", "has properties that are not a JSON object")
    required = schema.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        violations.add(f"{path}.parameters", "has a value of required that is not a list of texts")


def _check_choice(path: str, chat: pb.ChatMessages, names: Sequence[str], violations: Violations) -> None:
    mode, function = chat.tool_choice.mode, chat.tool_choice.function
    if chat.tool_choice.WhichOneof("choice") == "function":
        if function not in names:
            violations.add(f"{path}.function", "must be the name of one of the tools")
    elif mode not in pb.ToolChoiceMode.values():
        violations.add(f"{path}.mode", "must be AUTO, NONE or REQUIRED")
    elif mode == pb.TOOL_CHOICE_MODE_REQUIRED and not names:
        violations.add(f"{path}.mode", "is REQUIRED, and the request has no tools")


def _check_message(path: str, message: pb.ChatMessage, violations: Violations) -> None:
    if message.tool_calls and message.role != "assistant":
        violations.add(f"{path}.tool_calls", 'must be empty unless the role is "assistant"')
    if message.HasField("reasoning") and message.role != "assistant":
        violations.add(f"{path}.reasoning", 'must be unset unless the role is "assistant"')
    if message.HasField("tool_call_id"):
        if message.role != "tool":
            violations.add(f"{path}.tool_call_id", 'must be unset unless the role is "tool"')
        _check_id(f"{path}.tool_call_id", message.tool_call_id, violations)
    if message.HasField("name") and not 1 <= len(message.name) <= MAX_CALL_ID:
        violations.add(f"{path}.name", f"must have 1 to {MAX_CALL_ID} characters")
    if len(message.tool_calls) > MAX_TOOL_CALLS:
        violations.add(f"{path}.tool_calls", f"has more than {MAX_TOOL_CALLS} entries")
        return
    for index, call in enumerate(message.tool_calls):
        _check_id(f"{path}.tool_calls[{index}].id", call.id, violations)
        if not _NAME.fullmatch(call.name):
            violations.add(f"{path}.tool_calls[{index}].name", "must be 1 to 64 of [A-Za-z0-9_.-]")
        _json_object(f"{path}.tool_calls[{index}].arguments", call.arguments, violations)


def _check_id(path: str, call_id: str, violations: Violations) -> None:
    if not 1 <= len(call_id) <= MAX_CALL_ID:
        violations.add(path, f"must have 1 to {MAX_CALL_ID} characters")


def _tool(tool: pb.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    function["parameters"] = tool.parameters if tool.HasField("parameters") else _NO_PARAMETERS
    return {"type": "function", "function": function}


def _message_fields(message: pb.ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if message.tool_calls:
        fields["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.HasField("tool_call_id"):
        fields["tool_call_id"] = message.tool_call_id
    if message.HasField("name"):
        fields["name"] = message.name
    if message.HasField("reasoning"):
        fields["reasoning_content"] = message.reasoning
    return fields


def _call(call: pb.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _json_object(path: str, text: str, violations: Violations) -> dict[str, Any] | None:
    try:
        value = json.loads(text, parse_constant=_refuse)
        # A text has at least one bracket for each level; most have too few to be deep.
        if isinstance(value, dict) and (_num_brackets(text) <= MAX_JSON_DEPTH or not _is_too_deep(value)):
            return value
        problem = f"is nested deeper than {MAX_JSON_DEPTH} levels" if isinstance(value, dict) else "is no JSON object"
    except RecursionError:
        problem = f"is nested deeper than {MAX_JSON_DEPTH} levels"
    except ValueError:
        problem = "is not valid JSON"
    violations.add(path, problem)
    return None


def _num_brackets(text: str) -> int:
    return text.count("[") + text.count("{")


def _refuse(constant: str) -> NoReturn:
    raise ValueError("NaN and infinity are not JSON")


def _is_too_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level:
        if depth == MAX_JSON_DEPTH:
            return True
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        depth += 1
    return False
