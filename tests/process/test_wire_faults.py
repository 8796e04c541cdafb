"""Frames that are lost, doubled, damaged, reordered or replayed between scheduler and worker.

Whatever happens to a frame, the answers are exact: either the frame did not matter, or the worker joins anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from process.frame_proxy import Proxy, Tamper
from support.engine_harness import EngineHarness, eventually, kill, request, supervised
from support.toy_worker import ToyOptions

from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_session import WorkerTimeouts
from lineclear.scheduler.engine.worker_supervisor import SupervisorLimits
from lineclear.wire.codec import decode
from lineclear.wire.messages import StepPlan, StepResult

# Each fault shows in the frames that follow, so nothing here waits for a deadline: these only bound a hang.
PATIENCE = WorkerTimeouts(step_timeout_seconds=15.0, cold_step_timeout_seconds=15.0, heartbeat_timeout_seconds=15.0)
OPTIONS = ToyOptions(min_step_seconds=0.001, max_step_seconds=0.004)


def is_step(frame: bytes) -> bool:
    return isinstance(decode(frame), StepPlan | StepResult)


class Kind(NamedTuple):
    """Changes a frame, given it and the one before; `then` changes the next frame, given that and this one."""

    what: Callable[[bytes, bytes], Sequence[bytes]]
    then: Callable[[bytes, bytes], Sequence[bytes]] = lambda frame, last: (frame,)
    costs_a_worker: bool = True


class Fault:
    """Does `kind` to the `at`-th frame of one direction that is about a step, and to no other."""

    def __init__(self, direction: str, at: int, kind: Kind) -> None:
        self.num_seen = 0
        self._direction, self._at, self._kind = direction, at, kind
        self._last = b""

    def __call__(self, direction: str, frame: bytes) -> Sequence[bytes]:
        if direction != self._direction or not is_step(frame):
            return (frame,)
        self.num_seen += 1
        last, self._last = self._last, frame
        if self.num_seen == self._at:
            return self._kind.what(frame, last)
        if self.num_seen == self._at + 1:
            return self._kind.then(frame, last)
        return (frame,)


def flipped(frame: bytes, seed: int = 1) -> bytes:
    damaged = bytearray(frame)
    place = random.Random(seed).randrange(len(frame) * 8)
    damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)


FAULTS = {
    "lost": Kind(lambda frame, last: ()),
    "doubled": Kind(lambda frame, last: (frame, frame)),
    "damaged": Kind(lambda frame, last: (flipped(frame),)),
    "cut": Kind(lambda frame, last: (frame[: len(frame) // 2],)),
    "empty": Kind(lambda frame, last: (b"",)),
    "longer": Kind(lambda frame, last: (frame + b"\0" * 64,)),
    "after its successor": Kind(lambda frame, last: (), then=lambda frame, last: (frame, last)),
    "noise before it": Kind(lambda frame, last: (b"\xff" * 512, b"GET / HTTP/1.1", frame), costs_a_worker=False),
    "the one before it once more": Kind(lambda frame, last: (last, frame)),
    "instead of it the one before": Kind(lambda frame, last: (last,)),
}
REFUSED_AS = {"plan": "a step failed: protocol", "result": "cannot be"}
"""The worker refuses a plan of the wrong step, the core a result of the wrong step."""
# So many workers are lost that the requests of one server would use up its crash budget.
LIMITS = SupervisorLimits(max_worker_crashes=100, min_backoff_seconds=0.001)


def serve(tamper: Tamper, body: Callable[[EngineHarness, Proxy, WorkerPool], None]) -> EngineHarness:
    """Run `body` in a harness whose worker speaks through a proxy that tampers."""
    with EngineHarness(timeouts=PATIENCE, options=OPTIONS) as harness:
        scheduler_side, worker_side = harness.directory, harness.root / "w"
        with Proxy(scheduler_side, worker_side, tamper) as proxy:
            harness.directory = worker_side
            supervised(harness, lambda pool: body(harness, proxy, pool), LIMITS)
    return harness


def all_exact(harness: EngineHarness) -> None:
    first = len(harness.streams)
    harness.check([harness.submit(request(first + i, prompt_len=5 + i, max_tokens=40)) for i in range(8)])


@pytest.mark.parametrize("direction", ["plan", "result"])
@pytest.mark.parametrize(
    ("names", "at"), [(tuple(FAULTS), 9), (("lost",), 1), (("doubled",), 1)], ids=["any", "first lost", "first doubled"]
)
def test_answers_are_exact_whatever_happens_to_one_frame(names: Sequence[str], direction: str, at: int) -> None:
    """One server has each fault after the other: in a step of some requests, or in the first step of a worker."""
    fault = Fault(direction, at, FAULTS[names[0]])

    def body(harness: EngineHarness, proxy: Proxy, pool: WorkerPool) -> None:
        nonlocal fault
        for name in names:
            fault = Fault(direction, at, FAULTS[name])
            harness.wait_joined()
            broken, joins = len(harness.broken), len(harness.joins)
            all_exact(harness)
            assert fault.num_seen > at, name
            # Noise costs nothing. Any other fault costs one worker.
            assert len(harness.broken) - broken == len(harness.joins) - joins == FAULTS[name].costs_a_worker, name

    harness = serve(lambda where, frame: fault(where, frame), body)
    assert harness.fatal == []
    assert all(REFUSED_AS[direction] in reason for reason in harness.broken)


@pytest.mark.parametrize("direction", ["plan", "result"])
def test_answers_are_exact_when_frames_are_damaged_at_random(direction: str) -> None:
    chance = random.Random(7)
    count = 0

    def tamper(where: str, frame: bytes) -> Sequence[bytes]:
        nonlocal count
        if where != direction or not is_step(frame) or chance.random() >= 0.1 or count >= 4:
            return (frame,)
        count += 1
        return (flipped(frame, count),)

    harness = serve(tamper, lambda harness, proxy, pool: all_exact(harness))
    assert count > 0
    assert harness.fatal == []


def test_replayed_messages_of_a_dead_worker_are_dropped() -> None:
    def body(harness: EngineHarness, proxy: Proxy, pool: WorkerPool) -> None:
        harness.wait_joined()
        streams = [harness.submit(request(i, max_tokens=120)) for i in range(8)]
        harness.wait(lambda: sum(len(s.tokens) for s in streams) > 200)
        kill(pool.pids[0])
        harness.wait_joined(2)
        old = harness.joins[0][1]
        said = [f for where, f in proxy.seen if where == "result" and decode(f).epoch == old]  # type: ignore[union-attr]
        assert len(said) > 10
        before = harness.snapshot().membership.stale_messages
        for frame in said:
            proxy.inject(frame)
        harness.check(streams)
        eventually(lambda: harness.engine.snapshot().membership.stale_messages >= before + len(said))
        assert len(harness.joins) == 2

    serve(lambda where, frame: (frame,), body)
