"""Render conversations in a separate process, which exits when a template takes too long.

jinja2's sandbox limits `range` and attributes but not time. Python cannot stop a thread, so an endless loop in a
template would keep a thread and the interpreter lock. The process limits its CPU time for each conversation; waiting on
a busy machine does not count. It exits when its standard input closes.

A frame is a length (four bytes, big-endian) and the content. Input: the definition of the template, then one frame for
each conversation. Output: one frame for each conversation; its first byte is RENDERED or REFUSED.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from lineclear.errors import InvalidRequest
from lineclear.scheduler.text.special_token_seal import Seal
from lineclear.scheduler.text.template_renderer import ChatMessage, Renderer
from lineclear.scheduler.text.tool_context import ToolContext

RENDERED, REFUSED = b"+", b"-"
LENGTH = struct.Struct(">I")
_MEMORY_BYTES = 1 << 30  # address space of the process, interpreter included


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
    """Return the argument of the `pack_conversation` call that made `frame`."""
    head, _, rest = frame.partition(b"\n")
    fields = json.loads(head)
    chat_messages, start = [], 0
    for role, length in zip(fields["roles"], fields["lengths"], strict=True):
        chat_messages.append(ChatMessage(role, rest[start : start + length].decode()))
        start += length
    context = ToolContext(fields["tools"], dict(fields["message_fields"]))
    return Conversation(chat_messages, fields["opens"], fields["time_us"], context)


def choose(renderers: Mapping[str, Renderer], conversation: Conversation) -> Renderer:
    """Return the renderer of a conversation: of "default" and "tool_use", the second if it has tools."""
    return (renderers.get("tool_use") if conversation.context.tools else None) or renderers["default"]


def _read(stream: BinaryIO) -> bytes | None:
    """Return the content of the next frame; None at the end of the input."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


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
    return RENDERED + text


def main() -> None:
    """Render until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the scheduler stops this process
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    first = _read(stdin)
    if first is None:
        return
    definition = json.loads(first)
    seal, variables = Seal(definition["private"]), definition["variables"]
    renderers = {name: Renderer(source, seal, variables) for name, source in definition["sources"].items()}
    while (frame := _read(stdin)) is not None:
        # The default action of SIGPROF ends the process, also inside a loop of the template.
        signal.setitimer(signal.ITIMER_PROF, definition["cpu_seconds"])
        answer = _answer(renderers, frame, int(definition["max_bytes"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(LENGTH.pack(len(answer)) + answer)
        stdout.flush()


if __name__ == "__main__":
    main()
