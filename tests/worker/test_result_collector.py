"""The collector: results leave in the order of their launch, and what need not be waited for wakes no thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lineclear.wire.messages import Hello, Message, StepErrorKind, StepResult
from lineclear.worker.loop.heartbeat import StepProgress
from lineclear.worker.loop.result_collector import DeviceStuck, ResultCollector
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.loop.scheduler_link import Waker

PATIENCE_SECONDS = 20.0


class Socket:
    """Records the sent messages and their threads."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.threads: list[threading.Thread] = []

    def send(self, message: Message) -> bool:
        self.sent.append(message)
        self.threads.append(threading.current_thread())
        return True

    def close(self, linger_seconds: float = 0.0) -> None:
        pass


class StubStep:
    """A step that is complete at once, or when `finished` is set."""

    def __init__(self, step: int, *, is_complete: bool, error: Exception | None = None) -> None:
        self.is_complete = is_complete
        self.finished = threading.Event()
        self._step, self._error = step, error

    def result(self) -> StepResult:
        assert self.is_complete or self.finished.wait(PATIENCE_SECONDS)
        if self._error is not None:
            raise self._error
        return StepResult(7, self._step, ())


@pytest.fixture(name="socket")
def make_socket() -> Socket:
    return Socket()


@pytest.fixture(name="tested")
def make_collector(socket: Socket) -> Iterator[ResultCollector]:
    anything: Any = socket
    waker = Waker()
    made = ResultCollector(anything, StepProgress(), waker, max_inflight_steps=8, linger_seconds=PATIENCE_SECONDS)
    made.start_epoch(Hello(7, *[1] * 5, (), 1))
    made.wait_idle()
    yield made
    assert made.close()
    waker.close()


def test_complete_step_is_sent_by_the_launch_thread(socket: Socket, tested: ResultCollector) -> None:
    tested.collect(1, StubStep(1, is_complete=True))
    assert socket.sent[1:] == [StepResult(7, 1, ())]
    assert socket.threads[1] is threading.current_thread()
    assert tested.wait_idle() is None


def test_complete_step_waits_for_earlier_steps(socket: Socket, tested: ResultCollector) -> None:
    slow = StubStep(1, is_complete=False)
    tested.collect(1, slow)
    tested.collect(2, StubStep(2, is_complete=True))
    assert len(socket.sent) == 1
    slow.finished.set()
    assert tested.wait_idle() is None
    tested.collect(3, StubStep(3, is_complete=True))
    assert socket.sent[1:] == [StepResult(7, step, ()) for step in (1, 2, 3)]


def test_immediate_failure_ends_the_epoch(socket: Socket, tested: ResultCollector) -> None:
    tested.collect(1, StubStep(1, is_complete=True, error=StepFailed(StepErrorKind.PROTOCOL, "odd")))
    tested.collect(2, StubStep(2, is_complete=True))
    assert tested.wait_idle() is StepErrorKind.PROTOCOL
    assert [type(message).__name__ for message in socket.sent] == ["Hello", "StepError"]


def test_exception_behind_a_lack_of_memory_ends_the_process(socket: Socket, tested: ResultCollector) -> None:
    slow = StubStep(1, is_complete=False, error=StepFailed(StepErrorKind.OUT_OF_MEMORY, "full"))
    tested.collect(1, slow)
    tested.collect(2, StubStep(2, is_complete=True, error=RuntimeError("CUDA error: device-side assert triggered")))
    slow.finished.set()
    assert tested.wait_idle() is StepErrorKind.EXCEPTION
    assert [type(message).__name__ for message in socket.sent] == ["Hello", "StepError"]


def test_stuck_step_raises_once_overdue() -> None:
    """Also where the queue behind it is full."""
    anything: Any = Socket()
    is_overdue = threading.Event()
    tested = ResultCollector(
        anything, StepProgress(), Waker(), max_inflight_steps=1, linger_seconds=0.1, is_overdue=is_overdue.is_set
    )
    tested.start_epoch(Hello(7, *[1] * 5, (), 1))
    steps = [StubStep(step, is_complete=False) for step in (1, 2, 3)]
    try:
        tested.collect(1, steps[0])
        tested.collect(2, steps[1])
        is_overdue.set()
        with pytest.raises(DeviceStuck):
            tested.collect(3, steps[2])
        with pytest.raises(DeviceStuck):
            tested.wait_idle()
        assert not tested.close()
    finally:
        for step in steps:
            step.finished.set()
