"""A worker that is told to stop finishes what its scheduler runs, within its drain timeout."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.engine_harness import World, eventually, request
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS
from support.toy_worker import ToyOptions
from support.worker_peer import hello, peers

from lineclear.wire.messages import Goodbye, Stopping

LONG_DRAIN = ToyOptions(min_step_seconds=0.002, max_step_seconds=0.006, drain_timeout_seconds=10 * PATIENCE_SECONDS)


@pytest.fixture
def world() -> Iterator[World]:
    with World(options=LONG_DRAIN) as world:
        yield world


def test_streams_finish_on_a_stopping_worker(world: World) -> None:
    worker = world.start_worker()
    streams = [world.submit(request(i, max_tokens=80)) for i in range(8)]
    world.wait(lambda: all(stream.tokens for stream in streams))
    worker.send_signal(signal.SIGTERM)
    world.wait_ended(streams)
    for stream in streams:
        stream.check(world.options.vocab_size)
    assert len(world.joins) == 1
    assert worker.wait(PATIENCE_SECONDS) == 0
    world.wait(lambda: len(world.losses) == 1)


def test_an_idle_worker_exits_at_once(world: World) -> None:
    worker = world.start_worker()
    world.wait_joined()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(SOON_SECONDS) == 0
    world.wait(lambda: len(world.losses) == 1)


def test_a_worker_that_has_not_joined_exits_at_once(world: World) -> None:
    world.engine.stop()  # the sockets are there, and nothing answers
    worker = world.start_worker()
    eventually(lambda: world.link._results.poll(0) != 0, what="its Hello")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(SOON_SECONDS) == 0


def test_draining_worker_without_a_scheduler_exits(world: World) -> None:
    worker = world.start_worker()
    stream = world.submit(request(0, max_tokens=400))
    world.wait(lambda: len(stream.tokens) > 0)
    worker.send_signal(signal.SIGTERM)
    eventually(lambda: world.engine.worker_status.is_stopping, what="its message")
    world.engine.stop()
    world.link.close()
    assert worker.wait(SOON_SECONDS) == 0


def test_a_second_signal_ends_the_drain(world: World) -> None:
    worker = world.start_worker()
    stream = world.submit(request(0, max_tokens=400))
    world.wait(lambda: len(stream.tokens) > 0)
    worker.send_signal(signal.SIGTERM)
    eventually(lambda: world.engine.worker_status.is_stopping, what="its message")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(SOON_SECONDS) == -signal.SIGTERM


def test_streams_move_to_the_next_worker_after_the_drain_timeout(world: World) -> None:
    worker = world.start_worker(replace(LONG_DRAIN, drain_timeout_seconds=0.2))
    streams = [world.submit(request(i, max_tokens=400)) for i in range(8)]
    world.wait(lambda: all(stream.tokens for stream in streams))
    worker.send_signal(signal.SIGTERM)
    world.wait(lambda: len(world.losses) == 1)
    assert worker.wait(PATIENCE_SECONDS) == 0
    assert not any(stream.end for stream in streams)
    world.start_worker()
    world.wait_ended(streams)
    for stream in streams:
        stream.check(world.options.vocab_size)


def test_requests_during_a_worker_drain_run(world: World) -> None:
    worker = world.start_worker()
    first = world.submit(request(0, max_tokens=100))
    world.wait(lambda: len(first.tokens) > 0)
    worker.send_signal(signal.SIGTERM)
    eventually(lambda: world.engine.worker_status.is_stopping, what="its message")
    second = world.submit(request(1, max_tokens=20))
    world.wait_ended([first, second])
    second.check(world.options.vocab_size)
    assert len(world.joins) == 1
    assert worker.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("has_request", [True, False])
def test_a_released_worker_is_sent_one_goodbye(world: World, has_request: bool) -> None:
    with peers(world.directory) as peer:
        worker = peer(7)
        worker.say(hello(7))
        world.wait_joined()
        worker.say(Stopping(7))
        eventually(lambda: world.engine.worker_status.is_stopping)
        assert worker.hear() == Goodbye(7, "no request is left to run")
        if has_request:  # it came too late for this worker
            world.submit(request(0))
        worker.say(Goodbye(7))
        world.wait(lambda: len(world.losses) == 1)
        assert not world.engine.worker_status.is_stopping


def test_killed_stopping_worker_makes_no_request_a_suspect() -> None:
    """As when a container runtime's patience is shorter than the drain timeout."""
    anomalies: list[str] = []
    with World(options=LONG_DRAIN, on_anomaly=anomalies.append) as world:
        kill_while_it_stops(world)
    assert anomalies == []


def kill_while_it_stops(world: World) -> None:
    worker = world.start_worker()
    streams = [world.submit(request(i, max_tokens=100)) for i in range(8)]
    world.wait(lambda: all(stream.tokens for stream in streams))
    worker.send_signal(signal.SIGTERM)
    eventually(lambda: world.engine.worker_status.is_stopping, what="its message")
    worker.kill()
    world.wait(lambda: len(world.losses) == 1)
    world.start_worker()
    world.wait_ended(streams)
    for stream in streams:
        stream.check(world.options.vocab_size)
