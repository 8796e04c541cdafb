"""When a worker that keeps dying is given up: deaths are counted until there is progress between them.

A server survives any number of deaths as long as its streams get on. What must end is the loop in which every worker
dies before it has achieved anything. Progress is what no later death can undo: a confirmed token, because tokens are
never computed twice. A worker that was joined and idle for `HEALTHY_IDLE_SECONDS` counts as well, because it did all
there was to do. Work that the next worker has to repeat (a prompt computed in part) is no progress.
"""

from __future__ import annotations

from collections import deque

HEALTHY_IDLE_SECONDS = 10.0


class CrashBudget:
    """Allows `max_crashes` deaths without progress within `window_seconds`. Reads no clock."""

    def __init__(self, max_crashes: int, window_seconds: float) -> None:
        self._max_crashes = max_crashes
        self._window_seconds = window_seconds
        self._deaths: deque[float] = deque()

    def __len__(self) -> int:
        """Deaths without progress so far."""
        return len(self._deaths)

    def progressed(self) -> None:
        """Forget the deaths so far. A report that arrives after the death of its worker counts like any other."""
        self._deaths.clear()

    def died(self, now: float) -> bool:
        """Count the end of a worker that was not told to end, joined or not; True when the budget is spent."""
        self._deaths.append(now)
        while self._deaths[0] < now - self._window_seconds:
            self._deaths.popleft()
        return len(self._deaths) > self._max_crashes


class Backoff:
    """Pauses between starts: `first_seconds`, four times as long after each failure, at most `max_seconds`.

    Five failed starts in a row, as many as the default budget allows, last 18 s and the starts themselves: longer than
    a short want of processes or memory, or the remount of a volume.
    """

    _FACTOR, _MAX_EXPONENT = 4.0, 32  # an exponent without a bound would overflow a float

    def __init__(self, first_seconds: float, max_seconds: float) -> None:
        self._first_seconds, self._max_seconds = first_seconds, max_seconds
        self._num_failures = 0

    def reset(self) -> None:
        """Begin anew: the last start was a success."""
        self._num_failures = 0

    def next_seconds(self) -> float:
        """Return the pause after one more failure."""
        exponent = min(self._num_failures, self._MAX_EXPONENT)
        self._num_failures += 1
        return min(self._max_seconds, self._first_seconds * self._FACTOR**exponent)
