"""When a call is tried again: a table of errors, and pauses computed by hand."""

from __future__ import annotations

import pytest

from lineclear.client.retries import Attempts, RetryPolicy, may_retry
from lineclear.errors import (
    DeadlineExceeded,
    DeviceOutOfMemory,
    Draining,
    InternalError,
    LineclearError,
    QueueFull,
    Starting,
    Unreachable,
    WorkerUnavailable,
    tree,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def attempts(timeout_seconds: float | None = None, *, dice: float = 0.5, clock: Clock | None = None) -> Attempts:
    policy = RetryPolicy(max_attempts=4, first_pause_seconds=1.0, max_pause_seconds=3.0)
    return Attempts(policy, timeout_seconds, clock or Clock(), lambda: dice)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Unreachable("x"), True),
        (Starting("x", retry_after_seconds=1.0), True),
        (Draining("x", retry_after_seconds=0.0), True),
        (QueueFull("x", retry_after_seconds=1.0), True),
        (QueueFull("x"), False),
        (WorkerUnavailable("x"), False),
        (DeviceOutOfMemory("x"), False),
        (InternalError("x", retry_after_seconds=1.0), False),
    ],
)
def test_nobody_answered_or_the_server_said_when(error: LineclearError, again: bool) -> None:
    assert may_retry(error) is again


def test_no_error_of_another_code_is_ever_retried() -> None:
    for kind in tree():
        if kind.code not in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
            assert not may_retry(kind("x", retry_after_seconds=1.0)), kind


def test_pauses_double_up_to_their_limit_and_attempts_are_counted() -> None:
    calls, error = attempts(), Unreachable("x")
    assert [calls.pause_after(error) for _ in range(3)] == [0.75, 1.5, 2.25]  # of 1, 2 and min(4, 3): 3/4 of each
    with pytest.raises(Unreachable) as caught:
        calls.pause_after(error)
    assert caught.value is error


@pytest.mark.parametrize(("dice", "pause"), [(0.0, 0.5), (1.0, 1.0)])
def test_a_pause_is_drawn_from_the_upper_half(dice: float, pause: float) -> None:
    assert attempts(dice=dice).pause_after(Unreachable("x")) == pause


def test_a_server_that_asks_for_longer_gets_it_and_some_jitter() -> None:
    assert attempts().pause_after(QueueFull("x", retry_after_seconds=10.0)) == 10.25
    assert attempts().pause_after(QueueFull("x", retry_after_seconds=0.1)) == 0.75


def test_one_attempt_is_no_retry() -> None:
    with pytest.raises(Unreachable):
        Attempts(RetryPolicy(max_attempts=1), None).pause_after(Unreachable("x"))
    with pytest.raises(ValueError, match="at least 1"):
        RetryPolicy(max_attempts=0)


def test_the_deadline_bounds_all_attempts_together() -> None:
    clock = Clock()
    calls = attempts(5.0, clock=clock)
    assert calls.begin() == 5.0
    clock.now += 2.0
    assert calls.begin() == 3.0
    with pytest.raises(QueueFull):  # waiting for it would miss the deadline: the cause is raised at once
        calls.pause_after(QueueFull("x", retry_after_seconds=2.9))
    clock.now += 3.0
    with pytest.raises(DeadlineExceeded):
        calls.begin()


def test_without_a_deadline_there_is_none() -> None:
    assert attempts().begin() is None
