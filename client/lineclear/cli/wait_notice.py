"""The one line that says that a call waits for its server. Decides when it is due, and what it says; waits for nothing.

It goes to standard error, terminal or not: whoever reads the log of a script wonders no less why nothing happens.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time

from lineclear.client.retry import RetryWait

from . import output

SILENT_SECONDS = 2.0
"""What is waited for no longer than this is not worth a word."""


class WaitNotice:
    """Hears of every pause of a client's calls, from any thread. Says the first that takes a call past SILENT_SECONDS,
    and nothing more for as long as that line said that the server is waited for.
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
        # A line of an answer may stand half written on the same screen.
        begun = "\n" if sys.stdout.isatty() and sys.stderr.isatty() else ""
        # Not by a console of our own: what is printed while rich shows a bar it puts above the bar.
        with contextlib.suppress(OSError, ValueError):  # a standard error that is closed is no reason to end a call
            print(f"{begun}{sentence(self._target, wait)}", file=sys.stderr, flush=True)


def sentence(target: str, wait: RetryWait) -> str:
    """What is waited for, for how long at the most, and why."""
    why = output.strip_control_chars(" ".join(str(wait.error).split()))
    if wait.left_seconds is not None:
        return f"waiting for {target}, for up to {wait.left_seconds:.0f} s: {why}"
    times = "once" if wait.left_attempts == 1 else f"up to {wait.left_attempts} times"
    return f"asking {target} again, {times}, in {wait.pause_seconds:.0f} s: {why}"
