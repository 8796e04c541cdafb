"""A process that is dead or being killed joins no more, however late its last Hello; whoever only stood still may."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from support.engine_harness import World, eventually, request, supervised
from support.toy_worker import ToyOptions
from support.worker_peer import Peer, hello, peers

from lineclear.scheduler.engine.worker_supervisor import WorkerSupervisor
from lineclear.wire.messages import Goodbye, Rejoin, StepError, StepErrorKind, StepPlan, StepResult


class Scene:
    """An engine with requests, and a worker (epoch 7, instance 1) that has joined and got its first plan."""

    def __init__(self, world: World, peer: Callable[[int], Peer]) -> None:
        self.world, self.peer = world, peer
        # Before a worker joins, so that its first step has a row of each of them.
        self.streams = [world.submit(request(i, prompt_len=4, max_tokens=4)) for i in range(3)]
        self.first = peer(7)
        self.first.say(hello(7, instance=1))
        world.wait_joined()
        self.first.hear_a(StepPlan)

    def connected(self, epoch: int) -> Peer:
        """A peer that a plan can reach."""
        peer, answers = self.peer(epoch), list[bool]()

        def is_reachable() -> bool:  # asked on the thread that owns the link
            self.world.engine.call_on_engine_thread(lambda: answers.append(self.world.link.is_reachable(epoch)))
            return any(answers)

        eventually(is_reachable)
        return peer

    def impossible_result(self) -> None:
        """The worker says what condemns it."""
        self.first.say(StepResult(7, 1, (1,) * 9))
        self.world.wait(lambda: len(self.world.losses) == 1)

    def refused(self, epoch: int, instance: int) -> Peer:
        """Say Hello, and be told that this is of no use."""
        peer = self.connected(epoch)
        peer.say(hello(epoch, instance=instance))
        assert "join" in peer.hear_a(Goodbye).reason
        assert [joined for _, joined in self.world.joins] == [7]
        return peer

    def successor_answers(self) -> None:
        """Another process joins, and nothing is lost any more."""
        self.world.start_worker()
        self.world.wait_ended(self.streams)
        for stream in self.streams:
            stream.check(self.world.options.vocab_size)
        assert (len(self.world.joins), len(self.world.losses)) == (2, 1)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with World() as world, peers(world.directory) as peer:
        yield Scene(world, peer)


def test_condemned_process_may_not_join_again(scene: Scene) -> None:
    scene.world.is_killing = True
    scene.impossible_result()
    assert "being killed" in scene.first.hear_a(Goodbye).reason
    scene.refused(9, instance=1)
    scene.refused(11, instance=1)
    scene.successor_answers()


def test_hello_right_behind_a_failed_step_is_rejected(scene: Scene) -> None:
    """Both are received in one iteration of the engine."""
    world = scene.world
    world.is_killing = True
    again = scene.connected(9)
    with world.held():
        scene.first.say(StepError(7, 1, StepErrorKind.EXCEPTION), hello(9, instance=1))
        time.sleep(0.1)
    assert "being killed" in again.hear_a(Goodbye).reason
    scene.successor_answers()


def test_late_hello_of_an_exited_process_is_rejected(scene: Scene) -> None:
    """Its memory ran out, so it was to join again; then something killed it."""
    world = scene.world
    scene.first.say(StepError(7, 1, StepErrorKind.OUT_OF_MEMORY))
    world.wait(lambda: len(world.losses) == 1)
    world.engine.worker_exited(7, -9)
    scene.refused(9, instance=1)
    scene.successor_answers()


def test_another_process_with_the_same_pid_may_join(scene: Scene) -> None:
    """In containers of their own, all of them have the same."""
    world = scene.world
    world.is_killing = True
    scene.impossible_result()
    successor = scene.peer(9)
    successor.say(hello(9, instance=2, pid=7))
    world.wait_joined(2)
    assert successor.hear_a(StepPlan).epoch == 9


def test_unhealthy_process_without_a_supervisor_may_join_again(scene: Scene) -> None:
    """Where nobody supervises it there would be no other."""
    scene.impossible_result()
    assert scene.first.hear_a(Rejoin) == Rejoin(7)
    again = scene.peer(9)
    again.say(hello(9, instance=1))
    scene.world.wait_joined(2)
    assert again.hear_a(StepPlan).epoch == 9


def test_condemned_worker_exits_by_itself() -> None:
    """Nobody kills this one."""
    with World() as world:
        world.options = ToyOptions(fault="tokens", fault_step=5, fault_once=str(world.root / "once"))
        world.is_killing = True

        def body(supervisor: WorkerSupervisor) -> None:
            streams = [world.submit(request(i)) for i in range(8)]
            world.wait_ended(streams)
            for stream in streams:
                stream.check(world.options.vocab_size)
            assert supervisor.num_starts == 2

        supervised(world, body)
        assert (len(world.broken), len(world.joins), len(world.losses)) == (1, 2, 2)
