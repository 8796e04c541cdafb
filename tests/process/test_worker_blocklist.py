"""A process that exited or is being killed may not join again, however late its Hello; a suspended one may."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from support.engine_harness import EngineHarness, eventually, request, supervised
from support.toy_worker import ToyOptions
from support.worker_peer import Peer, hello, peers

from lineclear.scheduler.engine.worker_supervisor import WorkerSupervisor
from lineclear.wire.messages import Goodbye, Rejoin, StepError, StepErrorKind, StepPlan, StepResult


class Scene:
    """An engine with requests, and a worker (epoch 7, instance 1) that has joined and got its first plan."""

    def __init__(self, harness: EngineHarness, peer: Callable[[int], Peer]) -> None:
        self.harness, self.peer = harness, peer
        # Before a worker joins, so that its first step has a row of each of them.
        self.streams = [harness.submit(request(i, prompt_len=4, max_tokens=4)) for i in range(3)]
        self.first = peer(7)
        self.first.send(hello(7, instance=1))
        harness.wait_joined()
        self.first.receive_kind(StepPlan)

    def connected(self, epoch: int) -> Peer:
        """A peer that a plan can reach."""
        peer, answers = self.peer(epoch), list[bool]()

        def is_reachable() -> bool:  # asked on the thread that owns the link
            self.harness.engine.call_on_engine_thread(lambda: answers.append(self.harness.link.is_reachable(epoch)))
            return any(answers)

        eventually(is_reachable)
        return peer

    def impossible_result(self) -> None:
        """The worker says what condemns it."""
        self.first.send(StepResult(7, 1, (1,) * 9))
        self.harness.wait(lambda: len(self.harness.losses) == 1)

    def refused(self, epoch: int, instance: int) -> Peer:
        """Send a Hello that is answered with Goodbye."""
        peer = self.connected(epoch)
        peer.send(hello(epoch, instance=instance))
        assert "join" in peer.receive_kind(Goodbye).reason
        assert [joined for _, joined in self.harness.joins] == [7]
        return peer

    def successor_answers(self) -> None:
        """Another process joins and serves all requests."""
        self.harness.start_worker()
        self.harness.wait_ended(self.streams)
        for stream in self.streams:
            stream.check(self.harness.options.vocab_size)
        assert (len(self.harness.joins), len(self.harness.losses)) == (2, 1)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with EngineHarness() as harness, peers(harness.directory) as peer:
        yield Scene(harness, peer)


def test_condemned_process_may_not_join_again(scene: Scene) -> None:
    scene.harness.is_killing = True
    scene.impossible_result()
    assert "being killed" in scene.first.receive_kind(Goodbye).reason
    scene.refused(9, instance=1)
    scene.refused(11, instance=1)
    scene.successor_answers()


def test_hello_right_behind_a_failed_step_is_rejected(scene: Scene) -> None:
    """Both are received in one iteration of the engine."""
    harness = scene.harness
    harness.is_killing = True
    again = scene.connected(9)
    with harness.held():
        scene.first.send(StepError(7, 1, StepErrorKind.EXCEPTION), hello(9, instance=1))
        time.sleep(0.1)
    assert "being killed" in again.receive_kind(Goodbye).reason
    scene.successor_answers()


def test_late_hello_of_an_exited_process_is_rejected(scene: Scene) -> None:
    """Its memory ran out, so it was to join again; then something killed it."""
    harness = scene.harness
    scene.first.send(StepError(7, 1, StepErrorKind.OUT_OF_MEMORY))
    harness.wait(lambda: len(harness.losses) == 1)
    harness.engine.worker_exited(7, -9)
    scene.refused(9, instance=1)
    scene.successor_answers()


def test_another_process_with_the_same_pid_may_join(scene: Scene) -> None:
    """Workers in separate containers may share a pid."""
    harness = scene.harness
    harness.is_killing = True
    scene.impossible_result()
    successor = scene.peer(9)
    successor.send(hello(9, instance=2, pid=7))
    harness.wait_joined(2)
    assert successor.receive_kind(StepPlan).epoch == 9


def test_unhealthy_process_without_a_supervisor_may_join_again(scene: Scene) -> None:
    """Without a supervisor, no other worker would start."""
    scene.impossible_result()
    assert scene.first.receive_kind(Rejoin) == Rejoin(7)
    again = scene.peer(9)
    again.send(hello(9, instance=1))
    scene.harness.wait_joined(2)
    assert again.receive_kind(StepPlan).epoch == 9


def test_condemned_worker_exits_by_itself() -> None:
    """The supervisor does not kill this one."""
    with EngineHarness() as harness:
        harness.options = ToyOptions(fault="tokens", fault_step=5, fault_once=str(harness.root / "once"))
        harness.is_killing = True

        def body(supervisor: WorkerSupervisor) -> None:
            streams = [harness.submit(request(i)) for i in range(8)]
            harness.wait_ended(streams)
            for stream in streams:
                stream.check(harness.options.vocab_size)
            assert supervisor.num_starts == 2

        supervised(harness, body)
        assert (len(harness.broken), len(harness.joins), len(harness.losses)) == (1, 2, 2)
