"""The main loop of a child process that answers frames and limits its own CPU time and memory.

Python cannot stop a thread, so work of a caller that may not end needs a process. It limits its CPU time for each
frame; waiting on a busy machine does not count. It exits when its standard input closes.

A frame is a length (four bytes, big-endian) and the content. Input: a definition as JSON with `cpu_seconds`, then one
frame for each piece of work (`pack`). Output: one frame for each; its first byte is ANSWERED or REFUSED. The answer to
the definition is ANSWERED alone: the process is ready.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

ANSWERED, REFUSED = b"+", b"-"
LENGTH = struct.Struct(">I")
_MEMORY_BYTES = 1 << 30  # address space of the process, interpreter included


class Refused(Exception):
    """The work has no answer, for a reason that the caller may read."""


def pack(head: Mapping[str, Any], texts: Sequence[str]) -> bytes:
    """Return the content of a frame: the head and the lengths of the texts as JSON, a newline, the texts."""
    contents = [text.encode() for text in texts]
    return json.dumps([head, list(map(len, contents))]).encode() + b"\n" + b"".join(contents)


def unpack(frame: bytes) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of the `pack` call that made `frame`."""
    first, _, rest = frame.partition(b"\n")
    (head, lengths), texts, start = json.loads(first), [], 0
    for length in lengths:
        texts.append(rest[start : start + length].decode())
        start += length
    return head, texts


def serve(prepare: Callable[..., Callable[[dict[str, Any], list[str]], str]]) -> None:
    """Answer frames until standard input ends.

    `prepare` gets the definition and returns the function from work to answer, which may raise Refused.
    """
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
    cpu_seconds = definition.pop("cpu_seconds")
    answer_to = prepare(**definition)
    _write(stdout, ANSWERED)
    while (frame := _read(stdin)) is not None:
        # The default action of SIGPROF ends the process, also inside a loop.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            answer = ANSWERED + answer_to(*unpack(frame)).encode()
        except Refused as refusal:
            answer = REFUSED + str(refusal).encode(errors="replace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(stdout, answer)


def _write(stream: BinaryIO, answer: bytes) -> None:
    stream.write(LENGTH.pack(len(answer)) + answer)
    stream.flush()


def _read(stream: BinaryIO) -> bytes | None:
    """Return the content of the next frame; None at the end of the input."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None
