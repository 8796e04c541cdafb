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
from typing import Any, BinaryIO

from lineclear.errors import InvalidRequest
from lineclear.scheduler.text.special_token_seal import Seal
from lineclear.scheduler.text.template_renderer import ChatMessage, Renderer

RENDERED, REFUSED = b"+", b"-"
LENGTH = struct.Struct(">I")
_MEMORY_BYTES = 1 << 30  # address space of the process, interpreter included


def pack_definition(source: str, private: Mapping[str, str], variables: Mapping[str, Any], **limits: float) -> bytes:
    """Return the content of the first frame. `limits`: `cpu_seconds` and `max_bytes` for one conversation."""
    return json.dumps({"source": source, "private": dict(private), "variables": dict(variables), **limits}).encode()


def pack_conversation(chat_messages: Sequence[ChatMessage], *, add_generation_prompt: bool, time_us: int = 0) -> bytes:
    """Return the content of a frame: roles and content lengths as JSON, a newline, the contents."""
    contents = [chat_message.content.encode() for chat_message in chat_messages]
    head = {
        "roles": [chat_message.role for chat_message in chat_messages],
        "lengths": list(map(len, contents)),
        "opens": add_generation_prompt,
        "time_us": time_us,
    }
    return json.dumps(head).encode() + b"\n" + b"".join(contents)


def unpack_conversation(frame: bytes) -> tuple[list[ChatMessage], bool, int]:
    """Return the arguments of the `pack_conversation` call that made `frame`."""
    head, _, rest = frame.partition(b"\n")
    fields = json.loads(head)
    chat_messages, start = [], 0
    for role, length in zip(fields["roles"], fields["lengths"], strict=True):
        chat_messages.append(ChatMessage(role, rest[start : start + length].decode()))
        start += length
    return chat_messages, fields["opens"], fields["time_us"]


def _read(stream: BinaryIO) -> bytes | None:
    """Return the content of the next frame; None at the end of the input."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _answer(renderer: Renderer, frame: bytes, max_bytes: int) -> bytes:
    chat_messages, opens, time_us = unpack_conversation(frame)
    try:
        text = renderer.render(chat_messages, add_generation_prompt=opens, time_us=time_us).encode()
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
    renderer = Renderer(definition["source"], Seal(definition["private"]), definition["variables"])
    while (frame := _read(stdin)) is not None:
        # The default action of SIGPROF ends the process, also inside a loop of the template.
        signal.setitimer(signal.ITIMER_PROF, definition["cpu_seconds"])
        answer = _answer(renderer, frame, int(definition["max_bytes"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(LENGTH.pack(len(answer)) + answer)
        stdout.flush()


if __name__ == "__main__":
    main()
