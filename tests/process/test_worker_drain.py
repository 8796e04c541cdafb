"""A worker that gets SIGTERM runs its scheduler's requests to their end, within its drain timeout."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.engine_harness import EngineHarness, Stream, eventually, request
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS
from support.toy_worker import ToyOptions

LONG_DRAIN = ToyOptions(min_step_seconds=0.002, max_step_seconds=0.006, drain_timeout_seconds=10 * PATIENCE_SECONDS)


@pytest.fixture
def harness() -> Iterator[EngineHarness]:
    with EngineHarness(options=LONG_DRAIN) as harness:
        yield harness


def told_to_stop(harness: EngineHarness, num_streams: int = 1) -> tuple[subprocess.Popen[bytes], list[Stream]]:
    """Return a worker that the engine knows to be stopping, and the streams that run on it."""
    worker = harness.start_worker()
    streams = [harness.submit(request(i, max_tokens=200)) for i in range(num_streams)]
    harness.wait(lambda: all(stream.tokens for stream in streams))
    worker.send_signal(signal.SIGTERM)
    eventually(lambda: harness.engine.worker_status.is_stopping, what="its message")
    return worker, streams


def test_streams_finish_on_a_stopping_worker(harness: EngineHarness) -> None:
    """So does one that is submitted during its drain."""
    worker, streams = told_to_stop(harness, 8)
    streams.append(harness.submit(request(8, max_tokens=20)))
    harness.check(streams)
    assert len(harness.joins) == 1
    assert worker.wait(PATIENCE_SECONDS) == 0
    harness.wait(lambda: len(harness.losses) == 1)


def test_an_idle_worker_exits_at_once(harness: EngineHarness) -> None:
    worker = harness.start_worker()
    harness.wait_joined()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(SOON_SECONDS) == 0
    harness.wait(lambda: len(harness.losses) == 1)


def test_a_worker_that_has_not_joined_exits_at_once(harness: EngineHarness) -> None:
    harness.engine.stop()  # the sockets are there, and nothing answers
    worker = harness.start_worker()
    eventually(lambda: harness.link._results.poll(0) != 0, what="its Hello")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(SOON_SECONDS) == 0


def test_draining_worker_without_a_scheduler_exits(harness: EngineHarness) -> None:
    worker, _ = told_to_stop(harness)
    harness.engine.stop()
    harness.link.close()
    assert worker.wait(SOON_SECONDS) == 0


def test_a_second_signal_ends_the_drain(harness: EngineHarness) -> None:
    worker, _ = told_to_stop(harness)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(SOON_SECONDS) == -signal.SIGTERM


def test_streams_move_to_the_next_worker_after_the_drain_timeout(harness: EngineHarness) -> None:
    worker = harness.start_worker(replace(LONG_DRAIN, drain_timeout_seconds=0.2))
    streams = [harness.submit(request(i, max_tokens=250)) for i in range(8)]
    harness.wait(lambda: all(stream.tokens for stream in streams))
    worker.send_signal(signal.SIGTERM)
    harness.wait(lambda: len(harness.losses) == 1)
    assert worker.wait(PATIENCE_SECONDS) == 0
    assert not any(stream.end for stream in streams)
    harness.start_worker()
    harness.check(streams)


def test_killed_stopping_worker_makes_no_request_a_suspect() -> None:
    """As when a container runtime's patience is shorter than the drain timeout."""
    anomalies: list[str] = []
    with EngineHarness(options=LONG_DRAIN, on_anomaly=anomalies.append) as harness:
        worker, streams = told_to_stop(harness, 8)
        worker.kill()
        harness.wait(lambda: len(harness.losses) == 1)
        harness.start_worker()
        harness.check(streams)
    assert anomalies == []
