"""Messages of a conversation, the tools that a model may call in it, and its calls.

Tools and messages may also be dicts in the form of OpenAI's API and of transformers' chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

from lineclear.errors import InvalidRequest
from lineclear.v1 import inference_pb2 as pb

from .message_fields import set_field, set_given


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is the text of a JSON object, as the model wrote it.

    Send the result as `ChatMessage("tool", result, tool_call_id=call.id, name=call.name)`.
    """

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any]:
        """Return the arguments. Raises ValueError if the call was broken off, as by `max_tokens`."""
        arguments = json.loads(self.arguments)
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are no JSON object")
        return arguments


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New text of the call with number `index`. `id` and `name` are set in its first delta, and empty later."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. `role`: "system", "user", "assistant" or another role of the chat template.

    `tool_calls` and `reasoning` belong to earlier answers, `tool_call_id` to the result of a call, with the role
    "tool" and the function as `name`.
    """

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


Tool: TypeAlias = Mapping[str, Any] | type
"""A tool: a dict with `type` and `function` as in OpenAI's API, the dict of the function alone, or a pydantic model.

A pydantic model has the arguments as its fields; its name and docstring describe the function.
"""

ToolChoice: TypeAlias = str | Mapping[str, Any]
""""auto", "none", "required", or a dict that names a function: `{"function": {"name": ...}}`."""

_MODES = {
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}
_MESSAGE_KEYS = frozenset(("role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content"))


def is_chat(prompt: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], ChatMessage | Mapping)


def set_message(message: pb.ChatMessage, entry: Any, path: str) -> None:
    """Fill a message from a ChatMessage or a dict. Raises InvalidRequest."""
    found = entry if isinstance(entry, ChatMessage) else _message_of(entry, path)
    set_given(message, "role", found.role, path=f"{path}.role")
    set_given(message, "content", found.content, path=f"{path}.content")
    for name in ("tool_call_id", "name", "reasoning"):
        set_field(message, name, getattr(found, name), path=f"{path}.{name}")
    for index, call in enumerate(found.tool_calls):
        own_path, added = f"{path}.tool_calls[{index}]", message.tool_calls.add()
        for name in ("id", "name", "arguments"):
            set_given(added, name, getattr(call, name), path=f"{own_path}.{name}")


def set_tools(chat: pb.ChatMessages, tools: Sequence[Tool] | None, tool_choice: ToolChoice | None) -> None:
    """Fill the tools of a conversation and the choice among them. Raises InvalidRequest."""
    if isinstance(tools, Mapping | str):
        raise InvalidRequest.at("tools", "must be a list of dicts or pydantic models")
    for index, tool in enumerate(tools or ()):
        path, added = f"chat.tools[{index}]", chat.tools.add()
        function = _function(tool, path)
        set_given(added, "name", function.get("name"), path=f"{path}.name")
        set_field(added, "description", function.get("description"), path=f"{path}.description")
        if function.get("parameters") is not None:
            added.parameters = _json_text(function["parameters"], f"{path}.parameters")
    if tool_choice is None:
        return
    if isinstance(tool_choice, str):
        if tool_choice not in _MODES:
            raise InvalidRequest.at("tool_choice", 'must be "auto", "none", "required" or a dict that names a function')
        chat.tool_choice.mode = _MODES[tool_choice]
    else:
        chosen = tool_choice.get("function")
        name = chosen.get("name") if isinstance(chosen, Mapping) else None
        set_given(chat.tool_choice, "function", name, path="chat.tool_choice.function")


def _function(tool: Any, path: str) -> Mapping[str, Any]:
    if isinstance(tool, type) and hasattr(tool, "model_json_schema"):
        schema = tool.model_json_schema()
        return {"name": tool.__name__, "description": schema.pop("description", None), "parameters": schema}
    if isinstance(tool, Mapping):
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            return function
    raise InvalidRequest.at(path, "must be a dict in OpenAI's form or a pydantic model")


def _message_of(entry: Any, path: str) -> ChatMessage:
    """Return the message of a dict in OpenAI's form."""
    is_known = isinstance(entry, Mapping) and "role" in entry and entry.keys() <= _MESSAGE_KEYS
    if not is_known or not ("content" in entry or "tool_calls" in entry):
        raise InvalidRequest.at(
            path, "must be a ChatMessage or a dict of `role`, `content` and the fields of tools: " + _KEYS
        )
    content = entry.get("content")
    calls = entry.get("tool_calls") or ()
    return ChatMessage(
        entry["role"],
        "" if content is None and calls else content,
        tuple(_call_of(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)),
        entry.get("tool_call_id"),
        entry.get("name"),
        entry.get("reasoning", entry.get("reasoning_content")),
    )


_KEYS = ", ".join(sorted(_MESSAGE_KEYS - {"role", "content"}))


def _call_of(call: Any, path: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest.at(path, "must be a ToolCall or a dict in OpenAI's form")
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else _json_text(arguments, f"{path}.arguments")
    return ToolCall(call.get("id", ""), function.get("name", ""), text)


def _json_text(value: Any, path: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest.at(path, "must be a dict that JSON can express") from None
