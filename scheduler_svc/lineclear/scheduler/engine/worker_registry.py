"""Which workers exist and which of them may join: the sessions by epoch. Pure, like the sessions themselves.

Workers of one model join and serve side by side. A worker of another model waits until those have left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import count

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.engine.engine_stats import MembershipCounters, WorkerFigures, WorkerStatus
from lineclear.scheduler.engine.worker_session import (
    JoinRejected,
    Output,
    SessionEvent,
    SessionState,
    WorkerSession,
    WorkerTimeouts,
)
from lineclear.wire.messages import EpochMessage, Goodbye, Hello, StepError, StepResult, Stopping

S, E = SessionState, SessionEvent
_HUNG_CHECK_SECONDS = 0.5
MAX_SESSIONS = {S.CONNECTING: 64, S.WAITING: 64, S.ENDED: 64, S.GONE: 64}
"""Sessions kept for each state; the oldest are forgotten. Other states are rare and need no limit."""


class WorkerRegistry:
    """The sessions of all workers, of which at most `max_workers` are joined. Owned by the engine thread.

    A worker whose Hello names another `text_fingerprint` than this one is rejected; empty: not compared. `number_of`
    returns the number that the supervisor has given to a worker, which is its index, too.
    """

    def __init__(
        self,
        timeouts: WorkerTimeouts,
        *,
        max_workers: int = 64,
        text_fingerprint: str = "",
        number_of: Callable[[Hello], int | None] = lambda hello: None,
    ) -> None:
        self.counters = MembershipCounters()
        self.status = WorkerStatus()
        """Immutable and replaced on every change: other threads read it."""
        self.is_connecting = False
        """A worker has said Hello that no plan can reach yet."""
        self.has_hung = False
        """A worker that has to be killed is still connected."""
        self.joined: tuple[WorkerSession, ...] = ()
        """The sessions that plans are sent to, the oldest first."""
        self.joined_epochs: frozenset[int] = frozenset()
        self.serving: tuple[WorkerSession, ...] = ()
        """The sessions whose results are applied: joined, or just cut off."""
        self._timeouts = timeouts
        self._max_workers = max_workers
        self._text_fingerprint = text_fingerprint
        self._number_of = number_of
        self._sessions: dict[int, WorkerSession] = {}
        self._active: list[WorkerSession] = []  # that time or a probe may change
        self._num_joins: Counter[int] = Counter()  # by index

    def __len__(self) -> int:
        """Return how many sessions are remembered."""
        return len(self._sessions)

    def __getitem__(self, epoch: int) -> WorkerSession:
        """Return the session of an epoch that has joined."""
        return self._sessions[epoch]

    @property
    def is_idle(self) -> bool:
        """No plan is without its result."""
        for session in self.serving:  # noqa: SIM110 (all() takes longer, and the engine asks in each iteration)
            if session.timer.inflight:
                return False
        return True

    def figures(self, now: float) -> tuple[WorkerFigures, ...]:
        """Return the figures of all workers that serve, hang or wait."""
        shown = sorted(
            (s for s in self._in(S.JOINED, S.CUT_OFF, S.UNHEALTHY, S.CONDEMNED, S.WAITING)),
            key=lambda session: (not session.has_joined, session.index),
        )
        return tuple(session.figures(self._num_joins[session.index], now) for session in shown)

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
            return self.handle(session, E.DISCONNECTED, now)
        if session.state is S.CONNECTING:
            return self._admit(session, now)
        return []

    def handle(
        self,
        session: WorkerSession,
        event: SessionEvent,
        now: float,
        reason: str = "",
        loss: WorkerLoss = WorkerLoss.CLEAN,
    ) -> list[Output]:
        """Handle an event of a session and what follows for others. Arguments as for `WorkerSession.handle`."""
        before = session.state
        return self._follow(session, before, session.handle(event, now, reason, loss), now)

    def retire(self, now: float) -> list[Output]:
        """Release the stopping workers whose requests can continue on others."""
        if self.status.is_stopping:
            return []  # there are no others
        stopping = [session for session in self.joined if session.is_stopping]
        return [output for session in stopping for output in self.handle(session, E.RETIRED, now)]

    def on_kill_answer(self, epoch: int, is_being_killed: bool, now: float) -> list[Output]:
        """Handle whether the supervisor kills the process of a lost worker."""
        session = self._sessions[epoch]
        if not is_being_killed:
            return self.handle(session, E.SPARED, now)
        outputs = self.handle(session, E.CONDEMNED, now)
        for other in self._of_process(session.hello, S.CONNECTING, S.WAITING):
            outputs += self.handle(other, E.REJECTED, now)
        return outputs

    def on_process_exit(self, pid: int, loss: WorkerLoss, now: float) -> list[Output]:
        """Handle the exit of a process that the supervisor has started."""
        # Workers in separate containers may share a pid: a process that has never joined is not known by it.
        ended = {s.hello.instance: s.hello for s in self._sessions.values() if s.hello and s.has_joined}
        outputs: list[Output] = []
        for hello in (hello for hello in ended.values() if hello.pid == pid):
            for session in self._of_process(hello, *S):
                outputs += self.handle(session, E.PROCESS_EXITED, now, loss=loss)
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
        return min(moment, now + _HUNG_CHECK_SECONDS) if self.has_hung else moment

    def extend_deadlines(self, now: float) -> None:
        """Restart the timeouts of the joined workers: the scheduler's process was suspended."""
        for session in self.serving:
            session.extend_deadlines(now)

    def to_probe(self, *, have_connections_changed: bool) -> list[WorkerSession]:
        """Return the sessions whose connection is to be looked at. The joined ones are first: they may free a place."""
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
            return self.handle(session, E.REJECTED, now)
        session.was_refused = any(other.state is S.WAITING or other.was_refused for other in older)
        return [output for other in older for output in self.handle(other, E.REPLACED, now)]

    def _admit(self, session: WorkerSession, now: float) -> list[Output]:
        hello = session.hello
        assert hello is not None
        if refusal := self._refusal(hello):
            self.counters.refused_joins += 1
            return self.handle(session, E.REFUSED, now, refusal)
        if self._text_fingerprint and hello.text_fingerprint not in ("", self._text_fingerprint):
            return [*self.handle(session, E.REJECTED, now), JoinRejected(hello)]
        outputs: list[Output] = []
        for other in self._superseded_by(hello):
            outputs += self.handle(other, E.SUPERSEDED, now)
        taken = {other.index for other in self.serving}
        number = self._number_of(hello)
        if number is None or number in taken:
            number = next(index for index in count() if index not in taken)
        session.index = number
        self._num_joins[session.index] += 1
        return outputs + self.handle(session, E.ACCEPTED, now)

    def _refusal(self, hello: Hello) -> str:
        """Return why a worker may not join now; empty if it may."""
        if self._of_process(hello, S.JOINED):
            return "this process is joined with an older epoch"
        if any(_model(other) != hello.model_fingerprint for other in self.joined):
            return "workers of another model are joined to this scheduler"
        if len(self.joined) >= self._max_workers:
            return f"{len(self.joined)} workers are joined to this scheduler, and --max-workers is {self._max_workers}"
        return ""

    def _superseded_by(self, hello: Hello) -> list[WorkerSession]:
        superseded = self._of_process(hello, S.CUT_OFF, S.UNHEALTHY, S.CONDEMNED)
        is_full = len(self.serving) >= self._max_workers
        cut_off = [other for other in self._in(S.CUT_OFF) if is_full or _model(other) != hello.model_fingerprint]
        return [*superseded, *(other for other in cut_off if other not in superseded)]

    def _follow(self, session: WorkerSession, before: SessionState, outputs: list[Output], now: float) -> list[Output]:
        """Add the outputs of other sessions that a change of state affects."""
        if session.state is before:
            return outputs
        self._refresh()
        if before is S.JOINED:
            for waiting in self._in(S.WAITING):
                assert waiting.hello is not None
                if not self._refusal(waiting.hello):
                    outputs += self.handle(waiting, E.PLACE_FREED, now)
        return outputs

    def _refresh(self) -> None:
        final = (S.WAITING, S.ENDED, S.GONE)
        self._active = [session for session in self._sessions.values() if session.state not in final]
        self.is_connecting = any(session.state is S.CONNECTING for session in self._active)
        self.serving = tuple(session for session in self._active if session.state in (S.JOINED, S.CUT_OFF))
        self.joined = tuple(session for session in self.serving if session.state is S.JOINED)
        self.joined_epochs = frozenset(session.epoch for session in self.joined)
        self.has_hung = any(session.state in (S.UNHEALTHY, S.CONDEMNED) for session in self._active)
        hello = max((s.hello for s in self.serving if s.hello), key=lambda hello: hello.max_model_len, default=None)
        self.status = WorkerStatus(
            hello=hello,
            last_hello=hello or self.status.last_hello,
            num_joins=self._num_joins.total(),
            is_unhealthy=self.has_hung and not self.joined,
            is_stopping=bool(self.joined) and all(session.is_stopping for session in self.joined),
        )

    def _add(self, epoch: int, hello: Hello | None, now: float) -> WorkerSession:
        for state, limit in MAX_SESSIONS.items():
            for session in self._in(state)[: -limit or None]:
                del self._sessions[session.epoch]
        session = self._sessions[epoch] = WorkerSession(epoch, hello, now, self._timeouts)
        self._refresh()
        return session

    def _in(self, *states: SessionState) -> list[WorkerSession]:
        return [session for session in self._sessions.values() if session.state in states]

    def _of_process(self, hello: Hello | None, *states: SessionState) -> list[WorkerSession]:
        """Return the sessions in `states` of the process that has sent `hello`."""
        assert hello is not None
        return [s for s in self._in(*states) if s.hello is not None and s.hello.instance == hello.instance]


def _model(session: WorkerSession) -> str:
    return "" if session.hello is None else session.hello.model_fingerprint


def _is_stale(message: EpochMessage, state: SessionState) -> bool:
    if state is S.CUT_OFF:
        return not isinstance(message, StepResult | StepError | Goodbye)
    return state is not S.CONNECTING
