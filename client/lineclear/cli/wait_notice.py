"""Report on standard error that a call waits for its server, on a terminal and in the log of a script."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time

from lineclear.client.retry import RetryWait

from . import output

SILENT_SECONDS = 2.0
"""Waits shorter than this are not reported."""


class WaitNotice:
    """Called before every pause of a client, from any thread.

    Reports the first pause that makes a call wait longer than SILENT_SECONDS, and then none until the reported wait is
    over.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._silent_until = -math.inf

    def __call__(self, wait: RetryWait) -> None:
        if wait.waited_seconds + wait.pause_seconds < SILENT_SECONDS:
            return
        now = time.monotonic()
        with self._lock:
            if now < self._silent_until:
                return
            self._silent_until = math.inf if wait.left_seconds is None else now + wait.left_seconds
        # The cursor may be in a line of an answer.
        newline = "\n" if sys.stdout.isatty() and sys.stderr.isatty() else ""
        # Not by a rich console: rich moves printed lines above its progress bar.
        with contextlib.suppress(OSError, ValueError):  # a closed standard error must not end the call
            print(f"{newline}{sentence(self._target, wait)}", file=sys.stderr, flush=True)


def sentence(target: str, wait: RetryWait) -> str:
    """Return a sentence about a wait: the target, the longest time, and the cause."""
    why = output.strip_control_chars(" ".join(str(wait.error).split()))
    if wait.left_seconds is not None:
        return f"waiting for {target}, for up to {wait.left_seconds:.0f} s: {why}"
    times = "once" if wait.left_attempts == 1 else f"up to {wait.left_attempts} times"
    return f"retrying {target}, {times}, in {wait.pause_seconds:.0f} s: {why}"
