"""Writes to a standard error that may be full, closed or without a reader. Needs no other package."""

from __future__ import annotations

import os
import sys

STDERR = 2


def open_closed_streams() -> None:
    """Open the null device as standard input, output and error where they are closed.

    The next file or socket would take the descriptor, and get the text for standard error.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(STDERR, "w", closefd=False)  # noqa: SIM115  # for the rest of the process


def write_stderr(text: str) -> None:
    """Print to standard error before logging is configured. No exit code depends on it."""
    if sys.stderr is not None:  # None: descriptor 2 was closed at the start
        try:
            print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write: a thread may log meanwhile
        except OSError:
            discard_stderr()


def flush_or_discard() -> None:
    """Write what sys.stderr holds, or drop it: Python would end with exit code 120 for a full pipe."""
    try:
        sys.stderr.flush()
    except OSError:
        discard_stderr()


def discard_stderr() -> None:
    """Drop all text for standard error from now on."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), STDERR)
