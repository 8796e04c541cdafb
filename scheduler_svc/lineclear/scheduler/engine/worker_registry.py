"""Which workers exist and which one may join: the sessions by epoch. Pure, like the sessions themselves."""

from __future__ import annotations

import math
from collections.abc import Callable

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.engine import worker_events as events
from lineclear.scheduler.engine.engine_stats import MembershipCounters, WorkerStatus
from lineclear.scheduler.engine.worker_events import EpochMessage, Event, JoinRejected, Output
from lineclear.scheduler.engine.worker_session import WorkerSession, WorkerState
from lineclear.scheduler.engine.worker_timeouts import WorkerTimeouts
from lineclear.wire.messages import Goodbye, Hello, StepError, StepResult, Stopping

S = WorkerState
_HUNG_CHECK_SECONDS = 0.5
MAX_SESSIONS = {S.CONNECTING: 16, S.WAITING: 16, S.ENDED: 64, S.GONE: 64}
"""Sessions kept for each state; the oldest are forgotten. Other states are rare and need no limit."""


class WorkerRegistry:
    """The sessions of all workers, of which one at a time is joined. Owned by the engine thread.

    A worker whose Hello names another `text_fingerprint` than this one is rejected; empty: not compared.
    """

    def __init__(
        self, timeouts: WorkerTimeouts, predict: Callable[[int], float], *, text_fingerprint: str = ""
    ) -> None:
        self.counters = MembershipCounters()
        self.status = WorkerStatus()
        """Immutable and replaced on every change: other threads read it."""
        self.is_connecting = False
        """A worker has said Hello that no plan can reach yet."""
        self.serving: WorkerSession | None = None
        """The session whose results are applied: joined, or just cut off."""
        self._timeouts = timeouts
        self._predict = predict
        self._text_fingerprint = text_fingerprint
        self._sessions: dict[int, WorkerSession] = {}
        self._active: list[WorkerSession] = []  # that time or a probe may change
        self._num_joins = 0

    def __len__(self) -> int:
        """Return how many sessions are remembered."""
        return len(self._sessions)

    @property
    def joined(self) -> WorkerSession | None:
        """The session that plans are sent to."""
        return self.serving if self.serving is not None and self.serving.state is S.JOINED else None

    # --- events ---------------------------------------------------------------------------------------------------

    def on_message(self, message: Hello | EpochMessage, now: float) -> list[Output]:
        """Handle a message and return the outputs in order."""
        if isinstance(message, Hello):
            return self._on_hello(message, now)
        session = self._sessions.get(message.epoch)
        if session is None:
            session = self._add(message.epoch, None, now)
        before = session.state
        if before is not S.JOINED and _is_stale(message, before):
            self.counters.stale_messages += 1
        outputs = session.receive(message, now)
        if isinstance(message, Stopping):
            self._refresh()
        return self._follow(session, before, outputs, now)

    def on_probe(self, session: WorkerSession, is_reachable: bool, now: float) -> list[Output]:
        """Handle whether a plan can reach the worker of a session that `to_probe` returned."""
        if session not in self._active:
            return []  # over since `to_probe`
        if not is_reachable:
            return self._handle(session, events.Disconnected(), now)
        if session.state is S.CONNECTING:
            return self._admit(session, now)
        return []

    def on_unsent_plan(self, now: float) -> list[Output]:
        """The joined worker could not be sent a plan."""
        assert self.joined is not None
        return self._handle(self.joined, events.Disconnected(), now)

    def on_bad_result(self, problem: str, now: float) -> list[Output]:
        """The core has refused a result of the serving worker."""
        assert self.serving is not None
        failed = events.WorkerFailed(f"it sent a result that cannot be: {problem}", WorkerLoss.CLEAN)
        return self._handle(self.serving, failed, now)

    def on_kill_answer(self, epoch: int, is_being_killed: bool, now: float) -> list[Output]:
        """Handle whether the supervisor kills the process of a lost worker."""
        session = self._sessions[epoch]
        if not is_being_killed:
            return self._handle(session, events.Spared(), now)
        outputs = self._handle(session, events.Condemned(), now)
        for other in self._of_process(session.hello, S.CONNECTING, S.WAITING):
            outputs += self._handle(other, events.Rejected(), now)
        return outputs

    def on_process_exit(self, pid: int, loss: WorkerLoss, now: float) -> list[Output]:
        """Handle the exit of a process that the supervisor has started."""
        outputs: list[Output] = []
        hello = self.status.last_hello  # workers in separate containers may share a pid: this is the supervised one
        if hello is not None and hello.pid == pid:
            for session in self._of_process(hello, *S):
                outputs += self._handle(session, events.ProcessExited(loss), now)
        return outputs

    def check(self, now: float) -> list[Output]:
        """Handle the timeouts that are over."""
        outputs: list[Output] = []
        for session in self._active:
            before = session.state
            outputs += self._follow(session, before, session.check(now), now)
        return outputs

    def next_check(self, now: float) -> float:
        """Return the time of the next timeout or probe that no message announces; infinite without one."""
        moment = min([session.next_check() for session in self._active], default=math.inf)
        return min(moment, now + _HUNG_CHECK_SECONDS) if self.status.is_unhealthy else moment

    def extend_deadlines(self, now: float) -> None:
        """Restart the timeouts of the joined worker: the scheduler's process was suspended."""
        if self.serving is not None:
            self.serving.extend_deadlines(now)

    def to_probe(self, *, have_connections_changed: bool) -> list[WorkerSession]:
        """Return the sessions whose connection is to be looked at. The joined one is first: it may free the place."""
        states = (S.JOINED, S.CONNECTING) if have_connections_changed else ()
        return [s for state in (*states, S.UNHEALTHY, S.CONDEMNED) for s in self._active if s.state is state]

    # --- joining --------------------------------------------------------------------------------------------------

    def _on_hello(self, hello: Hello, now: float) -> list[Output]:
        if hello.epoch in self._sessions:
            self.counters.stale_messages += 1
            return []
        older = self._of_process(hello, S.CONNECTING, S.WAITING)
        session = self._add(hello.epoch, hello, now)
        if self._of_process(hello, S.CONDEMNED, S.GONE):
            self.counters.refused_joins += 1
            return self._handle(session, events.Rejected(), now)
        session.was_refused = any(other.state is S.WAITING or other.was_refused for other in older)
        return [output for other in older for output in self._handle(other, events.Replaced(), now)]

    def _admit(self, session: WorkerSession, now: float) -> list[Output]:
        hello = session.hello
        assert hello is not None
        if self.joined is not None:
            self.counters.refused_joins += 1
            return self._handle(session, events.Refused(), now)
        if self._text_fingerprint and hello.text_fingerprint not in ("", self._text_fingerprint):
            return [*self._handle(session, events.Rejected(), now), JoinRejected(hello)]
        outputs: list[Output] = []
        for other in self._in(S.CUT_OFF, S.UNHEALTHY, S.CONDEMNED):
            outputs += self._handle(other, events.Superseded(), now)
        self._num_joins += 1
        return outputs + self._handle(session, events.Accepted(), now)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _handle(self, session: WorkerSession, event: Event, now: float) -> list[Output]:
        before = session.state
        return self._follow(session, before, session.handle(event, now), now)

    def _follow(self, session: WorkerSession, before: WorkerState, outputs: list[Output], now: float) -> list[Output]:
        """Add the outputs of other sessions that a change of state affects."""
        if session.state is before:
            return outputs
        self._refresh()
        if before is S.JOINED:
            for waiting in self._in(S.WAITING):
                outputs += self._handle(waiting, events.PlaceFreed(), now)
        return outputs

    def _refresh(self) -> None:
        final = (S.WAITING, S.ENDED, S.GONE)
        self._active = [session for session in self._sessions.values() if session.state not in final]
        self.is_connecting = any(session.state is S.CONNECTING for session in self._active)
        self.serving = next(iter(self._in(S.JOINED, S.CUT_OFF)), None)
        serving = self.serving
        self.status = WorkerStatus(
            hello=None if serving is None else serving.hello,
            last_hello=self.status.last_hello if serving is None else serving.hello,
            num_joins=self._num_joins,
            is_unhealthy=bool(self._in(S.UNHEALTHY, S.CONDEMNED)),
            is_stopping=serving is not None and serving.is_stopping,
        )

    def _add(self, epoch: int, hello: Hello | None, now: float) -> WorkerSession:
        for state, limit in MAX_SESSIONS.items():
            for session in self._in(state)[: -limit or None]:
                del self._sessions[session.epoch]
        session = self._sessions[epoch] = WorkerSession(epoch, hello, now, self._timeouts, self._predict)
        self._refresh()
        return session

    def _in(self, *states: WorkerState) -> list[WorkerSession]:
        return [session for session in self._sessions.values() if session.state in states]

    def _of_process(self, hello: Hello | None, *states: WorkerState) -> list[WorkerSession]:
        """Return the sessions in `states` of the process that has sent `hello`."""
        assert hello is not None
        return [s for s in self._in(*states) if s.hello is not None and s.hello.instance == hello.instance]


def _is_stale(message: EpochMessage, state: WorkerState) -> bool:
    if state is S.CUT_OFF:
        return not isinstance(message, StepResult | StepError | Goodbye)
    return state is not S.CONNECTING
