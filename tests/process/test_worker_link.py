"""Messages of unknown epochs, second workers, dead workers, other releases, and noise."""

from __future__ import annotations

import math
import random
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq
from support.engine_harness import EngineHarness, eventually, kill, request, short_directory
from support.sockets import bare_context
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS
from support.toy_worker import ToyOptions
from support.worker_peer import Peer, hello

from lineclear.scheduler.engine.worker_link import WorkerGone, WorkerLink
from lineclear.scheduler.engine.worker_registry import WorkerRegistry
from lineclear.scheduler.engine.worker_session import (
    Fact,
    Joined,
    WorkerTimeouts,
)
from lineclear.wire.codec import ProtocolMismatch, decode, encode
from lineclear.wire.messages import (
    PROTOCOL,
    Goodbye,
    Heartbeat,
    Hello,
    LogLevel,
    Message,
    Rejoin,
    Row,
    SetLogLevel,
    StepError,
    StepErrorKind,
    StepPlan,
    StepResult,
)

M = TypeVar("M", bound=Message)


def plan(epoch: int, step: int = 1) -> StepPlan:
    return StepPlan(epoch, step, (Row(0, 0, 1, True),))


class Station:
    """A link with its registry, and peers that stay connected until the end unless a test closes them."""

    def __init__(self) -> None:
        self.directory = short_directory()
        self.link = WorkerLink(self.directory)
        self.workers = WorkerRegistry(WorkerTimeouts(heartbeat_timeout_seconds=PATIENCE_SECONDS), max_workers=1)
        self.context = bare_context()
        self._peers: list[Peer] = []

    def peer(self, epoch: int) -> Peer:
        peer = Peer(self.context, self.directory, epoch)
        self._peers.append(peer)
        return peer

    def joined(self, epoch: int) -> Peer:
        peer = self.peer(epoch)
        peer.send(hello(epoch))
        assert self.expect(1) == [Joined(hello(epoch))]
        return peer

    def receive(self) -> list[Fact]:
        """Receive and check timeouts once, as the engine does."""
        now = time.monotonic()
        return [*self.link.receive(self.workers, now), *self.link.perform(self.workers.check(now))]

    def expect(self, count: int) -> list[Fact]:
        """Receive until `count` outputs have followed."""
        outputs: list[Fact] = []
        end = time.monotonic() + PATIENCE_SECONDS
        while len(outputs) < count:
            assert time.monotonic() < end, f"only {outputs}"
            self.link.wait(min(end, self.workers.next_check(time.monotonic())))
            outputs += self.receive()
        return outputs

    def settle(self, seconds: float = 0.3, until: Callable[[], bool] = lambda: True) -> list[Fact]:
        """Receive for `seconds` and until a condition holds; return all outputs."""
        outputs: list[Fact] = []
        begin = now = time.monotonic()
        while now < begin + seconds or not until():
            assert now < begin + PATIENCE_SECONDS, self.link.counters
            self.link.wait(now + 0.05)
            outputs += self.receive()
            now = time.monotonic()
        return outputs


@pytest.fixture
def station() -> Iterator[Station]:
    station = Station()
    yield station
    station.context.destroy()
    station.link.close()
    shutil.rmtree(station.directory)


def test_plans_and_results_keep_their_order(station: Station) -> None:
    peer = station.joined(7)
    station.link.send(plan(7, 1))
    station.link.send(plan(7, 2))
    assert [peer.receive(), peer.receive()] == [plan(7, 1), plan(7, 2)]
    results = [StepResult(7, 1, (5,)), StepResult(7, 2, (6,))]
    peer.send(*results)
    assert station.expect(2) == results


def test_send_raises_instead_of_blocking(station: Station) -> None:
    """A control message is not sent, and may be sent later."""
    station.joined(7)  # never reads
    rows = tuple(Row(i, 0, 1, True) for i in range(256))

    def flood() -> None:
        for step in range(1, 100_000):
            station.link.send(StepPlan(7, step, rows))

    with pytest.raises(WorkerGone):
        flood()
    assert any(not station.link.send_control(SetLogLevel(7, LogLevel.INFO)) for _ in range(100_000))
    assert not station.link.send_control(SetLogLevel(9, LogLevel.INFO))  # nobody is there


def test_noise_on_the_result_socket_is_counted_and_dropped(station: Station) -> None:
    peer = station.joined(7)
    noise = random.Random(1)
    good = encode(StepResult(7, 1, (1, 2, 3)))
    frames = [noise.randbytes(length) for length in (0, 1, 27, 28, 29, 200)]
    for _ in range(200):
        frame = bytearray(good)
        frame[noise.randrange(6)] ^= 1 << noise.randrange(8)  # magic or protocol
        frames.append(bytes(frame))
    for data in frames:
        peer.results.send(data)
    peer.results.send_multipart([good, good])
    peer.plans.send(b"a worker has nothing to say here")
    sent = len(frames) + 2
    peer.send(StepResult(7, 1, (1,)))
    arrivals = station.expect(1)
    eventually(lambda: not station.settle(0.05) and station.link.counters.bad_frames >= sent)
    assert arrivals == [StepResult(7, 1, (1,))]
    assert station.link.counters.bad_frames == sent


def test_peers_without_zeromq_are_ignored(station: Station) -> None:
    peer = station.joined(7)
    strangers = []
    for name in ("plan.sock", "result.sock"):
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"", struct.pack(">Q", 2**63)):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(str(station.directory / name))
            stranger.sendall(data)
            strangers.append(stranger)
    assert station.settle() == []
    peer.send(StepResult(7, 1, (1,)))
    assert station.expect(1) == [StepResult(7, 1, (1,))]
    for stranger in strangers:
        stranger.close()


def test_oversized_message_closes_its_connection(station: Station) -> None:
    strict = WorkerLink(station.directory / "strict", max_message_bytes=1000)
    peer = Peer(station.context, station.directory / "strict", 7)
    disconnected = peer.results.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.results.send(b"x" * 100_000)
    assert disconnected.poll(PATIENCE_SECONDS * 1000)
    assert list(strict.receive(station.workers, time.monotonic())) == []
    assert strict.counters.bytes_received == 0
    strict.close()


def _other_release(message: Message) -> bytes:
    frame = bytearray(encode(message))
    frame[4:6] = struct.pack("<H", PROTOCOL + 1)
    return bytes(frame)


def test_other_release_is_fatal_without_a_joined_worker(station: Station) -> None:
    station.peer(7).results.send(_other_release(hello(7)))
    with pytest.raises(ProtocolMismatch, match=f"protocol {PROTOCOL + 1}, this one {PROTOCOL}"):
        station.expect(1)


def test_other_release_is_noise_beside_a_joined_worker(station: Station) -> None:
    peer = station.joined(7)
    peer.results.send(_other_release(hello(9)))
    assert station.settle(0.1, until=lambda: station.link.counters.bad_frames > 0) == []
    assert station.link.counters.bad_frames == 1


def test_wake_works_before_a_wait(station: Station) -> None:
    station.link.wake()
    station.link.wake()
    station.link.wait(None)
    begin = time.monotonic()
    station.link.wait(begin + 0.05)
    assert 0.04 < time.monotonic() - begin < SOON_SECONDS


@pytest.mark.parametrize("until", [-1e308, 2**31 / 1000, 30 * 86_400.0, 1e18, 1e308, math.inf, None])
def test_wait_accepts_any_time(station: Station, until: float | None) -> None:
    threading.Timer(0.05, station.link.wake).start()
    station.link.wait(None if until is None else time.monotonic() + until)


class FakeScheduler:
    """The bare sockets of a scheduler, and the epoch of the worker that joined last."""

    def __init__(self, directory: Path) -> None:
        self.context = bare_context()
        self.plans = self.context.socket(zmq.ROUTER)
        self.plans.set(zmq.ROUTER_MANDATORY, 1)
        self.plans.bind(f"ipc://{directory}/plan.sock")
        self.results = self.context.socket(zmq.PULL)
        self.results.bind(f"ipc://{directory}/result.sock")
        self.epoch = 0

    def join(self) -> int:
        """Return the epoch of the next worker that has said Hello and is connected both ways."""
        self.epoch = self.receive(Hello).epoch

        def is_reachable() -> bool:
            try:
                self.send(encode(Heartbeat(self.epoch, 0)))
            except zmq.ZMQError:
                return False
            return True

        eventually(is_reachable)
        return self.epoch

    def receive(self, kind: type[M]) -> M:
        while self.results.poll(PATIENCE_SECONDS * 1000):
            message = decode(self.results.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} in {PATIENCE_SECONDS} s")

    def send(self, frame: bytes) -> None:
        self.plans.send_multipart((self.epoch.to_bytes(8, "little"), frame))

    def close(self) -> None:
        self.context.destroy()


@pytest.fixture
def harness() -> Iterator[EngineHarness]:
    """A harness whose engine is away, so that the test can play the scheduler."""
    with EngineHarness() as harness:
        harness.engine.stop()
        harness.link.close()
        yield harness


@pytest.fixture
def scheduler(harness: EngineHarness) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(harness.directory)
    yield scheduler
    scheduler.close()


def test_rejoin_starts_a_new_epoch(harness: EngineHarness, scheduler: FakeScheduler) -> None:
    worker = harness.start_worker()
    first = scheduler.join()
    scheduler.send(encode(Rejoin(first)))
    second = scheduler.join()
    assert first != second
    scheduler.send(encode(plan(second, 1)))  # the slot was never initialised: the toy asserts
    error = scheduler.receive(StepError)
    assert (error.epoch, error.step, error.kind) == (second, 1, StepErrorKind.EXCEPTION)
    assert error.summary.startswith("KeyError at toy_runner.py:")
    assert worker.wait(PATIENCE_SECONDS) == 70


def test_missing_plan_ends_the_worker(harness: EngineHarness, scheduler: FakeScheduler) -> None:
    worker = harness.start_worker()
    scheduler.send(encode(plan(scheduler.join(), 2)))
    error = scheduler.receive(StepError)
    assert (error.step, error.kind, error.summary) == (2, StepErrorKind.PROTOCOL, "plan 2 came after plan 0")
    assert worker.wait(PATIENCE_SECONDS) == 70


def test_noise_on_the_plan_socket_is_dropped(harness: EngineHarness, scheduler: FakeScheduler) -> None:
    worker = harness.start_worker()
    epoch = scheduler.join()
    noise = random.Random(2)
    for length in (0, 10, 28, 1000):
        scheduler.send(noise.randbytes(length))
    scheduler.send(encode(plan(epoch + 2)))
    scheduler.send(encode(StepPlan(epoch, 1, ())))
    assert scheduler.receive(StepResult) == StepResult(epoch, 1, ())
    scheduler.send(_other_release(plan(epoch)))
    assert worker.wait(PATIENCE_SECONDS) == 78, "another release is no noise"


def test_heartbeats_carry_the_current_step(harness: EngineHarness, scheduler: FakeScheduler) -> None:
    harness.start_worker(ToyOptions(min_step_seconds=0.6, max_step_seconds=0.6, heartbeat_seconds=0.05))
    epoch = scheduler.join()
    assert scheduler.receive(Heartbeat) == Heartbeat(epoch, 0)
    sent_at = time.monotonic()
    scheduler.send(encode(StepPlan(epoch, 1, ())))
    eventually(lambda: scheduler.receive(Heartbeat).step == 1)
    assert 0 < scheduler.receive(Heartbeat).busy_seconds < time.monotonic() - sent_at


def test_waiting_worker_takes_over_at_once() -> None:
    """It is asked, and does not ask again itself: that would be in ten minutes."""
    options = ToyOptions(standby_seconds=600.0, min_step_seconds=0.001, max_step_seconds=0.002)
    with EngineHarness(options=options, max_workers=1, num_workers=1) as harness:
        for number in range(2):
            harness.start_worker()
            eventually(lambda: harness.engine.snapshot().membership.refused_joins > number, what="refused")  # noqa: B023
        streams = [harness.submit(request(i, max_tokens=400)) for i in range(8)]
        for number in range(1, 3):
            joined = harness.engine.worker_status.hello
            assert joined is not None
            harness.wait(lambda: all(len(stream.tokens) > number * 20 for stream in streams))  # noqa: B023
            kill(joined.pid)
            harness.wait_joined(number + 1)
        harness.check(streams)
        assert [worker.poll() for worker in harness.workers].count(None) == 1


def test_waiting_worker_asks_again_by_itself() -> None:
    """Where the scheduler that refused it has forgotten it."""
    with EngineHarness(options=ToyOptions(standby_seconds=0.2), max_workers=1, num_workers=1) as harness:
        harness.start_worker()
        eventually(lambda: harness.engine.snapshot().membership.refused_joins >= 3, what="asking again")


def refused(harness: EngineHarness, scheduler: FakeScheduler) -> tuple[subprocess.Popen[bytes], int]:
    """Return a worker that was refused by this scheduler and waits, and its epoch."""
    worker = harness.start_worker(ToyOptions(standby_seconds=600.0))
    epoch = scheduler.join()
    scheduler.send(encode(Goodbye(epoch, "another worker is joined")))
    return worker, epoch


def test_waiting_worker_asks_the_next_scheduler_at_once(harness: EngineHarness, scheduler: FakeScheduler) -> None:
    _, epoch = refused(harness, scheduler)
    scheduler.close()
    successor = FakeScheduler(harness.directory)
    try:
        assert successor.join() != epoch
    finally:
        successor.close()


def test_waiting_worker_stops_on_sigterm(harness: EngineHarness, scheduler: FakeScheduler) -> None:
    worker, _ = refused(harness, scheduler)
    time.sleep(0.2)  # it has read its refusal by then, and waits
    worker.terminate()
    assert worker.wait(PATIENCE_SECONDS) == 0
