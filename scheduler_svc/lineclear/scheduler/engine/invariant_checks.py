"""When the engine checks the invariants of its core.

A check takes time for each request and block, so its time is bounded: a large pool with short steps is checked less
often.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.engine.engine_stats import EngineCounters

PAUSE = 50
"""Shortest time between two checks, in durations of the first of them: checks take at most 2 % of the time."""


class InvariantChecks:
    """Checks a core once `every_steps` results are unchecked, or any while no step is in flight; 0: never."""

    def __init__(self, core: Scheduler, every_steps: int, counters: EngineCounters, clock: Callable[[], float]) -> None:
        self._core = core
        self._every_steps = every_steps
        self._counters = counters
        self._clock = clock
        self._num_unchecked = 0
        self._paused_until = -math.inf

    def result_applied(self) -> None:
        """Count a result."""
        self._num_unchecked += 1

    def check_if_due(self, now: float, *, is_idle: bool) -> None:
        """Check the core now if it is time. Raises AssertionError."""
        every, unchecked = self._every_steps, self._num_unchecked
        if not (every and unchecked and (unchecked >= every or is_idle)) or now < self._paused_until:
            return
        begin = self._clock()
        invariants.check(self._core, with_waiting_prompts=False)
        end = self._clock()
        self._num_unchecked = 0
        self._paused_until = end + PAUSE * (end - begin)
        self._counters.checks += 1
        self._counters.check_seconds += end - begin

    def next_check(self) -> float:
        """Return the time of the check that an idle engine has put off; infinite without one."""
        return self._paused_until if self._every_steps and self._num_unchecked else math.inf
