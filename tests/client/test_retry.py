"""Retries: which errors are retried, and pauses computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from client.conftest import Clock

from lineclear import errors
from lineclear.client import Client
from lineclear.client.call_settings import ClientConfig, submit_request
from lineclear.client.retry import MAX_TIMEOUT_SECONDS, ResumeState, RetryPolicy, RetryState, may_retry
from lineclear.client.testing import FakeTransport


def attempts(timeout_seconds: float | None = None, *, dice: float = 0.5, clock: Clock | None = None) -> RetryState:
    policy = RetryPolicy(max_attempts=4, first_pause_seconds=1.0, max_pause_seconds=3.0)
    return RetryState(policy, timeout_seconds, clock or Clock(), lambda: dice)


def waits_through(patience: Any, clock: Clock, error: errors.LineclearError, seconds: float) -> None:
    """Advance the clock while every call ends with `error`."""
    until = clock.now + seconds
    while clock.now < until:
        clock.now += patience.pause_after(error)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (errors.Unreachable("x"), True),
        (errors.ConnectionLost("x"), True),
        (errors.ServerStarting("x", retry_after_seconds=1.0), True),
        (errors.ServerDraining("x", retry_after_seconds=0.0), True),
        (errors.QueueFull("x", retry_after_seconds=1.0), True),
        (errors.QueueFull("x"), False),
        (errors.WorkerUnavailable("x"), False),
    ],
)
def test_which_errors_are_retried(error: errors.LineclearError, again: bool) -> None:
    assert may_retry(error) is again


def test_other_codes_are_never_retried() -> None:
    for kind in errors.tree():
        assert may_retry(kind("x", retry_after_seconds=math.inf)) is False
        if kind.code not in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
            assert not may_retry(kind("x", retry_after_seconds=1.0)), kind


def test_pauses_double_up_to_the_maximum() -> None:
    calls, error = attempts(), errors.Unreachable("x")
    assert [calls.pause_after(error) for _ in range(3)] == [0.75, 1.5, 2.25]  # of 1, 2 and min(4, 3): 3/4 of each
    assert [attempts(dice=dice).pause_after(error) for dice in (0.0, 1.0)] == [0.5, 1.0], "in the upper half"
    with pytest.raises(errors.Unreachable) as caught:
        calls.pause_after(error)
    assert caught.value is error


@pytest.mark.parametrize(
    ("error", "most_seconds"),
    [
        (errors.ConnectionLost("x"), 60.0),
        (errors.ServerDraining("x", retry_after_seconds=0.1), 60.0),
        (errors.ServerStarting("x", retry_after_seconds=0.1), 600.0),
    ],
)
def test_unavailable_server_is_bounded_by_time_not_attempts(error: errors.LineclearError, most_seconds: float) -> None:
    clock = Clock()
    calls = attempts(clock=clock)
    waits_through(calls, clock, error, most_seconds)
    clock.now += 0.1
    with pytest.raises(type(error)):
        calls.pause_after(error)


STARTING = errors.ServerStarting("x", retry_after_seconds=1.0)


def cut_off(policy: RetryPolicy, clock: Clock) -> ResumeState:
    return ResumeState(RetryState(policy, None, clock, lambda: 0.5))


@pytest.mark.parametrize("make", [lambda policy, clock: RetryState(policy, None, clock), cut_off])
def test_starting_server_has_its_own_timeout(make: Callable[[RetryPolicy, Clock], Any]) -> None:
    """A restart that loads a large model takes minutes, of which it is away for the first few seconds."""
    clock = Clock()
    patience = make(RetryPolicy(), clock)
    waits_through(patience, clock, errors.ConnectionLost("x"), 50.0)
    waits_through(patience, clock, STARTING, 300.0)
    waits_through(patience, clock, errors.ConnectionLost("x"), 50.0)
    waits_through(patience, clock, STARTING, 200.0)
    with pytest.raises(errors.ServerStarting):  # it has been at it for start_timeout_seconds, whatever came between
        waits_through(patience, clock, STARTING, 100.0)


def test_submit_waits_thirty_seconds_for_a_starting_server() -> None:
    """An answer waits as long as its deadline; a call that generates nothing, such as Submit, has one of its own."""
    transport = FakeTransport("x")
    with Client(transport=transport) as client:
        client.submit("x")
    left = transport.calls[0].timeout_seconds
    assert left is not None
    assert 29.0 < left <= 30.0
    clock = Clock()
    calls = RetryState(RetryPolicy(), 30.0, clock, lambda: 0.5)
    waits_through(calls, clock, STARTING, 25.0)
    with pytest.raises(errors.ServerStarting):
        waits_through(calls, clock, STARTING, 7.0)


def test_starting_server_counts_as_no_resume() -> None:
    clock = Clock()
    patience = cut_off(RetryPolicy(max_resumes=1), clock)
    patience.pause_after(errors.ConnectionLost("x"))
    waits_through(patience, clock, STARTING, 100.0)
    assert patience.count == 1
    with pytest.raises(errors.ConnectionLost):
        patience.pause_after(errors.ConnectionLost("x"))


def test_timeout_restarts_after_the_server_was_back() -> None:
    clock = Clock()
    calls = attempts(clock=clock)
    calls.pause_after(errors.ConnectionLost("x"))
    clock.now += 50.0
    calls.pause_after(errors.QueueFull("x", retry_after_seconds=0.1))
    clock.now += 50.0
    calls.pause_after(errors.ConnectionLost("x"))
    clock.now += 50.0
    calls.pause_after(errors.ConnectionLost("x"))


def test_unavailable_server_uses_up_no_attempts() -> None:
    calls = attempts()
    for _ in range(20):
        calls.pause_after(errors.ConnectionLost("x"))
    for _ in range(3):
        calls.pause_after(errors.QueueFull("x", retry_after_seconds=0.1))
    with pytest.raises(errors.QueueFull):
        calls.pause_after(errors.QueueFull("x", retry_after_seconds=0.1))


def test_duplicate_after_lost_connection_is_retried() -> None:
    policy, taken = RetryPolicy(), errors.DuplicateRequest("x")
    for calls in (RetryState(policy, None), RetryState(policy, None, meets_own_request=True)):
        with pytest.raises(errors.DuplicateRequest):
            calls.pause_after(taken)
    lost = RetryState(policy, None, meets_own_request=True)
    lost.pause_after(errors.ConnectionLost("x"))
    for _ in range(10):
        lost.pause_after(taken)
    elsewhere = RetryState(policy, None)
    elsewhere.pause_after(errors.ConnectionLost("x"))
    with pytest.raises(errors.DuplicateRequest):
        elsewhere.pause_after(taken)


def test_requested_pause_gets_jitter() -> None:
    assert attempts().pause_after(errors.QueueFull("x", retry_after_seconds=10.0)) == 10.25
    assert attempts().pause_after(errors.QueueFull("x", retry_after_seconds=0.1)) == 0.75


def test_one_attempt_disables_retries() -> None:
    for error in (errors.Unreachable(""), errors.ConnectionLost(""), errors.ServerStarting("", retry_after_seconds=1)):
        with pytest.raises(type(error)):
            RetryState(RetryPolicy(max_attempts=1), None).pause_after(error)
    with pytest.raises(ValueError, match="at least 1"):
        RetryPolicy(max_attempts=0)


def test_deadline_bounds_all_attempts() -> None:
    clock = Clock()
    calls = attempts(5.0, clock=clock)
    assert calls.begin() == 5.0
    clock.now += 2.0
    assert calls.begin() == 3.0
    with pytest.raises(errors.QueueFull):  # waiting for it would miss the deadline: the cause is raised at once
        calls.pause_after(errors.QueueFull("x", retry_after_seconds=2.9))
    clock.now += 3.0
    with pytest.raises(errors.DeadlineExceeded):
        calls.begin()
    assert attempts().begin() is None


@pytest.mark.parametrize("timeout_seconds", [1e9, 1e15, 1e300, math.inf])
def test_timeout_is_at_most_a_year(timeout_seconds: float) -> None:
    assert attempts(timeout_seconds).begin() == MAX_TIMEOUT_SECONDS
    prompt = ClientConfig(timeout_seconds, RetryPolicy(), (), None).outgoing([1, 2])
    assert submit_request(prompt).timeout.ToSeconds() == MAX_TIMEOUT_SECONDS
