"""What `lineclear top` remembers between two redraws: the last steps for rates, and the last state."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lineclear.client import SchedulerState, StepRecord, WatchedSteps

WINDOW_SECONDS = 5.0
"""Rates are means over the last so many seconds."""
BINS = 120
"""Seconds of the curve of tokens per second."""


class TopHistory:
    """The last steps and the last state of a server. Times are those of the server; `elapse` moves them on."""

    def __init__(self) -> None:
        self.state: SchedulerState | None = None
        self._steps: deque[StepRecord] = deque()
        self._bins: dict[int, int] = {}
        self._now_seconds = 0.0
        self._begun_seconds: float | None = None

    def add(self, watched: WatchedSteps) -> None:
        """Add what the server sent."""
        times = [step.time_seconds + step.total_seconds for step in watched.steps]
        if watched.state is not None:
            self.state = watched.state
            times.append(watched.state.time_seconds)
        if times and max(times) < self._now_seconds - WINDOW_SECONDS:
            self._restart()
        self._now_seconds = max([self._now_seconds, *times])
        if times and self._begun_seconds is None:
            self._begun_seconds = min(times)
        for step in watched.steps:
            second = int(step.time_seconds + step.total_seconds)
            self._bins[second] = self._bins.get(second, 0) + _tokens(step)
        self._steps.extend(watched.steps)
        self._forget()

    def elapse(self, seconds: float) -> None:
        """Let the time pass in which the server sent nothing: its rates fall to 0."""
        self._now_seconds += seconds
        self._forget()

    @property
    def tokens_per_second(self) -> float:
        """Return the sampled tokens per second over the window, or since the first response if that is shorter."""
        begun = self._now_seconds if self._begun_seconds is None else self._begun_seconds
        span = min(WINDOW_SECONDS, max(self._now_seconds - begun, 0.1))
        return sum(map(_tokens, self._steps)) / span

    @property
    def curve(self) -> Sequence[int]:
        """Return the tokens of each of the last seconds, oldest first. The running second is left out."""
        now = int(self._now_seconds)
        first = min(self._bins, default=now)
        return [self._bins.get(second, 0) for second in range(max(first, now - BINS), now)]

    def step_seconds(self, worker: int | None = None) -> float | None:
        """Return the mean time of the last steps, of one worker or of all; None without steps."""
        times = [step.seconds for step in self._steps if worker in (None, step.worker)]
        return sum(times) / len(times) if times else None

    @property
    def rows_per_step(self) -> float | None:
        """Return the mean rows of the last steps; None without steps."""
        return sum(len(step.rows) for step in self._steps) / len(self._steps) if self._steps else None

    def _forget(self) -> None:
        while self._steps and self._steps[0].time_seconds < self._now_seconds - WINDOW_SECONDS:
            self._steps.popleft()
        for second in [second for second in self._bins if second < self._now_seconds - BINS - 1]:
            del self._bins[second]

    def _restart(self) -> None:
        """Begin again: another server, with another clock."""
        self._steps.clear()
        self._bins.clear()
        self._now_seconds, self._begun_seconds = 0.0, None


def _tokens(step: StepRecord) -> int:
    return sum(row.samples for row in step.rows)
