"""A log level that an operator sets reaches the worker that is there, and every one that comes after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.engine_harness import World, eventually, request
from support.worker_peer import Peer, hello, peers

from lineclear.wire.messages import Heartbeat, LogLevel, SetLogLevel, StepPlan


@pytest.fixture
def world() -> Iterator[World]:
    with World() as world:
        yield world


@pytest.fixture
def peer(world: World) -> Iterator[Callable[[int], Peer]]:
    with peers(world.directory) as peer:
        yield peer


def joined(world: World, peer: Callable[[int], Peer], epoch: int) -> Peer:
    new = peer(epoch)
    new.say(hello(epoch))
    return new


def test_log_level_is_sent_to_the_joined_worker(world: World, peer: Callable[[int], Peer]) -> None:
    worker = joined(world, peer, 7)
    world.wait_joined()
    for level in LogLevel:
        world.engine.set_log_level(level.name.lower())
        assert worker.hear() == SetLogLevel(7, level)


def test_log_level_is_sent_first_to_a_later_worker(world: World, peer: Callable[[int], Peer]) -> None:
    world.engine.set_log_level("error")
    world.engine.set_log_level("debug")
    for epoch in (7, 9):
        worker = joined(world, peer, epoch)
        world.submit(request(epoch, prompt_len=4, max_tokens=4))
        assert worker.hear() == SetLogLevel(epoch, LogLevel.DEBUG)
        assert isinstance(worker.hear(), StepPlan)
        worker.leave()
        world.wait(lambda epoch=epoch: [lost for _, lost in world.losses][-1:] == [epoch])


def test_no_log_level_is_sent_by_default(world: World, peer: Callable[[int], Peer]) -> None:
    worker = joined(world, peer, 7)
    world.submit(request(1, prompt_len=4, max_tokens=4))
    assert isinstance(worker.hear(), StepPlan)


def test_unsent_log_level_is_sent_again(world: World, peer: Callable[[int], Peer]) -> None:
    worker = joined(world, peer, 7)
    world.wait_joined()
    tell, refused = world.link.send_control, list[SetLogLevel]()

    def no_room(order: SetLogLevel) -> bool:
        refused.append(order)
        world.link.send_control = tell  # type: ignore[method-assign]
        return False

    world.link.send_control = no_room  # type: ignore[method-assign]
    world.engine.set_log_level("warning")
    eventually(lambda: bool(refused))
    worker.say(Heartbeat(7, 0))  # what any worker says all the time: the engine turns, and tries again
    assert worker.hear_a(SetLogLevel) == SetLogLevel(7, LogLevel.WARNING)
    assert refused == [SetLogLevel(7, LogLevel.WARNING)]
