"""Writes to standard error that do not change the exit code, where it is full, has no reader, or is closed.

Imports the standard library only, so that a missing package can be reported.
"""

from __future__ import annotations

import contextlib
import os
import sys

STDERR = 2


def write_stderr(text: str) -> None:
    """Print to standard error before logging is configured."""
    if sys.stderr is not None:  # None: descriptor 2 was closed at the start
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr)
        flush_or_discard()


def flush_or_discard() -> None:
    """Write what sys.stderr holds, or drop it: Python would end with exit code 120 for a full pipe."""
    try:
        sys.stderr.flush()
    except OSError:
        discard(STDERR)


def discard(descriptor: int) -> None:
    """Drop what is written to the descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
