"""One worker epoch, from its Hello to its end, as a state machine: a table of state x event, as in h11's `_state.py`.

No sockets, no clock, no log: the caller passes events with the time and carries out the outputs that are returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.engine.crash_budget import HEALTHY_IDLE_SECONDS
from lineclear.scheduler.engine.engine_stats import TokenRate
from lineclear.scheduler.engine.worker_events import (
    Accepted,
    Condemned,
    Disconnected,
    EpochEnded,
    EpochMessage,
    Event,
    Joined,
    JoinRefused,
    Lost,
    Output,
    PlaceFreed,
    ProcessExited,
    Received,
    Refused,
    Rejected,
    Replaced,
    Retired,
    Send,
    Spared,
    Superseded,
    TimedOut,
    WorkerFailed,
)
from lineclear.scheduler.engine.worker_timeouts import SilenceTimer, StepTimer, WorkerTimeouts
from lineclear.wire.messages import (
    CANNOT_JOIN,
    AdapterLoaded,
    Goodbye,
    Heartbeat,
    Hello,
    LogLevel,
    Rejoin,
    StepError,
    StepErrorKind,
    StepPlan,
    StepResult,
    Stopping,
)

CLOSED = "its connection closed"
"""Reason of a loss that no message and no exit code explains."""
CONNECT_TIMEOUT_SECONDS = 5.0
"""From a Hello until a plan can reach the worker. Its heartbeats make it join again after that."""
LAST_MESSAGES_SECONDS = 0.1
"""From the end of the connection until the loss. Last messages and the exit code may still arrive."""


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


S = SessionState
TRANSITIONS: dict[SessionState, dict[type[Event], SessionState]] = {
    S.CONNECTING: {
        Accepted: S.JOINED,
        Refused: S.WAITING,
        Rejected: S.GONE,
        Replaced: S.ENDED,
        Received: S.CONNECTING,
        Disconnected: S.CONNECTING,
        TimedOut: S.ENDED,
        ProcessExited: S.GONE,
    },
    S.WAITING: {
        Rejected: S.GONE,
        Replaced: S.ENDED,
        PlaceFreed: S.ENDED,
        Received: S.WAITING,
        ProcessExited: S.GONE,
    },
    S.JOINED: {
        Received: S.JOINED,
        EpochEnded: S.ENDED,
        Retired: S.ENDED,
        WorkerFailed: S.UNHEALTHY,
        Disconnected: S.CUT_OFF,
        ProcessExited: S.GONE,
    },
    S.CUT_OFF: {
        Superseded: S.ENDED,
        Received: S.CUT_OFF,
        EpochEnded: S.ENDED,
        WorkerFailed: S.UNHEALTHY,
        TimedOut: S.ENDED,
        ProcessExited: S.GONE,
    },
    S.UNHEALTHY: {
        Superseded: S.ENDED,
        Received: S.UNHEALTHY,
        Disconnected: S.ENDED,
        Condemned: S.CONDEMNED,
        Spared: S.UNHEALTHY,
        ProcessExited: S.GONE,
    },
    S.CONDEMNED: {
        Superseded: S.GONE,
        Received: S.CONDEMNED,
        Disconnected: S.GONE,
        ProcessExited: S.GONE,
    },
    S.ENDED: {Received: S.ENDED, ProcessExited: S.GONE},
    S.GONE: {Received: S.GONE, ProcessExited: S.GONE},
}
"""The next state. Any other event raises IllegalTransition."""


class IllegalTransition(AssertionError):
    """An event that cannot happen in this state: a bug of the scheduler."""


class WorkerSession:
    """One epoch of a worker process. Owned by the engine thread.

    `hello` is None for an epoch whose Hello this scheduler has not received: such a session is over from the start.
    `predict(num_tokens)` returns the seconds that a step should take.
    """

    def __init__(
        self, epoch: int, hello: Hello | None, now: float, timeouts: WorkerTimeouts, predict: Callable[[int], float]
    ) -> None:
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
        self.is_released = False
        """The worker has been sent Goodbye because no request is left to run."""
        self.log_level: LogLevel | None = None
        """The level that the worker has been sent, if any."""
        self._timer = StepTimer(timeouts, predict)
        self._since = now  # start of the current state
        self._silence = SilenceTimer(timeouts, now)
        self._has_confirmed = False  # a token
        self._has_progressed = False

    def handle(self, event: Event, now: float) -> list[Output]:
        """Change the state by the table and return the outputs. Raises IllegalTransition."""
        before = self.state
        after = self._next_states.get(type(event))
        if after is None:
            raise IllegalTransition(f"{type(event).__name__} in state {before.name}, epoch {self.epoch}")
        if after is not before:
            self.state, self._next_states, self._since = after, TRANSITIONS[after], now
        match event:
            case Received(message):
                return self._on_message(message, now)
            case Accepted():
                self.has_joined = True
                self._silence.restart(now)
                self._timer.start(now)
                return [Joined(self._hello)]
            case Refused(reason):
                refusal = Send(Goodbye(self.epoch, reason))
                return [refusal] if self.was_refused else [refusal, JoinRefused(self._hello, reason)]
            case Retired():
                lost = self._lost("it was stopped, and its requests continue on other workers", WorkerLoss.CLEAN)
                return [lost, Send(Goodbye(self.epoch, "its requests continue on other workers"))]
            case EpochEnded(reason):
                return [self._lost(reason, WorkerLoss.CLEAN), Send(Rejoin(self.epoch))]
            case WorkerFailed(reason, loss):
                return [self._lost(reason, loss, must_kill=True)]
            case TimedOut() | Superseded() if before is S.CUT_OFF:
                return [self._lost(CLOSED, WorkerLoss.KILLED), Send(Rejoin(self.epoch))]
            case PlaceFreed() | Spared():
                return [Send(Rejoin(self.epoch))]
            case Rejected() | Condemned():
                return [self._goodbye()]
            case ProcessExited(loss):
                ended = [self._lost("its process ended", loss)] if before in (S.JOINED, S.CUT_OFF) else []
                return [*ended, *([] if before is S.GONE else [self._goodbye()])]
        return []

    def receive(self, message: EpochMessage, now: float) -> list[Output]:
        """Handle a message of this epoch."""
        if self.state is S.JOINED or self.state is S.CUT_OFF:
            if isinstance(message, Goodbye):
                return self.handle(EpochEnded(f"it left: {message.reason}"), now)
            if isinstance(message, StepError):
                return [message, *self.handle(_failure(message), now)]
        return self.handle(Received(message), now)

    def check(self, now: float) -> list[Output]:
        """Handle the timeouts that are over."""
        if self.state is S.JOINED:
            if (silent := self._silence.overdue(now)) is not None:
                return self.handle(WorkerFailed(silent, WorkerLoss.KILLED), now)
            if (overdue := self._timer.overdue(now)) is not None:
                return self.handle(WorkerFailed(overdue, WorkerLoss.CRASHED), now)
        elif self.state in _TIMEOUTS and now >= self._since + _TIMEOUTS[self.state]:
            return self.handle(TimedOut(), now)
        return []

    def next_check(self) -> float:
        """Return the time of the next timeout; infinite if none is running."""
        if self.state is S.JOINED:
            return min(self._silence.deadline(), self._timer.deadline())
        return self._since + _TIMEOUTS.get(self.state, math.inf)

    def extend_deadlines(self, now: float) -> None:
        """Restart the running timeouts: the scheduler's process was suspended, and messages may be under way."""
        self._silence.restart(now)
        self._timer.restart(now)

    # --- plans and results ----------------------------------------------------------------------------------------

    @property
    def is_joined(self) -> bool:
        """Plans can be sent to the worker."""
        return self.state is S.JOINED

    @property
    def is_idle(self) -> bool:
        """No plan is without its result."""
        return self._timer.is_idle

    def plan_sent(self, plan: StepPlan, now: float) -> None:
        """Start the deadline of a plan."""
        self._timer.plan_sent(plan, now)

    def result_applied(self, result: StepResult, now: float) -> bool:
        """Stop the deadline of the oldest plan; return whether the step took far longer than predicted."""
        self._has_confirmed = self._has_confirmed or bool(result.tokens)
        self.num_steps += 1
        self.token_rate.add(len(result.tokens), now)
        return self._timer.result_received(now)

    def take_progress(self, now: float) -> bool:
        """Return True once: when the worker has made progress in the sense of `crash_budget`."""
        if self._has_progressed:
            return False
        is_idle = self._timer.is_idle and now >= self._timer.idle_since + HEALTHY_IDLE_SECONDS
        self._has_progressed = self._has_confirmed or is_idle
        return self._has_progressed

    # --- helpers --------------------------------------------------------------------------------------------------

    @property
    def _hello(self) -> Hello:
        assert self.hello is not None
        return self.hello

    def _on_message(self, message: object, now: float) -> list[Output]:
        if self.state is S.JOINED:
            self._silence.restart(now)
            self.is_stopping = self.is_stopping or isinstance(message, Stopping)
            if isinstance(message, Heartbeat):
                return [message] if message.prepared else []
            return [message] if isinstance(message, StepResult | Stopping | AdapterLoaded) else []
        if self.state is S.CUT_OFF:
            return [message] if isinstance(message, StepResult) else []
        if self.state is S.CONNECTING:
            return []
        return [self._goodbye() if self.state in (S.CONDEMNED, S.GONE) else Send(Rejoin(self.epoch))]

    def _goodbye(self) -> Output:
        return Send(Goodbye(self.epoch, CANNOT_JOIN))

    def _lost(self, reason: str, loss: WorkerLoss, *, must_kill: bool = False) -> Output:
        return Lost(self._hello, reason, loss, must_kill, self.is_stopping)


_TIMEOUTS = {S.CONNECTING: CONNECT_TIMEOUT_SECONDS, S.CUT_OFF: LAST_MESSAGES_SECONDS}


def _failure(error: StepError) -> EpochEnded | WorkerFailed:
    """Out of memory ends the epoch. A lost or doubled frame is no request's fault, an exception may be."""
    reason = f"a step failed: {error.kind.name.lower()}"
    if error.kind is StepErrorKind.OUT_OF_MEMORY:
        return EpochEnded(reason)
    return WorkerFailed(reason, WorkerLoss.CLEAN if error.kind is StepErrorKind.PROTOCOL else WorkerLoss.CRASHED)
