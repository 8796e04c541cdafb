"""The collector: results leave in the order of their launch, and what need not be waited for wakes no thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lineclear.wire.messages import Hello, Message, StepErrorKind, StepResult
from lineclear.worker.heartbeat import StepProgress
from lineclear.worker.result_collector import DeviceStuck, ResultCollector
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

    def __init__(self, step: int, *, is_complete: bool, error: Exception | None = None) -> None:
        self.is_complete = is_complete
        self.finished = threading.Event()
        self._step, self._error = step, error

    def result(self) -> StepResult:
        assert self.is_complete or self.finished.wait(PATIENCE_SECONDS)
        if self._error is not None:
            raise self._error
        return StepResult(7, self._step, ())


def collector(socket: Socket, bell: Waker) -> ResultCollector:
    anything: Any = socket
    made = ResultCollector(anything, StepProgress(), bell, max_inflight_steps=8, linger_seconds=PATIENCE_SECONDS)
    made.start_epoch(Hello(7, *[1] * 5, (), 1))
    made.wait_idle()
    return made


def test_a_flight_that_is_complete_is_sent_by_the_thread_that_launched_it() -> None:
    socket, bell = Socket(), Waker()
    tested = collector(socket, bell)
    tested.collect(1, Flight(1, is_complete=True))
    assert socket.sent[1:] == [StepResult(7, 1, ())]
    assert socket.threads[1] is threading.current_thread()
    assert tested.wait_idle() is None
    assert tested.close()
    bell.close()


def test_it_does_not_overtake_one_that_is_waited_for() -> None:
    socket, bell = Socket(), Waker()
    tested = collector(socket, bell)
    slow = Flight(1, is_complete=False)
    tested.collect(1, slow)
    tested.collect(2, Flight(2, is_complete=True))
    assert len(socket.sent) == 1
    slow.finished.set()
    assert tested.wait_idle() is None
    tested.collect(3, Flight(3, is_complete=True))
    assert socket.sent[1:] == [StepResult(7, step, ()) for step in (1, 2, 3)]
    assert tested.close()
    bell.close()


def test_a_failure_at_once_ends_the_epoch_as_a_later_one_does() -> None:
    socket, bell = Socket(), Waker()
    tested = collector(socket, bell)
    tested.collect(1, Flight(1, is_complete=True, error=StepFailed(StepErrorKind.PROTOCOL, "odd")))
    tested.collect(2, Flight(2, is_complete=True))
    assert tested.wait_idle() is StepErrorKind.PROTOCOL
    assert [type(message).__name__ for message in socket.sent] == ["Hello", "StepError"]
    assert tested.close()
    bell.close()


def test_a_flight_that_never_lands_is_given_up_when_the_worker_is_overdue() -> None:
    """Also where the queue behind it is full."""
    anything: Any = Socket()
    is_overdue = threading.Event()
    tested = ResultCollector(
        anything, StepProgress(), Waker(), max_inflight_steps=1, linger_seconds=0.1, is_overdue=is_overdue.is_set
    )
    tested.start_epoch(Hello(7, *[1] * 5, (), 1))
    flights = [Flight(step, is_complete=False) for step in (1, 2, 3)]
    try:
        tested.collect(1, flights[0])
        tested.collect(2, flights[1])
        is_overdue.set()
        with pytest.raises(DeviceStuck):
            tested.collect(3, flights[2])
        with pytest.raises(DeviceStuck):
            tested.wait_idle()
        assert not tested.close()
    finally:
        for flight in flights:
            flight.finished.set()
