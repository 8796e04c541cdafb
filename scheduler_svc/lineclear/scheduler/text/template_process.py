"""Render conversations in a separate process, which exits when a template takes too long.

jinja2's sandbox limits `range` and attributes but not time: an endless loop in a template would keep a thread and the
interpreter lock. `limited_child` has the loop and the limits of the process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lineclear.errors import InvalidRequest
from lineclear.scheduler.text.limited_child import ANSWERED, REFUSED, serve
from lineclear.scheduler.text.special_token_seal import Seal
from lineclear.scheduler.text.template_renderer import ChatMessage, Renderer
from lineclear.scheduler.text.tool_context import ToolContext


class Conversation(NamedTuple):
    """The arguments of Renderer.render."""

    chat_messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True
    time_us: int = 0
    context: ToolContext = ToolContext()

    def rendered_by(self, renderer: Renderer) -> str:
        """Return the text of the conversation under a template. Raises InvalidRequest."""
        return renderer.render(
            self.chat_messages,
            add_generation_prompt=self.add_generation_prompt,
            time_us=self.time_us,
            context=self.context,
        )


def pack_definition(
    sources: Mapping[str, str], private: Mapping[str, str], variables: Mapping[str, Any], **limits: float
) -> bytes:
    """Return the content of the first frame. `sources`: the template, and a second one for conversations with tools.

    `limits`: `cpu_seconds` and `max_bytes` for one conversation.
    """
    definition = {"sources": dict(sources), "private": dict(private), "variables": dict(variables), **limits}
    return json.dumps(definition).encode()


def pack_conversation(conversation: Conversation) -> bytes:
    """Return the content of a frame: roles and content lengths as JSON, a newline, the contents."""
    chat_messages, context = conversation.chat_messages, conversation.context
    contents = [chat_message.content.encode() for chat_message in chat_messages]
    head = {
        "roles": [chat_message.role for chat_message in chat_messages],
        "lengths": list(map(len, contents)),
        "opens": conversation.add_generation_prompt,
        "time_us": conversation.time_us,
        "tools": context.tools,
        "message_fields": list(context.message_fields.items()),
    }
    return json.dumps(head).encode() + b"\n" + b"".join(contents)


def unpack_conversation(frame: bytes) -> Conversation:
    """Return the argument of the `pack_conversation` call that made `frame`, its context parsed."""
    head, _, rest = frame.partition(b"\n")
    fields = json.loads(head)
    chat_messages, start = [], 0
    for role, length in zip(fields["roles"], fields["lengths"], strict=True):
        chat_messages.append(ChatMessage(role, rest[start : start + length].decode()))
        start += length
    context = ToolContext(fields["tools"], dict(fields["message_fields"])).parsed()
    return Conversation(chat_messages, fields["opens"], fields["time_us"], context)


def choose(renderers: Mapping[str, Renderer], conversation: Conversation) -> Renderer:
    """Return the renderer of a conversation: of "default" and "tool_use", the second if it has tools."""
    return (renderers.get("tool_use") if conversation.context.tools else None) or renderers["default"]


def _answer(renderers: Mapping[str, Renderer], frame: bytes, max_bytes: int) -> bytes:
    conversation = unpack_conversation(frame)
    try:
        text = conversation.rendered_by(choose(renderers, conversation)).encode()
    except InvalidRequest as error:
        return REFUSED + error.violations[0].description.encode()
    except (MemoryError, UnicodeEncodeError):
        return REFUSED + b"the model's chat template fails on this conversation"
    if len(text) > max_bytes:
        return REFUSED + b"the model's chat template makes more than %d bytes of this conversation" % max_bytes
    return ANSWERED + text


def _prepare(definition: dict[str, Any]) -> Callable[[bytes], bytes]:
    seal, variables = Seal(definition["private"]), definition["variables"]
    renderers = {name: Renderer(source, seal, variables) for name, source in definition["sources"].items()}
    return lambda frame: _answer(renderers, frame, int(definition["max_bytes"]))


if __name__ == "__main__":
    serve(_prepare)
