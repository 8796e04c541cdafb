"""A worker's life without sockets, with timeouts in seconds that a reader can add up."""

from __future__ import annotations

import math
import signal

import pytest

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.engine.worker_process import loss_by_exit
from lineclear.scheduler.engine.worker_session import (
    CLOSED,
    IllegalTransition,
    Lost,
    Output,
    Send,
    SessionEvent,
    SessionState,
    WorkerSession,
    WorkerTimeouts,
)
from lineclear.wire.messages import (
    Goodbye,
    Heartbeat,
    Hello,
    Rejoin,
    StepError,
    StepErrorKind,
    StepResult,
)

TIMEOUTS = WorkerTimeouts(step_timeout_seconds=10.0, cold_step_timeout_seconds=60.0, heartbeat_timeout_seconds=5.0)
WARM = 9
"""The first step that compiles nothing."""
PREDICTED = 0.4
"""Seconds of a step."""
HELLO = Hello(3, 8, 4, 2, 32, 97, (0,), 64, pid=7, instance=1)
HEARTBEAT = Heartbeat(3, 0)
S, E = SessionState, SessionEvent

PATHS: dict[SessionState, list[SessionEvent]] = {
    S.CONNECTING: [],
    S.WAITING: [E.REFUSED],
    S.JOINED: [E.ACCEPTED],
    S.CUT_OFF: [E.ACCEPTED, E.DISCONNECTED],
    S.UNHEALTHY: [E.ACCEPTED, E.FAILED],
    S.CONDEMNED: [E.ACCEPTED, E.FAILED, E.CONDEMNED],
    S.ENDED: [E.ACCEPTED, E.EPOCH_ENDED],
    S.GONE: [E.REJECTED],
}
"""How a session comes into each state."""
LEGAL = {
    S.CONNECTING: "ACCEPTED:JOINED REFUSED:WAITING REJECTED:GONE REPLACED:ENDED DISCONNECTED:CONNECTING "
    "TIMED_OUT:ENDED PROCESS_EXITED:GONE",
    S.WAITING: "REJECTED:GONE REPLACED:ENDED PLACE_FREED:ENDED PROCESS_EXITED:GONE",
    S.JOINED: "EPOCH_ENDED:ENDED RETIRED:ENDED FAILED:UNHEALTHY DISCONNECTED:CUT_OFF PROCESS_EXITED:GONE",
    S.CUT_OFF: "SUPERSEDED:ENDED EPOCH_ENDED:ENDED FAILED:UNHEALTHY TIMED_OUT:ENDED PROCESS_EXITED:GONE",
    S.UNHEALTHY: "SUPERSEDED:ENDED DISCONNECTED:ENDED CONDEMNED:CONDEMNED SPARED:UNHEALTHY PROCESS_EXITED:GONE",
    S.CONDEMNED: "SUPERSEDED:GONE DISCONNECTED:GONE PROCESS_EXITED:GONE",
    S.ENDED: "PROCESS_EXITED:GONE",
    S.GONE: "PROCESS_EXITED:GONE",
}
"""The table once more, written by hand: an event that is not named is illegal in that state."""


def new_session() -> WorkerSession:
    """Said Hello at 90."""
    return WorkerSession(3, HELLO, 90.0, TIMEOUTS)


def session_in(state: SessionState) -> WorkerSession:
    session = new_session()
    for event in PATHS[state]:
        session.handle(event, 90.0)
    assert session.state is state
    return session


@pytest.fixture
def session() -> WorkerSession:
    """Joined at 90."""
    return session_in(S.JOINED)


def result(step: int) -> StepResult:
    return StepResult(3, step, (5,), step_seconds=0.25)


def lost(reason: str, loss: WorkerLoss, *, must_kill: bool = False, was_stopping: bool = False) -> Lost:
    return Lost(HELLO, reason, loss, must_kill, was_stopping)


@pytest.mark.parametrize("state", S)
def test_each_event_changes_the_state_or_is_refused(state: SessionState) -> None:
    legal = dict(entry.split(":") for entry in LEGAL[state].split())
    for event in E:
        session = session_in(state)
        if event.name in legal:
            session.handle(event, 100.0)
        else:
            with pytest.raises(IllegalTransition, match=f"{event.name} in state {state.name}"):
                session.handle(event, 100.0)
        assert session.state.name == legal.get(event.name, state.name), event


@pytest.mark.parametrize("state", [S.JOINED, S.CUT_OFF])
@pytest.mark.parametrize(
    ("message", "reason", "loss", "must_kill"),
    [
        (StepError(3, 1, StepErrorKind.OUT_OF_MEMORY), "a step failed: out_of_memory", WorkerLoss.CLEAN, False),
        (StepError(3, 1, StepErrorKind.EXCEPTION), "a step failed: exception", WorkerLoss.CRASHED, True),
        (StepError(3, 1, StepErrorKind.PROTOCOL), "a step failed: protocol", WorkerLoss.CLEAN, True),
        (Goodbye(3, "done"), "it left: done", WorkerLoss.CLEAN, False),
    ],
)
def test_last_message_is_the_reason(
    state: SessionState, message: StepError | Goodbye, reason: str, loss: WorkerLoss, must_kill: bool
) -> None:
    wanted: list[Output] = [lost(reason, loss, must_kill=must_kill)]
    if isinstance(message, StepError):
        wanted.insert(0, message)
    if not must_kill:
        wanted.append(Send(Rejoin(3)))
    assert session_in(state).receive(message, 91.0) == wanted


def test_results_count_while_serving() -> None:
    for state in S:
        passed_on = session_in(state).receive(result(1), 91.0) == [result(1)]
        assert passed_on == (state in (S.JOINED, S.CUT_OFF)), state


def test_stale_message_is_answered_by_state() -> None:
    answers = {state: session_in(state).receive(HEARTBEAT, 91.0) for state in S}
    goodbye = Send(Goodbye(3, "this process is being killed, or taken for dead; it cannot join again"))
    assert answers == {
        S.CONNECTING: [],
        S.WAITING: [Send(Rejoin(3))],
        S.JOINED: [],
        S.CUT_OFF: [],
        S.UNHEALTHY: [Send(Rejoin(3))],
        S.CONDEMNED: [goodbye],
        S.ENDED: [Send(Rejoin(3))],
        S.GONE: [goodbye],
    }


@pytest.mark.parametrize(
    ("exit_code", "loss"),
    [
        (None, WorkerLoss.KILLED),
        (0, WorkerLoss.KILLED),
        (-signal.SIGKILL, WorkerLoss.KILLED),
        (-signal.SIGTERM, WorkerLoss.KILLED),
        (-signal.SIGSEGV, WorkerLoss.CRASHED),
        (70, WorkerLoss.CRASHED),
    ],
)
def test_exit_code_separates_kill_from_crash(exit_code: int | None, loss: WorkerLoss) -> None:
    assert loss_by_exit(exit_code) is loss


def test_silence(session: WorkerSession) -> None:
    session.receive(HEARTBEAT, 100.0)
    assert session.check(104.9) == []
    assert session.next_check() == 105.0
    assert session.check(105.0) == [lost("it was silent for 5.0 s", WorkerLoss.KILLED, must_kill=True)]
    assert session.next_check() == math.inf


@pytest.mark.parametrize(
    ("step", "predicted", "seconds"),
    [(WARM, 0.4, 10.0), (WARM - 1, 0.4, 60.0), (WARM, 0.8, 20 * 0.8)],
    ids=["usual", "may compile", "twenty times its prediction"],
)
def test_step_timeout(session: WorkerSession, step: int, predicted: float, seconds: float) -> None:
    session.timer.plan_sent(step, predicted, now=100.0)
    session.receive(HEARTBEAT, 99.9 + seconds)
    assert session.check(99.9 + seconds) == []
    assert session.next_check() == 100.0 + seconds
    late = lost(f"step {step} is not done after {seconds} s", WorkerLoss.CRASHED, must_kill=True)
    assert session.check(100.0 + seconds) == [late]


def test_step_starts_when_the_one_before_is_done(session: WorkerSession) -> None:
    session.timer.plan_sent(WARM, PREDICTED, now=100.0)
    session.timer.plan_sent(WARM + 1, PREDICTED, now=100.5)
    assert session.result_applied(result(WARM), now=109.0), "nine seconds, and 0.4 were predicted"
    session.receive(HEARTBEAT, 118.0)
    assert session.check(118.0) == []
    assert session.next_check() == 119.0
    assert session.timer.inflight
    assert not session.result_applied(result(WARM + 1), now=110.0), "it had the device for one second"
    assert not session.timer.inflight


def test_cut_off_waits_for_last_messages(session: WorkerSession) -> None:
    session.timer.plan_sent(WARM, PREDICTED, now=94.0)
    assert session.handle(E.DISCONNECTED, 100.0) == []
    assert session.check(100.05) == []
    assert session.next_check() == 100.1
    assert session.check(100.1) == [lost(CLOSED, WorkerLoss.KILLED), Send(Rejoin(3))]


def test_connect_timeout() -> None:
    session = new_session()
    assert session.next_check() == 95.0
    assert session.check(94.9) == []
    assert session.state is S.CONNECTING
    assert session.check(95.0) == []
    assert session.state is S.ENDED


def test_suspended_scheduler_extends_deadlines(session: WorkerSession) -> None:
    session.timer.plan_sent(WARM, PREDICTED, now=100.0)
    session.extend_deadlines(now=3700.0)
    assert session.check(3700.0) == []
    session.receive(HEARTBEAT, 3708.0)
    assert session.next_check() == 3710.0


def test_confirmed_token_is_progress_once(session: WorkerSession) -> None:
    session.timer.plan_sent(1, PREDICTED, now=91.0)
    assert not session.take_progress(now=91.5)
    session.result_applied(result(1), now=92.0)
    assert session.take_progress(now=92.0)
    assert not session.take_progress(now=92.0)


def test_step_without_token_is_no_progress(session: WorkerSession) -> None:
    for step in range(1, 100):
        session.timer.plan_sent(step, PREDICTED, now=90.0 + step)
        session.result_applied(StepResult(3, step, ()), now=90.5 + step)
        assert not session.take_progress(now=90.6 + step)


def test_ten_idle_seconds_are_progress_and_a_hanging_step_is_not(session: WorkerSession) -> None:
    assert not session.take_progress(now=99.9)
    session.timer.plan_sent(1, PREDICTED, now=99.9)
    assert not session.take_progress(now=1000.0)
    session.result_applied(StepResult(3, 1, ()), now=1000.0)
    assert not session.take_progress(now=1009.9)
    assert session.take_progress(now=1010.0)
