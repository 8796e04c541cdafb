"""One worker epoch, from its Hello to its end, as a state machine: a table of state x event, as in h11's `_state.py`.

No sockets, no clock, no log: the caller passes events with the time and carries out the outputs that are returned.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.engine.engine_stats import TokenRate, WorkerFigures
from lineclear.wire.messages import (
    CANNOT_JOIN,
    AdapterLoaded,
    EpochMessage,
    Goodbye,
    Heartbeat,
    Hello,
    Profiled,
    Rejoin,
    StepError,
    StepErrorKind,
    StepResult,
    Stopping,
)

CLOSED = "its connection closed"
"""Reason of a loss that no message and no exit code explains."""
CONNECT_TIMEOUT_SECONDS = 5.0
"""From a Hello until a plan can reach the worker. Its heartbeats make it join again after that."""
LAST_MESSAGES_SECONDS = 0.1
"""From the end of the connection until the loss. Last messages and the exit code may still arrive."""
HEALTHY_IDLE_SECONDS = 10.0
"""How long a joined worker without work has to live to have made progress."""
_COLD_STEPS = 8
_MAX_PREDICTED_RATIO = 20
_SLOW_STEP_SECONDS = 2.0


class SessionState(Enum):
    """State of an epoch as the scheduler knows it."""

    CONNECTING = "Hello received; no plan can reach the worker yet"
    WAITING = "refused because of the workers that are joined; may join after them"
    JOINED = "runs plans"
    CUT_OFF = "no plan can reach the worker; its last messages still count"
    UNHEALTHY = "lost and to be killed, but still connected; the process may join again"
    CONDEMNED = "lost and being killed; the process may not join again"
    ENDED = "over; the process may join again with a new epoch"
    GONE = "over; the process may not join again"


class SessionEvent(Enum):
    """What happens to an epoch, besides messages that leave its state as it is."""

    ACCEPTED = "a plan can reach the worker, and the place is free"
    REFUSED = "the workers that are joined leave no place for this one"
    REJECTED = "the process may not join: it is being killed, has exited, or has read other files"
    REPLACED = "the same process said Hello with a newer epoch"
    PLACE_FREED = "a joined worker is lost, and the waiting one may join"
    SUPERSEDED = "a worker joins that takes the place: the same process, another model, or the last free place"
    RETIRED = "the worker is stopping, and its requests continue on other workers"
    EPOCH_ENDED = "the worker ended the epoch itself, and did nothing wrong"
    FAILED = "the worker has to be killed"
    DISCONNECTED = "no plan can reach the worker"
    TIMED_OUT = "the worker has been connecting, or cut off, for too long"
    CONDEMNED = "the supervisor kills the process"
    SPARED = "no supervisor kills the process, so it may join again"
    PROCESS_EXITED = "the process has exited"


S, E = SessionState, SessionEvent
TRANSITIONS: dict[SessionState, dict[SessionEvent, SessionState]] = {
    S.CONNECTING: {
        E.ACCEPTED: S.JOINED,
        E.REFUSED: S.WAITING,
        E.REJECTED: S.GONE,
        E.REPLACED: S.ENDED,
        E.DISCONNECTED: S.CONNECTING,
        E.TIMED_OUT: S.ENDED,
        E.PROCESS_EXITED: S.GONE,
    },
    S.WAITING: {
        E.REJECTED: S.GONE,
        E.REPLACED: S.ENDED,
        E.PLACE_FREED: S.ENDED,
        E.PROCESS_EXITED: S.GONE,
    },
    S.JOINED: {
        E.EPOCH_ENDED: S.ENDED,
        E.RETIRED: S.ENDED,
        E.FAILED: S.UNHEALTHY,
        E.DISCONNECTED: S.CUT_OFF,
        E.PROCESS_EXITED: S.GONE,
    },
    S.CUT_OFF: {
        E.SUPERSEDED: S.ENDED,
        E.EPOCH_ENDED: S.ENDED,
        E.FAILED: S.UNHEALTHY,
        E.TIMED_OUT: S.ENDED,
        E.PROCESS_EXITED: S.GONE,
    },
    S.UNHEALTHY: {
        E.SUPERSEDED: S.ENDED,
        E.DISCONNECTED: S.ENDED,
        E.CONDEMNED: S.CONDEMNED,
        E.SPARED: S.UNHEALTHY,
        E.PROCESS_EXITED: S.GONE,
    },
    S.CONDEMNED: {E.SUPERSEDED: S.GONE, E.DISCONNECTED: S.GONE, E.PROCESS_EXITED: S.GONE},
    S.ENDED: {E.PROCESS_EXITED: S.GONE},
    S.GONE: {E.PROCESS_EXITED: S.GONE},
}
"""The next state. Any other event raises IllegalTransition."""


class IllegalTransition(AssertionError):
    """An event that cannot happen in this state: a bug of the scheduler."""


class Send(NamedTuple):
    """Send a message to the worker of its epoch, if that is possible now."""

    message: Rejoin | Goodbye


class Joined(NamedTuple):
    """The worker runs plans from now on."""

    hello: Hello


class JoinRefused(NamedTuple):
    """A worker waits until it may join."""

    hello: Hello
    reason: str


class JoinRejected(NamedTuple):
    """A worker has read other tokenizer files than the scheduler."""

    hello: Hello


class Lost(NamedTuple):
    """The worker runs plans no longer. `must_kill`: its process has to be killed."""

    hello: Hello
    reason: str
    loss: WorkerLoss
    must_kill: bool
    was_stopping: bool


Change = Heartbeat | Joined | JoinRefused | JoinRejected | Lost | StepError | Stopping | AdapterLoaded | Profiled
"""Outputs that change what workers there are or what they run, among them messages as received."""
Fact = Change | StepResult
"""Outputs for the engine."""
Output = Send | Fact


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """When a joined worker counts as hung."""

    step_timeout_seconds: float = 30.0
    """Longest step, unless 20 times the prediction of the step time model is longer."""
    cold_step_timeout_seconds: float = 300.0
    """The same for the first 8 steps of an epoch, which compile kernels and capture graphs."""
    heartbeat_timeout_seconds: float = 5.0
    """Longest time without a message."""


class WorkerSession:
    """One epoch of a worker process. Owned by the engine thread.

    `hello` is None for an epoch whose Hello this scheduler has not received: such a session is over from the start.
    """

    def __init__(self, epoch: int, hello: Hello | None, now: float, timeouts: WorkerTimeouts) -> None:
        self.epoch = epoch
        self.hello = hello
        self.state = S.ENDED if hello is None else S.CONNECTING
        self._next_states = TRANSITIONS[self.state]
        self.index = 0
        """Small number of a worker that has joined: the smallest that no other serving worker has."""
        self.has_joined = False
        self.num_steps = 0
        """Steps whose results were applied."""
        self.token_rate = TokenRate(now)
        self.was_refused = False
        """The same process was refused with an older epoch, and still waits."""
        self.is_stopping = False
        """The worker has received SIGTERM: it runs plans until no request is left, or its drain timeout."""
        self.has_progressed = False
        """A token was confirmed, or the worker was idle for `HEALTHY_IDLE_SECONDS`."""
        self.timer = StepTimer(timeouts)
        self._since = now  # start of the current state
        self._heartbeat_timeout_seconds = timeouts.heartbeat_timeout_seconds
        self._last_message_at = now
        self._has_confirmed = False  # a token

    def handle(
        self, event: SessionEvent, now: float, reason: str = "", loss: WorkerLoss = WorkerLoss.CLEAN
    ) -> list[Output]:
        """Change the state by the table and return the outputs. Raises IllegalTransition.

        `reason` is that of a refusal or loss; `loss` is how a failed or exited worker was lost.
        """
        before = self.state
        after = self._next_states.get(event)
        if after is None:
            raise IllegalTransition(f"{event.name} in state {before.name}, epoch {self.epoch}")
        if after is not before:
            self.state, self._next_states, self._since = after, TRANSITIONS[after], now
        match event:
            case E.ACCEPTED:
                self.has_joined = True
                self._last_message_at = self.timer.idle_since = now
                return [Joined(self._hello)]
            case E.REFUSED:
                refusal = Send(Goodbye(self.epoch, reason))
                return [refusal] if self.was_refused else [refusal, JoinRefused(self._hello, reason)]
            case E.RETIRED:
                lost = self._lost("it was stopped, and its requests continue on other workers", WorkerLoss.CLEAN)
                return [lost, Send(Goodbye(self.epoch, "its requests continue on other workers"))]
            case E.EPOCH_ENDED:
                return [self._lost(reason, WorkerLoss.CLEAN), Send(Rejoin(self.epoch))]
            case E.FAILED:
                return [self._lost(reason, loss, must_kill=True)]
            case E.TIMED_OUT | E.SUPERSEDED if before is S.CUT_OFF:
                return [self._lost(CLOSED, WorkerLoss.KILLED), Send(Rejoin(self.epoch))]
            case E.PLACE_FREED | E.SPARED:
                return [Send(Rejoin(self.epoch))]
            case E.REJECTED | E.CONDEMNED:
                return [self._goodbye()]
            case E.PROCESS_EXITED:
                ended = [self._lost("its process ended", loss)] if before in (S.JOINED, S.CUT_OFF) else []
                return [*ended, *([] if before is S.GONE else [self._goodbye()])]
        return []

    def receive(self, message: EpochMessage, now: float) -> list[Output]:
        if self.state is S.JOINED:
            self._last_message_at = now
        elif self.state is not S.CUT_OFF:
            if self.state is S.CONNECTING:
                return []
            return [self._goodbye() if self.state in (S.CONDEMNED, S.GONE) else Send(Rejoin(self.epoch))]
        match message:
            case StepResult():
                return [message]
            case Goodbye():
                return self.handle(E.EPOCH_ENDED, now, f"it left: {message.reason}")
            case StepError():
                return [message, *self._on_step_error(message, now)]
        if self.state is S.CUT_OFF:
            return []
        self.is_stopping = self.is_stopping or isinstance(message, Stopping)
        return [] if isinstance(message, Heartbeat) and not message.prepared else [message]

    def check(self, now: float) -> list[Output]:
        """Handle the timeouts that are over."""
        if self.state is S.JOINED:
            if now >= self._last_message_at + self._heartbeat_timeout_seconds:
                silent = f"it was silent for {now - self._last_message_at:.1f} s"
                return self.handle(E.FAILED, now, silent, WorkerLoss.KILLED)
            if (overdue := self.timer.overdue(now)) is not None:
                return self.handle(E.FAILED, now, overdue, WorkerLoss.CRASHED)
        elif self.state in _TIMEOUTS and now >= self._since + _TIMEOUTS[self.state]:
            return self.handle(E.TIMED_OUT, now)
        return []

    def next_check(self) -> float:
        """Return the time of the next timeout; infinite if none is running."""
        if self.state is S.JOINED:
            return min(self._last_message_at + self._heartbeat_timeout_seconds, self.timer.deadline())
        return self._since + _TIMEOUTS.get(self.state, math.inf)

    def extend_deadlines(self, now: float) -> None:
        """Restart the running timeouts: the scheduler's process was suspended, and messages may be under way."""
        self._last_message_at = now
        self.timer.restart(now)

    @property
    def is_joined(self) -> bool:
        """Plans can be sent to the worker."""
        return self.state is S.JOINED

    def result_applied(self, result: StepResult, now: float) -> bool:
        """Stop the deadline of the oldest plan; return whether the step took far longer than predicted."""
        self._has_confirmed = self._has_confirmed or bool(result.tokens)
        self.num_steps += 1
        self.token_rate.add(len(result.tokens), now)
        return self.timer.result_received(now)

    def take_progress(self, now: float) -> bool:
        """Update `has_progressed`; return True the first time that it is set."""
        if self.has_progressed:
            return False
        is_idle = not self.timer.inflight and now >= self.timer.idle_since + HEALTHY_IDLE_SECONDS
        self.has_progressed = self._has_confirmed or is_idle
        return self.has_progressed

    def figures(self, num_joins: int, now: float) -> WorkerFigures:
        """Return the figures of this worker; `num_joins` workers have joined with its index."""
        is_stopping = self.state is S.JOINED and self.is_stopping
        return WorkerFigures(
            hello=self._hello,
            state="stopping" if is_stopping else self.state.name.lower(),
            index=self.index if self.has_joined else None,
            joins=num_joins if self.has_joined else 0,
            num_steps=self.num_steps,
            tokens_per_second=self.token_rate.per_second(now),
        )

    @property
    def _hello(self) -> Hello:
        assert self.hello is not None
        return self.hello

    def _on_step_error(self, error: StepError, now: float) -> list[Output]:
        """Out of memory ends the epoch. A lost or doubled frame is no request's fault, an exception may be."""
        reason = f"a step failed: {error.kind.name.lower()}"
        if error.kind is StepErrorKind.OUT_OF_MEMORY:
            return self.handle(E.EPOCH_ENDED, now, reason)
        is_clean = error.kind is StepErrorKind.PROTOCOL
        return self.handle(E.FAILED, now, reason, WorkerLoss.CLEAN if is_clean else WorkerLoss.CRASHED)

    def _goodbye(self) -> Output:
        return Send(Goodbye(self.epoch, CANNOT_JOIN))

    def _lost(self, reason: str, loss: WorkerLoss, *, must_kill: bool = False) -> Output:
        return Lost(self._hello, reason, loss, must_kill, self.is_stopping)


_TIMEOUTS = {S.CONNECTING: CONNECT_TIMEOUT_SECONDS, S.CUT_OFF: LAST_MESSAGES_SECONDS}


class _SentPlan(NamedTuple):
    step: int
    predicted_seconds: float
    sent_at: float


class StepTimer:
    """Plans run one after the other, so a step starts when it is sent or when the step before it is done."""

    def __init__(self, timeouts: WorkerTimeouts) -> None:
        self._timeouts = timeouts
        self.inflight: deque[_SentPlan] = deque()
        """Plans without result, the oldest first."""
        self._step_started_at = 0.0  # of the oldest plan in flight
        self.idle_since = 0.0
        """Time of the join or the last result; meaningful without a plan in flight."""

    def plan_sent(self, step: int, predicted_seconds: float, now: float) -> None:
        """Add a plan in flight, whose step should take `predicted_seconds`."""
        if not self.inflight:
            self._step_started_at = now
        self.inflight.append(_SentPlan(step, predicted_seconds, now))

    def result_received(self, now: float) -> bool:
        """Remove the oldest plan in flight. Return whether its step took far longer than predicted."""
        _, predicted_seconds, sent_at = self.inflight.popleft()
        seconds = now - max(sent_at, self._step_started_at)
        self._step_started_at = self.idle_since = now
        return seconds > max(_SLOW_STEP_SECONDS, _MAX_PREDICTED_RATIO * predicted_seconds)

    def restart(self, now: float) -> None:
        """Give the oldest plan in flight its whole timeout again."""
        self._step_started_at = now

    def deadline(self) -> float:
        """Return when the oldest plan in flight is overdue; infinite without one."""
        if not self.inflight:
            return math.inf
        step, predicted_seconds, _ = self.inflight[0]
        allowed = max(self._timeouts.step_timeout_seconds, _MAX_PREDICTED_RATIO * predicted_seconds)
        if step <= _COLD_STEPS:
            allowed = max(allowed, self._timeouts.cold_step_timeout_seconds)
        return self._step_started_at + allowed

    def overdue(self, now: float) -> str | None:
        """Return why the worker is to be killed, None while the oldest plan has time left."""
        if now < self.deadline():
            return None
        return f"step {self.inflight[0].step} is not done after {now - self._step_started_at:.1f} s"
