"""A log level that an operator sets reaches the worker that is there, and every one that comes after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.engine_harness import EngineHarness, eventually, request
from support.worker_peer import Peer, hello, peers

from lineclear.wire.messages import Heartbeat, LogLevel, SetLogLevel, StepPlan


@pytest.fixture
def harness() -> Iterator[EngineHarness]:
    with EngineHarness() as harness:
        yield harness


@pytest.fixture
def peer(harness: EngineHarness) -> Iterator[Callable[[int], Peer]]:
    with peers(harness.directory) as peer:
        yield peer


def joined(harness: EngineHarness, peer: Callable[[int], Peer], epoch: int) -> Peer:
    new = peer(epoch)
    new.send(hello(epoch))
    return new


def test_log_level_is_sent_to_the_joined_worker(harness: EngineHarness, peer: Callable[[int], Peer]) -> None:
    worker = joined(harness, peer, 7)
    harness.wait_joined()
    for level in LogLevel:
        harness.engine.set_log_level(level.name.lower())
        assert worker.receive() == SetLogLevel(7, level)


def test_log_level_is_sent_first_to_a_later_worker(harness: EngineHarness, peer: Callable[[int], Peer]) -> None:
    harness.engine.set_log_level("error")
    harness.engine.set_log_level("debug")
    for epoch in (7, 9):
        worker = joined(harness, peer, epoch)
        harness.submit(request(epoch, prompt_len=4, max_tokens=4))
        assert worker.receive() == SetLogLevel(epoch, LogLevel.DEBUG)
        assert isinstance(worker.receive(), StepPlan)
        worker.close()
        harness.wait(lambda epoch=epoch: [lost for _, lost in harness.losses][-1:] == [epoch])


def test_no_log_level_is_sent_by_default(harness: EngineHarness, peer: Callable[[int], Peer]) -> None:
    worker = joined(harness, peer, 7)
    harness.submit(request(1, prompt_len=4, max_tokens=4))
    assert isinstance(worker.receive(), StepPlan)


def test_unsent_log_level_is_sent_again(harness: EngineHarness, peer: Callable[[int], Peer]) -> None:
    worker = joined(harness, peer, 7)
    harness.wait_joined()
    tell, refused = harness.link.send_control, list[SetLogLevel]()

    def no_room(order: SetLogLevel) -> bool:
        refused.append(order)
        harness.link.send_control = tell  # type: ignore[method-assign]
        return False

    harness.link.send_control = no_room  # type: ignore[method-assign]
    harness.engine.set_log_level("warning")
    eventually(lambda: bool(refused))
    worker.send(Heartbeat(7, 0))  # what any worker says all the time: the engine turns, and tries again
    assert worker.receive_kind(SetLogLevel) == SetLogLevel(7, LogLevel.WARNING)
    assert refused == [SetLogLevel(7, LogLevel.WARNING)]
