"""The collector: results leave in the order of their launch, and what need not be waited for wakes no thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lineclear.wire.messages import Hello, Message, StepErrorKind, StepResult
from lineclear.worker.heartbeat import StepProgress
from lineclear.worker.result_collector import FlightsStuck, ResultCollector
from lineclear.worker.runner_interface import StepFailed
from lineclear.worker.scheduler_link import Waker

PATIENCE_SECONDS = 20.0


class Socket:
    """Writes down what is sent, and by which thread."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.threads: list[threading.Thread] = []

    def send(self, message: Message) -> bool:
        self.sent.append(message)
        self.threads.append(threading.current_thread())
        return True

    def close(self, linger_seconds: float = 0.0) -> None:
        pass


class Flight:
    """Over at once, or as soon as somebody says so."""

    def __init__(self, step: int, *, is_over: bool, error: Exception | None = None) -> None:
        self.is_over = is_over
        self.landed = threading.Event()
        self._step, self._error = step, error

    def result(self) -> StepResult:
        assert self.is_over or self.landed.wait(PATIENCE_SECONDS)
        if self._error is not None:
            raise self._error
        return StepResult(7, self._step, ())


def collector(socket: Socket, bell: Waker) -> ResultCollector:
    anything: Any = socket
    made = ResultCollector(anything, StepProgress(), bell, max_flights=8, farewell_seconds=PATIENCE_SECONDS)
    made.begin(Hello(7, *[1] * 5, (), 1))
    made.wait_idle()
    return made


def test_a_flight_that_is_over_is_sent_by_the_thread_that_launched_it() -> None:
    socket, bell = Socket(), Waker()
    tested = collector(socket, bell)
    tested.collect(1, Flight(1, is_over=True))
    assert socket.sent[1:] == [StepResult(7, 1, ())]
    assert socket.threads[1] is threading.current_thread()
    assert tested.wait_idle() is None
    assert tested.close()
    bell.close()


def test_it_does_not_overtake_one_that_is_waited_for() -> None:
    socket, bell = Socket(), Waker()
    tested = collector(socket, bell)
    slow = Flight(1, is_over=False)
    tested.collect(1, slow)
    tested.collect(2, Flight(2, is_over=True))
    assert len(socket.sent) == 1
    slow.landed.set()
    assert tested.wait_idle() is None
    tested.collect(3, Flight(3, is_over=True))
    assert socket.sent[1:] == [StepResult(7, step, ()) for step in (1, 2, 3)]
    assert tested.close()
    bell.close()


def test_a_failure_at_once_ends_the_epoch_as_a_later_one_does() -> None:
    socket, bell = Socket(), Waker()
    tested = collector(socket, bell)
    tested.collect(1, Flight(1, is_over=True, error=StepFailed(StepErrorKind.PROTOCOL, "odd")))
    tested.collect(2, Flight(2, is_over=True))
    assert tested.wait_idle() is StepErrorKind.PROTOCOL
    assert [type(message).__name__ for message in socket.sent] == ["Hello", "StepError"]
    assert tested.close()
    bell.close()


def test_a_flight_that_never_lands_is_given_up_when_the_worker_is_overdue() -> None:
    """Also where the queue behind it is full."""
    anything: Any = Socket()
    is_overdue = threading.Event()
    tested = ResultCollector(
        anything, StepProgress(), Waker(), max_flights=1, farewell_seconds=0.1, is_overdue=is_overdue.is_set
    )
    tested.begin(Hello(7, *[1] * 5, (), 1))
    flights = [Flight(step, is_over=False) for step in (1, 2, 3)]
    try:
        tested.collect(1, flights[0])
        tested.collect(2, flights[1])
        is_overdue.set()
        with pytest.raises(FlightsStuck):
            tested.collect(3, flights[2])
        with pytest.raises(FlightsStuck):
            tested.wait_idle()
        assert not tested.close()
    finally:
        for flight in flights:
            flight.landed.set()
