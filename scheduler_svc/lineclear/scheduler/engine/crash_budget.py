"""Crash budget and restart backoff of the worker (Kubernetes' CrashLoopBackOff, with progress instead of time).

A server survives any number of crashes while its streams progress. It ends when every worker crashes before progress.
Progress is a confirmed token, because later crashes cannot undo it, or `HEALTHY_IDLE_SECONDS` joined without work.
A prompt computed in part is no progress: the next worker computes it again.
"""

from __future__ import annotations

from collections import deque

HEALTHY_IDLE_SECONDS = 10.0


class CrashBudget:
    """Allows `max_crashes` crashes without progress within `window_seconds`. Reads no clock."""

    def __init__(self, max_crashes: int, window_seconds: float) -> None:
        self._max_crashes = max_crashes
        self._window_seconds = window_seconds
        self._crashes: deque[float] = deque()

    def __len__(self) -> int:
        """Return the crashes without progress so far."""
        return len(self._crashes)

    def progressed(self) -> None:
        """Forget the crashes so far, also if the report arrives after the crash of its worker."""
        self._crashes.clear()

    def crashed(self, now: float) -> bool:
        """Count a crash, of a joined worker or not; return True when the budget is spent."""
        self._crashes.append(now)
        while self._crashes[0] < now - self._window_seconds:
            self._crashes.popleft()
        return len(self._crashes) > self._max_crashes


class Backoff:
    """Pauses between starts: `first_seconds`, four times as long after each failure, at most `max_seconds`.

    The pauses of five failed starts, the default budget, add up to 18 s: longer than a short lack of processes or
    memory, or the remount of a volume.
    """

    _FACTOR, _MAX_EXPONENT = 4.0, 32  # an exponent without a bound would overflow a float

    def __init__(self, first_seconds: float, max_seconds: float) -> None:
        self._first_seconds, self._max_seconds = first_seconds, max_seconds
        self._num_failures = 0

    def reset(self) -> None:
        """Return to the first pause: the last start was a success."""
        self._num_failures = 0

    def next_seconds(self) -> float:
        """Return the pause after one more failure."""
        exponent = min(self._num_failures, self._MAX_EXPONENT)
        self._num_failures += 1
        return min(self._max_seconds, self._first_seconds * self._FACTOR**exponent)
