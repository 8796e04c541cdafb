"""A process that renders conversations for the scheduler, so that a template that takes too long can be ended.

jinja2's sandbox bounds `range` and attributes, not time, and Python has no way to end a thread: a loop in a template,
or contents on which it takes quadratic time, would hold a thread and the interpreter's lock for good. A process can be
ended. It ends itself by a timer of the CPU time that one conversation takes, which a busy machine does not shorten, and
it ends when the scheduler closes its standard input or is gone.

Frames are a length of four bytes, big-endian, and so many bytes. In: the definition of the template once, then a
conversation each. Out: one frame for each conversation, whose first byte is one of the answers below.
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
_MEMORY_BYTES = 1 << 30  # address space: what one template may take, with the interpreter and its libraries


def pack_definition(source: str, private: Mapping[str, str], variables: Mapping[str, Any], **limits: float) -> bytes:
    """Return the first frame's content. `limits` are `cpu_seconds` and `max_bytes` of a rendered conversation."""
    return json.dumps({"source": source, "private": dict(private), "variables": dict(variables), **limits}).encode()


def pack_conversation(turns: Sequence[ChatMessage], *, add_generation_prompt: bool, time_us: int = 0) -> bytes:
    """Return a frame's content: roles and lengths of the contents as JSON, a newline, the contents as they are."""
    contents = [turn.content.encode() for turn in turns]
    head = {
        "roles": [turn.role for turn in turns],
        "lengths": list(map(len, contents)),
        "opens": add_generation_prompt,
        "time_us": time_us,
    }
    return json.dumps(head).encode() + b"\n" + b"".join(contents)


def unpack_conversation(frame: bytes) -> tuple[list[ChatMessage], bool, int]:
    """Return what `pack_conversation` packed."""
    head, _, rest = frame.partition(b"\n")
    said = json.loads(head)
    turns, start = [], 0
    for role, length in zip(said["roles"], said["lengths"], strict=True):
        turns.append(ChatMessage(role, rest[start : start + length].decode()))
        start += length
    return turns, said["opens"], said["time_us"]


def _read(stream: BinaryIO) -> bytes | None:
    """Return the next frame's content; None at the end."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _answer(renderer: Renderer, frame: bytes, max_bytes: int) -> bytes:
    turns, opens, time_us = unpack_conversation(frame)
    try:
        text = renderer.render(turns, add_generation_prompt=opens, time_us=time_us).encode()
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
        signal.signal(number, signal.SIG_IGN)  # the scheduler decides when it is over
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
        # SIGPROF ends the process where nothing handles it, in whatever loop it is.
        signal.setitimer(signal.ITIMER_PROF, definition["cpu_seconds"])
        answer = _answer(renderer, frame, int(definition["max_bytes"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(LENGTH.pack(len(answer)) + answer)
        stdout.flush()


if __name__ == "__main__":
    main()
