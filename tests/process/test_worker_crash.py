"""The worker crashes, hangs or fails during answers: every stream continues exactly on the next worker."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.engine_harness import EngineHarness, Stream, eventually, kill, request, supervised
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS
from support.toy_worker import ToyOptions

from lineclear.scheduler.core.events import Event
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_session import CLOSED, WorkerTimeouts

SLOW = ToyOptions(min_step_seconds=0.002, max_step_seconds=0.006)
SHORT_SILENCE = WorkerTimeouts(heartbeat_timeout_seconds=3.0)
"""Longer than a busy machine delays a running process."""


def num_tokens(streams: list[Stream]) -> int:
    return sum(len(stream.tokens) for stream in streams)


@pytest.mark.parametrize("options", [SLOW, replace(SLOW, num_state_snapshots=6)], ids=["plain", "recurrent"])
def test_streams_stay_exact_when_workers_are_killed_at_random(options: ToyOptions) -> None:
    chance = random.Random(0)
    num_kills = 5
    with EngineHarness(options=options) as harness:

        def body(pool: WorkerPool) -> None:
            harness.wait_joined()
            streams = [harness.submit(request(i, prompt_len=5 + i, max_tokens=60 + i)) for i in range(24)]
            for number in range(1, num_kills + 1):
                # A random amount of progress, so that kills fall into prefills, decodes and recoveries alike.
                goal = num_tokens(streams) + chance.randrange(300)
                harness.wait(lambda goal=goal: num_tokens(streams) >= goal, what="progress")
                killed_at = time.monotonic()
                kill(pool.pids[0])
                harness.wait(lambda number=number: len(harness.losses) >= number, what="loss")
                assert harness.losses[-1][0] - killed_at < SOON_SECONDS
                harness.wait_joined(number + 1)
            harness.check(streams)
            assert max(gap for stream in streams for gap in stream.gaps) < SOON_SECONDS

        supervised(harness, body)
        assert len({epoch for _, epoch in harness.joins}) == num_kills + 1
        assert harness.snapshot().worker.num_joins == num_kills + 1


def test_silent_worker_is_killed() -> None:
    with EngineHarness(options=SLOW, timeouts=SHORT_SILENCE) as harness:

        def body(pool: WorkerPool) -> None:
            harness.wait_joined()
            streams = [harness.submit(request(i, max_tokens=80)) for i in range(8)]
            harness.wait(lambda: num_tokens(streams) > 50)
            pid = kill(pool.pids[0], signal.SIGSTOP)
            harness.check(streams)
            assert pool.pids[0] != pid

        supervised(harness, body)
        assert harness.broken
        assert all("silent" in reason for reason in harness.broken)  # on a busy machine maybe more than one


def hung(harness: EngineHarness) -> tuple[subprocess.Popen[bytes], list[Stream]]:
    """Return an unsupervised worker that is stopped and lost while it computed these streams."""
    worker = harness.start_worker()
    harness.wait_joined()
    streams = [harness.submit(request(i, max_tokens=80)) for i in range(8)]
    harness.wait(lambda: num_tokens(streams) > 50)
    assert not harness.engine.worker_status.is_unhealthy
    worker.send_signal(signal.SIGSTOP)
    harness.wait(lambda: len(harness.losses) == 1)
    return worker, streams


def test_hung_unsupervised_worker_is_reported_until_it_exits() -> None:
    """As in a pod with a separate container for the worker; the health name `worker` reports the same."""
    with EngineHarness(options=SLOW, timeouts=SHORT_SILENCE) as harness:
        worker, streams = hung(harness)
        eventually(lambda: harness.engine.worker_status.is_unhealthy)
        worker.kill()
        worker.wait()
        eventually(lambda: not harness.engine.worker_status.is_unhealthy, what="the end of the hung worker")
        assert len(harness.joins) == 1  # said before its successor, which may load for long, has joined
        harness.start_worker()
        harness.check(streams)
        assert not harness.engine.worker_status.is_unhealthy


def test_hung_worker_that_wakes_joins_again() -> None:
    with EngineHarness(options=SLOW, timeouts=SHORT_SILENCE) as harness:
        worker, streams = hung(harness)
        worker.send_signal(signal.SIGCONT)
        harness.check(streams)
        assert len(harness.joins) == 2
        assert not harness.engine.worker_status.is_unhealthy


def test_worker_killed_again_during_recovery() -> None:
    """Each worker is killed as soon as it has joined, before it has recomputed lost tokens."""
    with EngineHarness(options=SLOW) as harness:

        def body(pool: WorkerPool) -> None:
            harness.wait_joined()
            streams = [harness.submit(request(i, prompt_len=40, max_tokens=60)) for i in range(8)]
            harness.wait(lambda: num_tokens(streams) > 80)
            for number in range(1, 4):
                kill(pool.pids[0])
                harness.wait_joined(number + 1)
            harness.check(streams)

        supervised(harness, body)
        assert len(harness.joins) == 4


def test_hanging_step_with_heartbeats_is_killed_at_its_timeout() -> None:
    """The worker is not silent: it may take longer than without heartbeats, and not less than a step may take."""
    timeouts = WorkerTimeouts(3.5, cold_step_timeout_seconds=3.5, heartbeat_timeout_seconds=2.5)
    with EngineHarness(timeouts=timeouts) as harness:
        harness.options = ToyOptions(fault="hang", fault_step=7, fault_once=str(harness.root / "once"))

        def body(pool: WorkerPool) -> None:
            harness.wait_joined()
            begin = time.monotonic()
            harness.check([harness.submit(request(i)) for i in range(8)])
            assert harness.losses[0][0] - begin >= 3.5

        supervised(harness, body)
        assert len(harness.broken) == 1
        assert "step 7 is not done" in harness.broken[0]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("exception", "exception"), ("tokens", "cannot be"), ("exit", None)],
)
def test_failing_worker_is_replaced(fault: str, reason: str | None) -> None:
    with EngineHarness() as harness:
        harness.options = ToyOptions(fault=fault, fault_step=9, fault_once=str(harness.root / "once"))

        def body(pool: WorkerPool) -> None:
            harness.check([harness.submit(request(i)) for i in range(8)])
            eventually(lambda: pool.num_starts == 2)

        supervised(harness, body)
        assert [r for r in harness.broken if reason is None or reason not in r] == []
        assert len(harness.broken) == (reason is not None)


def test_condemned_worker_exits_by_itself() -> None:
    """The supervisor does not kill this one."""
    with EngineHarness() as harness:
        harness.options = ToyOptions(fault="tokens", fault_step=5, fault_once=str(harness.root / "once"))
        harness.is_killing = True

        def body(pool: WorkerPool) -> None:
            harness.check([harness.submit(request(i)) for i in range(8)])
            assert pool.num_starts == 2

        supervised(harness, body)
        assert (len(harness.broken), len(harness.joins), len(harness.losses)) == (1, 2, 2)


def test_failed_worker_exits_by_itself() -> None:
    """As in a container of its own: its device may have failed, so it begins no other epoch."""
    with EngineHarness() as harness:
        worker = harness.start_worker(ToyOptions(fault="exception", fault_step=5))
        streams = [harness.submit(request(i)) for i in range(8)]
        assert worker.wait(PATIENCE_SECONDS) == 70
        assert len(harness.joins) == 1
        harness.start_worker()
        harness.check(streams)


def test_out_of_memory_ends_the_epoch_and_not_the_process() -> None:
    options = ToyOptions(fault="memory", fault_step=5)
    with EngineHarness() as harness:
        worker = harness.start_worker(replace(options, fault_once=str(harness.root / "once")))
        harness.check([harness.submit(request(i)) for i in range(8)])
        assert len(harness.joins) == 2
        assert worker.poll() is None
        assert harness.broken == []


def test_no_plan_is_launched_behind_one_that_failed_to() -> None:
    """Its slots are undefined: on a GPU such a plan may read memory of no tensor, which would end the process."""
    slow = ToyOptions(fault="launch", fault_step=9, min_step_seconds=0.1, max_step_seconds=0.1)
    with EngineHarness(core=CoreLimits(pipeline_depth=4)) as harness:
        worker = harness.start_worker(replace(slow, fault_once=str(harness.root / "once")))
        harness.check([harness.submit(request(i)) for i in range(8)])
        assert len(harness.joins) == 2
        assert worker.poll() is None
        assert harness.broken == []


def test_stopping_worker_finishes_its_step_and_sends_goodbye() -> None:
    """With a drain timeout of 0; else it would finish what its scheduler runs."""
    anomalies: list[str] = []
    with EngineHarness(on_anomaly=anomalies.append) as harness:
        begun = harness.root / "begun"
        slow = ToyOptions(min_step_seconds=0.3, max_step_seconds=0.3, fault="none", fault_step=3, fault_once=str(begun))
        slow = replace(slow, drain_timeout_seconds=0.0)
        first = harness.start_worker(slow)
        stream = harness.submit(request(0, max_tokens=40))  # a token a step
        eventually(begun.exists, what="the third step")
        first.send_signal(signal.SIGTERM)
        harness.wait(lambda: len(harness.losses) == 1)
        assert len(stream.tokens) >= 3, "a step that had begun was thrown away"
        assert CLOSED not in anomalies, "it went without a word, and whoever was in its steps is suspected"
        assert first.wait(PATIENCE_SECONDS) == 0
        harness.start_worker()
        harness.check([stream])


def test_pipeline_depth_does_not_change_answers() -> None:
    deepest = 0
    with EngineHarness(core=CoreLimits(pipeline_depth=4), options=SLOW) as harness:

        def look(events: Sequence[Event]) -> None:
            nonlocal deepest
            deepest = max(deepest, harness.core.snapshot().steps_in_flight)

        harness.on_publish = look
        harness.start_worker()
        harness.check([harness.submit(request(i)) for i in range(20)])
        assert deepest == 4
        assert len(harness.joins) == 1, "right answers, but of several workers"
        assert harness.losses == []
