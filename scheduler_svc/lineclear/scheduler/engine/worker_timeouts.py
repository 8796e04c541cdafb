"""Timeouts of a worker: silence, and the deadline of the oldest plan in flight. `WorkerSession` acts on them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lineclear.wire.messages import StepPlan

_COLD_STEPS = 8
_MAX_PREDICTED_RATIO = 20
_SLOW_STEP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """When a joined worker counts as hung."""

    step_timeout_seconds: float = 30.0
    """Longest step, unless 20 times the prediction of the step time model is longer."""
    cold_step_timeout_seconds: float = 300.0
    """The same for the first 8 steps of an epoch, which compile kernels and capture graphs."""
    heartbeat_timeout_seconds: float = 5.0
    """Longest time without a message."""


class SilenceTimer:
    """A joined worker sends heartbeats, so silence means that it hangs."""

    def __init__(self, timeouts: WorkerTimeouts, now: float) -> None:
        self._timeout_seconds = timeouts.heartbeat_timeout_seconds
        self._last_message_at = now

    def restart(self, now: float) -> None:
        """A message was received, or may still be under way."""
        self._last_message_at = now

    def deadline(self) -> float:
        """Return when the worker has been silent for too long."""
        return self._last_message_at + self._timeout_seconds

    def overdue(self, now: float) -> str | None:
        """Return why the worker is to be killed, None while it has time left."""
        return None if now < self.deadline() else f"it was silent for {now - self._last_message_at:.1f} s"


class _SentPlan(NamedTuple):
    plan: StepPlan
    num_tokens: int
    sent_at: float


class StepTimer:
    """Plans run one after the other, so a step starts when it is sent or when the step before it is done.

    `predict(num_tokens)` returns the seconds that a step should take.
    """

    def __init__(self, timeouts: WorkerTimeouts, predict: Callable[[int], float]) -> None:
        self._timeouts = timeouts
        self._predict = predict
        self._inflight: deque[_SentPlan] = deque()
        self._step_started_at = 0.0  # of the oldest plan in flight
        self.idle_since = 0.0
        """Time of the last result; meaningful while `is_idle`."""

    @property
    def is_idle(self) -> bool:
        """No plan is without its result."""
        return not self._inflight

    def start(self, now: float) -> None:
        """The worker has joined."""
        self.idle_since = now

    def plan_sent(self, plan: StepPlan, now: float) -> None:
        """Add a plan in flight."""
        if not self._inflight:
            self._step_started_at = now
        self._inflight.append(_SentPlan(plan, plan.num_tokens, now))

    def result_received(self, now: float) -> bool:
        """Remove the oldest plan in flight. Return whether its step took far longer than predicted."""
        _, num_tokens, sent_at = self._inflight.popleft()
        seconds = now - max(sent_at, self._step_started_at)
        self._step_started_at = self.idle_since = now
        return seconds > max(_SLOW_STEP_SECONDS, _MAX_PREDICTED_RATIO * self._predict(num_tokens))

    def restart(self, now: float) -> None:
        """Give the oldest plan in flight its whole timeout again."""
        self._step_started_at = now

    def deadline(self) -> float:
        """Return when the oldest plan in flight is overdue; infinite without one."""
        if not self._inflight:
            return math.inf
        plan, num_tokens, _ = self._inflight[0]
        allowed = max(self._timeouts.step_timeout_seconds, _MAX_PREDICTED_RATIO * self._predict(num_tokens))
        if plan.step <= _COLD_STEPS:
            allowed = max(allowed, self._timeouts.cold_step_timeout_seconds)
        return self._step_started_at + allowed

    def overdue(self, now: float) -> str | None:
        """Return why the worker is to be killed, None while the oldest plan has time left."""
        if now < self.deadline():
            return None
        return f"step {self._inflight[0].plan.step} is not done after {now - self._step_started_at:.1f} s"
