"""The main loop of a child process that answers frames and limits its own CPU time and memory.

Python cannot stop a thread, so work of a caller that may not end needs a process. It limits its CPU time for each
frame; waiting on a busy machine does not count. It exits when its standard input closes.

A frame is a length (four bytes, big-endian) and the content. Input: a definition as JSON with `cpu_seconds`, then one
frame for each piece of work. Output: one frame for each; its first byte is ANSWERED or REFUSED. The answer to the
definition is ANSWERED alone: the process is ready.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

ANSWERED, REFUSED = b"+", b"-"
LENGTH = struct.Struct(">I")
_MEMORY_BYTES = 1 << 30  # address space of the process, interpreter included


def serve(prepare: Callable[[dict[str, Any]], Callable[[bytes], bytes]]) -> None:
    """Answer frames until standard input ends. `prepare(definition)` returns the function from frame to answer."""
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
    answer_to = prepare(definition)
    _write(stdout, ANSWERED)
    while (frame := _read(stdin)) is not None:
        # The default action of SIGPROF ends the process, also inside a loop.
        signal.setitimer(signal.ITIMER_PROF, definition["cpu_seconds"])
        answer = answer_to(frame)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(stdout, answer)


def _write(stream: BinaryIO, answer: bytes) -> None:
    stream.write(LENGTH.pack(len(answer)) + answer)
    stream.flush()


def _read(stream: BinaryIO) -> bytes | None:
    """Return the content of the next frame; None at the end of the input."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None
