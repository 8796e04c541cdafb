"""When a worker has been waited for long enough: seconds that a reader can add up."""

from __future__ import annotations

import math
import signal

import pytest

from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.engine.worker_link import CLOSED
from lineclear.scheduler.engine.worker_monitor import TimedOut, WorkerMonitor, WorkerTimeouts, loss_by_exit
from lineclear.wire.messages import Row, StepPlan, StepResult

PATIENCE = WorkerTimeouts(step_timeout_seconds=10.0, cold_step_timeout_seconds=60.0, heartbeat_timeout_seconds=5.0)
WARM = 9
"""The first step that compiles nothing any more."""


def plan(step: int, num_tokens: int = 4) -> StepPlan:
    return StepPlan(3, step, chunks=(Row(0, 0, num_tokens, True),))


def result(step: int) -> StepResult:
    return StepResult(3, step, (5,), step_seconds=0.25)


@pytest.fixture
def vigil() -> WorkerMonitor:
    """Over a worker that joined; a step is predicted to take a tenth of a second a token."""
    vigil = WorkerMonitor(PATIENCE, lambda num_tokens: 0.1 * num_tokens)
    vigil.begin(now=90.0)
    return vigil


def test_silence_lasts_as_long_as_it_may(vigil: WorkerMonitor) -> None:
    assert vigil.check_timeouts(last_heard=100.0, now=104.9) is None
    assert vigil.next_check(last_heard=100.0, now=104.9) == 105.0
    assert vigil.check_timeouts(last_heard=100.0, now=105.0) == TimedOut(
        "it was silent for 5.0 s", WorkerLoss.KILLED, kill=True
    )


def test_a_step_lasts_as_long_as_it_may(vigil: WorkerMonitor) -> None:
    vigil.plan_sent(plan(WARM), now=100.0)
    assert vigil.check_timeouts(last_heard=109.0, now=109.9) is None
    assert vigil.next_check(last_heard=109.0, now=109.9) == 110.0
    late = TimedOut(f"step {WARM} is not done after 10.0 s", WorkerLoss.CRASHED, kill=True)
    assert vigil.check_timeouts(last_heard=110.0, now=110.0) == late


def test_the_first_steps_may_compile(vigil: WorkerMonitor) -> None:
    vigil.plan_sent(plan(WARM - 1), now=100.0)
    assert vigil.next_check(last_heard=159.0, now=100.0) == 160.0


def test_a_step_predicted_to_be_long_has_twenty_times_that(vigil: WorkerMonitor) -> None:
    vigil.plan_sent(plan(WARM, num_tokens=8), now=100.0)
    assert vigil.next_check(last_heard=115.0, now=100.0) == 100.0 + 20 * 0.8


def test_a_step_begins_when_the_one_before_it_is_done(vigil: WorkerMonitor) -> None:
    vigil.plan_sent(plan(WARM), now=100.0)
    vigil.plan_sent(plan(WARM + 1), now=100.5)
    time, is_slow = vigil.result_received(result(WARM), now=109.0)
    assert (time.step, time.num_rows, time.num_tokens) == (WARM, 1, 4)
    assert (time.step_seconds, time.total_seconds) == (0.25, 9.0)
    assert is_slow, "nine seconds, and 0.4 were predicted"
    assert vigil.check_timeouts(last_heard=118.0, now=118.0) is None
    assert vigil.next_check(last_heard=118.0, now=118.0) == 119.0
    assert not vigil.is_idle
    time, is_slow = vigil.result_received(result(WARM + 1), now=110.0)
    assert time.total_seconds == 9.5
    assert not is_slow, "it had the device for one second"
    assert vigil.is_idle


def test_an_exit_code_is_waited_for_when_the_connection_closes(vigil: WorkerMonitor) -> None:
    vigil.connection_closed(now=100.0)
    assert vigil.is_closed
    assert vigil.check_timeouts(last_heard=100.0, now=100.05) is None
    assert vigil.next_check(last_heard=100.0, now=100.05) == 100.1
    assert vigil.check_timeouts(last_heard=100.0, now=100.1) == TimedOut(CLOSED, WorkerLoss.KILLED, kill=False)


def test_time_that_was_not_the_workers_is_not_counted(vigil: WorkerMonitor) -> None:
    vigil.plan_sent(plan(WARM), now=100.0)
    vigil.extend_deadlines(now=3700.0)
    assert vigil.check_timeouts(last_heard=3700.0, now=3700.0) is None
    assert vigil.next_check(last_heard=3708.0, now=3700.0) == 3710.0


def test_the_next_worker_owes_nothing(vigil: WorkerMonitor) -> None:
    vigil.plan_sent(plan(WARM), now=100.0)
    vigil.connection_closed(now=100.0)
    vigil.end(hung=None)
    vigil.begin(now=100.0)
    assert vigil.is_idle
    assert not vigil.is_closed
    assert vigil.check_timeouts(last_heard=200.0, now=200.0) is None


def test_who_has_to_be_killed_is_hung_until_its_connection_is_gone(vigil: WorkerMonitor) -> None:
    vigil.end(hung=3)
    vigil.check_hung(lambda epoch: epoch == 3)
    assert vigil.hung_epoch == 3
    assert vigil.next_check(last_heard=0.0, now=100.0) == 100.5
    vigil.check_hung(lambda epoch: False)
    assert vigil.hung_epoch is None
    assert vigil.next_check(last_heard=0.0, now=100.0) == math.inf


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
def test_an_exit_code_tells_a_kill_from_a_failure(exit_code: int | None, loss: WorkerLoss) -> None:
    assert loss_by_exit(exit_code) is loss


def test_a_confirmed_token_is_progress_once(vigil: WorkerMonitor) -> None:
    vigil.plan_sent(plan(1), now=91.0)
    assert not vigil.take_progress(now=91.5)
    vigil.result_received(result(1), now=92.0)
    assert vigil.take_progress(now=92.0)
    assert not vigil.take_progress(now=92.0)


def test_a_step_that_confirms_no_token_is_no_progress(vigil: WorkerMonitor) -> None:
    for step in range(1, 100):
        vigil.plan_sent(plan(step), now=90.0 + step)
        vigil.result_received(StepResult(3, step, ()), now=90.5 + step)
        assert not vigil.take_progress(now=90.6 + step)


def test_being_idle_for_ten_seconds_is_progress_and_a_hanging_step_is_not(vigil: WorkerMonitor) -> None:
    assert not vigil.take_progress(now=99.9)
    vigil.plan_sent(plan(1), now=99.9)
    assert not vigil.take_progress(now=1000.0)
    vigil.result_received(StepResult(3, 1, ()), now=1000.0)
    assert not vigil.take_progress(now=1009.9)
    assert vigil.take_progress(now=1010.0)


def test_the_next_worker_has_to_make_its_own_progress(vigil: WorkerMonitor) -> None:
    vigil.plan_sent(plan(1), now=91.0)
    vigil.result_received(result(1), now=92.0)
    assert vigil.take_progress(now=92.0)
    vigil.end(hung=None)
    vigil.begin(now=93.0)
    assert not vigil.take_progress(now=94.0)
