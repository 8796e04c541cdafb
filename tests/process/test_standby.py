"""The standby worker: promoted when the worker exits, replaced when it exits itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.engine_harness import EngineHarness, eventually, kill, request, supervised
from support.toy_worker import ToyOptions
from support.waiting import until

from lineclear.process.standby import PROMOTED, READY, Standby, StandbyLine
from lineclear.scheduler.engine import worker_process, worker_supervisor
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_supervisor import SupervisorLimits
from lineclear.wire.messages import Hello

OPTIONS = ToyOptions(min_step_seconds=0.002, max_step_seconds=0.004)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start standbys without a pause."""
    monkeypatch.setattr(worker_process, "_STANDBY_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(worker_process, "_STANDBY_MIN_BACKOFF_SECONDS", 0.01)


def ready_standby(pool: WorkerPool) -> int:
    eventually(lambda: pool.standby_pid is not None, what="a standby")
    pid = pool.standby_pid
    assert pid is not None
    return pid


def drain(harness: EngineHarness, pool: WorkerPool) -> None:
    assert harness.loop is not None
    harness.loop.call_soon_threadsafe(pool.drain)


def hello(pid: int) -> Hello:
    return Hello(1, 1, 1, 1, 1, 1, (), 1, pid=pid)


def serve_with_standby(
    body: Callable[[EngineHarness, WorkerPool], None], options: ToyOptions = OPTIONS, **limits: float
) -> WorkerPool:
    """Run `body` while streams run on a worker beside a standby, which cost neither a token nor the crash budget."""
    with EngineHarness(options=options) as harness:

        def run(pool: WorkerPool) -> None:
            harness.wait_joined()
            streams = [harness.submit(request(number, max_tokens=400)) for number in range(2)]
            harness.wait(lambda: all(len(stream.tokens) > 4 for stream in streams))
            body(harness, pool)
            harness.check(streams)

        pool = supervised(harness, run, SupervisorLimits(**limits), standby=True)  # type: ignore[arg-type]
        assert harness.give_ups == []
        return pool


def test_the_standby_takes_over_and_another_one_is_kept() -> None:
    def body(harness: EngineHarness, pool: WorkerPool) -> None:
        for number in range(2, 4):
            standby = ready_standby(pool)
            kill(pool.pids[0])
            harness.wait_joined(number)
            assert pool.pids[0] == standby

    assert serve_with_standby(body, max_worker_crashes=2).num_starts == 3


def test_standby_crash_costs_no_stream_and_no_budget() -> None:
    def body(harness: EngineHarness, pool: WorkerPool) -> None:
        worker = pool.pids[0]
        for _ in range(2):
            standby = kill(ready_standby(pool))
            eventually(lambda standby=standby: pool.standby_pid not in (None, standby))  # type: ignore[misc]
        assert pool.pids[0] == worker

    serve_with_standby(body, max_worker_crashes=0)


def test_a_standby_that_hangs_is_killed_and_a_new_worker_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """One end is survived: the worker's. That of the standby does not count."""
    monkeypatch.setattr(worker_supervisor, "_PROMOTION_SECONDS", 0.2)

    def body(harness: EngineHarness, pool: WorkerPool) -> None:
        hung = kill(ready_standby(pool), signal.SIGSTOP)
        kill(pool.pids[0])
        harness.wait_joined(2)
        assert pool.pids[0] != hung

    serve_with_standby(body, max_worker_crashes=1)


def test_a_standby_that_still_imports_is_not_promoted() -> None:
    """It imports at a low priority that it cannot raise: beside a busy process a new worker is ready before it."""

    def body(harness: EngineHarness, pool: WorkerPool) -> None:
        keeper = pool._standby
        assert keeper is not None
        eventually(lambda: keeper.pid is not None)
        importing = keeper.pid
        worker = kill(pool.pids[0])
        harness.wait_joined(2)
        assert pool.pids[0] not in (importing, worker)
        # It goes on, and is there for the next end.
        assert ready_standby(pool) == importing
        kill(pool.pids[0])
        harness.wait_joined(3)
        assert pool.pids[0] == importing

    serve_with_standby(body, replace(OPTIONS, import_seconds=0.8), min_backoff_seconds=0.01)


@pytest.mark.parametrize("is_due", [False, True], ids=["one that is killed", "one that is due"])
def test_no_standby_is_started_during_a_drain(is_due: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(harness: EngineHarness, pool: WorkerPool) -> None:
        keeper = pool._standby
        assert keeper is not None
        if is_due:
            monkeypatch.setattr(worker_process, "_STANDBY_DELAY_SECONDS", 0.05)
            assert harness.loop is not None
            harness.loop.call_soon_threadsafe(keeper.keep)
            drain(harness, pool)
        else:
            standby = ready_standby(pool)
            drain(harness, pool)
            kill(standby)
            eventually(lambda: keeper.pid != standby)
        time.sleep(0.5)  # ten times the pause before a start
        assert keeper.pid is None

    if is_due:
        monkeypatch.setattr(worker_process, "_STANDBY_DELAY_SECONDS", 3600.0)
    serve_with_standby(body)


def test_ready_standby_takes_over_during_a_drain() -> None:
    def body(harness: EngineHarness, pool: WorkerPool) -> None:
        standby = ready_standby(pool)
        drain(harness, pool)
        kill(pool.pids[0])
        harness.wait_joined(2)
        assert pool.pids[0] == standby

    serve_with_standby(body)


WILLING = """
import signal
from lineclear.process.standby import Standby
standby = Standby.claim()
if standby is not None:
    standby.wait_until_promoted()
signal.pause()
"""


async def test_acknowledgement_after_the_join_starts_no_timer() -> None:
    """The supervisor reads both in one turn of its loop, in either order. A timer set then would kill the worker."""
    exits: list[int] = []
    pool = WorkerPool(
        [sys.executable, "-c", WILLING],
        limits=SupervisorLimits(start_timeout_seconds=0.5),
        standby=True,
        on_exit=lambda pid, code: exits.append(pid),
    )
    pool.start()
    try:
        first = pool.pids[0]
        assert first is not None
        pool.worker_joined(hello(first))
        await until(lambda: pool.standby_pid is not None)
        standby = pool.standby_pid
        assert standby is not None
        kill(standby, signal.SIGSTOP)  # so that it acknowledges after its join is told
        kill(first)
        await until(lambda: pool.pids[0] == standby)
        pool.worker_joined(hello(standby))
        await asyncio.sleep(0.01)
        kill(standby, signal.SIGCONT)
        await asyncio.sleep(0.8)  # longer than a start may take
        assert exits == [first]
        assert pool.pids[0] == standby
    finally:
        await pool.stop()


def test_standby_imports_at_a_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Standby.claim() is None, "a process without a line is none"
    line = StandbyLine()
    (name,) = line.environment()
    monkeypatch.setenv(name, str(os.dup(line.inherited)))
    standby = Standby.claim()
    assert standby is not None
    assert name not in os.environ, "a child of the standby is none"

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def fail() -> None:
        raise ImportError("no")

    before = priority()
    found: list[int] = []
    with pytest.raises(ImportError):
        standby.run_in_background(fail)
    standby.run_in_background(lambda: found.append(priority()))
    assert found == [10]
    assert priority() == before
    line.promote()
    standby.wait_until_promoted()
    assert line.receive() == READY + PROMOTED
    line.close()
