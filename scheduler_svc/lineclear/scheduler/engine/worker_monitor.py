"""The vigil over the joined worker: which plans it has, and when its silence or a step has lasted too long.

Decides how a worker was lost that does not say so itself. What follows from the loss is the engine's and the core's.
No clock is read here: every moment is told.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.engine.crash_budget import HEALTHY_IDLE_SECONDS
from lineclear.scheduler.engine.engine_stats import StepTime
from lineclear.scheduler.engine.worker_link import CLOSED
from lineclear.wire.messages import StepPlan, StepResult

_COLD_STEPS = 8
_MAX_PREDICTED_RATIO = 20
_SLOW_STEP_SECONDS = 2.0
_HUNG_CHECK_SECONDS = 0.5
_LAST_MESSAGES_SECONDS = 0.1  # from a closed connection to the exit code of its process, where there is a supervisor
_SIGNALS_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)  # a process that fails ends by others


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """How long a joined worker is waited for."""

    step_timeout_seconds: float = 30.0
    """A step may take this long, or 20 times what the step model predicts if that is longer."""
    cold_step_timeout_seconds: float = 300.0
    """The same for the first steps of an epoch, in which kernels are compiled and graphs captured."""
    heartbeat_timeout_seconds: float = 5.0
    """How long it may be silent."""


class TimedOut(NamedTuple):
    """Why a worker is given up, and whether it has to be killed."""

    reason: str
    loss: WorkerLoss
    kill: bool


class _Sent(NamedTuple):
    """A plan without a result yet."""

    plan: StepPlan
    num_tokens: int
    sent_at: float


class WorkerMonitor:
    """Over one worker after the other. `predict` says how many seconds a step of so many tokens should take."""

    def __init__(self, patience: WorkerTimeouts, predict: Callable[[int], float]) -> None:
        self._timeouts = patience
        self._predict = predict
        self._in_flight: deque[_Sent] = deque()
        self._oldest_since = 0.0  # when the oldest plan in flight had the device for itself
        self._closed_since: float | None = None
        self._is_joined = False
        self._idle_since = 0.0  # meaningful while nothing is in flight
        self._has_confirmed = False  # a token
        self._has_progressed = False
        self.hung_epoch: int | None = None
        """Epoch of a worker that was put out and may still hold its device."""

    @property
    def is_idle(self) -> bool:
        """No plan is without its result."""
        return not self._in_flight

    @property
    def is_closed(self) -> bool:
        """The worker's connection is closed, and its exit may still tell why."""
        return self._closed_since is not None

    def begin(self, now: float) -> None:
        """A worker has joined, so none is left of those before."""
        self._is_joined = True
        self._idle_since = now
        self._has_confirmed = self._has_progressed = False
        self.hung_epoch = None

    def take_progress(self, now: float) -> bool:
        """Return True once for each worker, when it has made what `crash_budget` calls progress."""
        if self._has_progressed:
            return False
        is_idle = not self._in_flight and now >= self._idle_since + HEALTHY_IDLE_SECONDS
        self._has_progressed = self._has_confirmed or is_idle
        return self._has_progressed

    def connection_closed(self, now: float) -> None:
        """The worker is heard no more."""
        self._closed_since = now

    def plan_sent(self, plan: StepPlan, now: float) -> None:
        """The worker has one more plan."""
        if not self._in_flight:
            self._oldest_since = now
        self._in_flight.append(_Sent(plan, plan.num_tokens, now))

    def result_received(self, result: StepResult, now: float) -> tuple[StepTime, bool]:
        """The oldest plan is done: what it took, and whether that is far more than predicted."""
        plan, num_tokens, sent_at = self._in_flight.popleft()
        seconds = now - max(sent_at, self._oldest_since)
        self._oldest_since = self._idle_since = now
        self._has_confirmed = self._has_confirmed or bool(result.tokens)
        is_slow = seconds > max(_SLOW_STEP_SECONDS, _MAX_PREDICTED_RATIO * self._predict(num_tokens))
        times = result.step_seconds, now - sent_at
        return StepTime(result.epoch, result.step, plan.num_rows, num_tokens, *times), is_slow

    def extend_deadlines(self, now: float) -> None:
        """Time passed that was not the worker's: the step at work begins anew."""
        self._oldest_since = now

    def end(self, *, hung: int | None) -> None:
        """The worker is given up; the next one owes nothing. `hung`: its epoch, where it has to be killed."""
        self._in_flight.clear()
        self._closed_since = None
        self._is_joined = False
        self.hung_epoch = hung

    def check_hung(self, is_reachable: Callable[[int], bool]) -> None:
        """While nobody has joined: see whether the hung one is gone."""
        if self.hung_epoch is not None and not is_reachable(self.hung_epoch):
            self.hung_epoch = None

    def check_timeouts(self, last_heard: float, now: float) -> TimedOut | None:
        """Why the worker, whose last word came at `last_heard`, is waited for no longer; None while it is."""
        if self._closed_since is not None and now >= self._closed_since + _LAST_MESSAGES_SECONDS:
            return TimedOut(CLOSED, WorkerLoss.KILLED, kill=False)
        if now >= last_heard + self._timeouts.heartbeat_timeout_seconds:
            return TimedOut(f"it was silent for {now - last_heard:.1f} s", WorkerLoss.KILLED, kill=True)
        if self._in_flight and now >= self._step_deadline():
            step, age = self._in_flight[0].plan.step, now - self._oldest_since
            return TimedOut(f"step {step} is not done after {age:.1f} s", WorkerLoss.CRASHED, kill=True)
        return None

    def next_check(self, last_heard: float, now: float) -> float:
        """The moment at which to look again, if nothing happens before."""
        if not self._is_joined:
            return math.inf if self.hung_epoch is None else now + _HUNG_CHECK_SECONDS
        if self._closed_since is not None:
            return self._closed_since + _LAST_MESSAGES_SECONDS
        silence = last_heard + self._timeouts.heartbeat_timeout_seconds
        return min(silence, self._step_deadline()) if self._in_flight else silence

    def _step_deadline(self) -> float:
        sent = self._in_flight[0]
        allowed = max(self._timeouts.step_timeout_seconds, _MAX_PREDICTED_RATIO * self._predict(sent.num_tokens))
        if sent.plan.step <= _COLD_STEPS:
            allowed = max(allowed, self._timeouts.cold_step_timeout_seconds)
        return self._oldest_since + allowed


def loss_by_exit(exit_code: int | None) -> WorkerLoss:
    """How a worker was lost whose process ended so: negative for a signal, None if nobody knows."""
    is_from_outside = exit_code is None or exit_code == 0 or -exit_code in _SIGNALS_FROM_OUTSIDE
    return WorkerLoss.KILLED if is_from_outside else WorkerLoss.CRASHED
