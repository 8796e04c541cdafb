"""Several workers behind one engine: real processes, real sockets."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine_harness import ENVIRONMENT, EngineHarness, eventually, kill, request, supervised
from support.time_limits import PATIENCE_SECONDS
from support.toy_worker import ToyOptions
from support.waiting import until

from lineclear.errors import WorkerRestartFailed
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.engine import worker_process
from lineclear.scheduler.engine.worker_link import WorkerGone
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_session import WorkerTimeouts
from lineclear.scheduler.engine.worker_supervisor import GiveUpReason, SupervisorLimits
from lineclear.wire.messages import Hello, StepPlan

OPTIONS = ToyOptions(num_slots=8, min_step_seconds=0.002, max_step_seconds=0.004)


def both_at_work(harness: EngineHarness) -> None:
    def running() -> list[int]:
        return [worker.num_requests_running for worker in harness.engine.snapshot().core.workers]

    eventually(lambda: len(running()) == 2 and all(running()), what="requests on each worker")


def test_requests_of_a_killed_worker_continue_on_the_others() -> None:
    """Nothing replaces the killed worker here."""
    with EngineHarness(options=OPTIONS, num_workers=2) as harness:
        streams = [harness.submit(request(number, max_tokens=200)) for number in range(12)]
        both_at_work(harness)
        harness.workers[0].kill()
        harness.wait(lambda: len(harness.losses) == 1, what="the loss")
        harness.check(streams)
        assert len(harness.joins) == 2


def test_no_second_plan_for_a_worker_that_a_plan_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineHarness(options=OPTIONS, num_workers=2) as harness:
        send, unreachable = harness.link.send, harness.joins[0][1]
        tried: list[int] = []

        def send_to_the_other(plan: StepPlan) -> None:
            if plan.epoch == unreachable:
                tried.append(plan.step)
                raise WorkerGone
            send(plan)

        monkeypatch.setattr(harness.link, "send", send_to_the_other)
        harness.check([harness.submit(request(number, max_tokens=50)) for number in range(12)])
        assert len(tried) == 1


def test_a_hung_worker_delays_no_stream_of_the_other() -> None:
    timeouts = WorkerTimeouts(heartbeat_timeout_seconds=3.0)
    with EngineHarness(options=OPTIONS, timeouts=timeouts, num_workers=2) as harness:
        hung = harness.workers[0]
        streams = [harness.submit(request(number, max_tokens=200)) for number in range(12)]
        both_at_work(harness)
        hung.send_signal(signal.SIGSTOP)
        harness.wait(lambda: any(stream.end is not None for stream in streams), what="an end on the other worker")
        assert harness.losses == [], "the streams of the other worker went on before the silence was over"
        harness.check(streams)
        assert len(harness.losses) == 1


def test_a_stopped_worker_hands_its_requests_over_at_once() -> None:
    with EngineHarness(options=replace(OPTIONS, drain_timeout_seconds=600.0), num_workers=2) as harness:
        stopped = harness.workers[0]
        streams = [harness.submit(request(number, max_tokens=450)) for number in range(12)]
        both_at_work(harness)
        stopped.send_signal(signal.SIGTERM)
        harness.wait(lambda: len(harness.losses) == 1, what="the loss")
        assert any(stream.end is None for stream in streams), "it did not wait for their end"
        harness.check(streams)
        assert stopped.wait(PATIENCE_SECONDS) == 0


def test_workers_that_stop_together_finish_the_requests() -> None:
    with EngineHarness(options=replace(OPTIONS, drain_timeout_seconds=600.0), num_workers=2) as harness:
        streams = [harness.submit(request(number, max_tokens=200)) for number in range(12)]
        both_at_work(harness)
        for worker in harness.workers:
            worker.send_signal(signal.SIGTERM)
        harness.check(streams)
        assert [worker.wait(PATIENCE_SECONDS) for worker in harness.workers] == [0, 0]


def test_draining_server_leaves_requests_where_they_run() -> None:
    with EngineHarness(options=replace(OPTIONS, drain_timeout_seconds=600.0), num_workers=2) as harness:
        streams = [harness.submit(request(number, max_tokens=200)) for number in range(12)]
        both_at_work(harness)
        harness.engine.drain()
        harness.workers[0].send_signal(signal.SIGTERM)
        harness.check(streams)
        assert all(stream.end is not None and stream.end.stats.recoveries == 0 for stream in streams)


def test_another_model_waits_for_all_workers() -> None:
    with EngineHarness(options=OPTIONS, num_workers=2) as harness:
        first, second = harness.workers
        harness.start_worker(replace(OPTIONS, model="other"))
        eventually(lambda: len(harness.engine.snapshot().workers) == 3)
        assert [figure.state for figure in harness.snapshot().workers] == ["joined", "joined", "waiting"]
        first.kill()
        harness.wait(lambda: len(harness.losses) == 1)
        assert len(harness.joins) == 2
        second.kill()
        harness.wait_joined(3)


TWO = ((), ())


def test_killed_workers_are_replaced_in_their_slots() -> None:
    # So many kills without progress between them would make a request a suspect.
    with EngineHarness(options=OPTIONS, core=CoreLimits(max_batch_size=8, max_isolated_kills=100)) as harness:

        def body(pool: WorkerPool) -> None:
            harness.wait_joined(2)
            streams = [harness.submit(request(number, max_tokens=400)) for number in range(12)]
            for number, slot in ((3, 0), (4, 0), (5, 1), (6, 0), (7, 1)):
                kill(pool.pids[slot])
                harness.wait_joined(number)
            harness.check(streams)

        limits = SupervisorLimits(max_worker_crashes=100, min_backoff_seconds=0.001)
        assert supervised(harness, body, limits, flags=TWO).num_starts == 7
        assert harness.snapshot().worker.num_joins == 7


FLAGGED = """
import os, signal, sys
if sys.argv[2] == "bad" and not os.path.exists(sys.argv[1]):
    sys.exit(1)
signal.pause()
"""


def started_with_a_bad_worker(tmp_path: Path, give_ups: list[str]) -> WorkerPool:
    """Start two workers, of which the second one exits until the file `mended` exists."""
    pool = WorkerPool(
        [sys.executable, "-c", FLAGGED, str(tmp_path / "mended")],
        flags=[["good"], ["bad"]],
        limits=SupervisorLimits(max_worker_crashes=1, min_backoff_seconds=0.01),
        on_give_up=give_ups.append,
    )
    pool.start()
    return pool


async def test_one_given_up_worker_does_not_end_the_server(tmp_path: Path) -> None:
    """Each worker has a crash budget of its own."""
    give_ups: list[str] = []
    pool = started_with_a_bad_worker(tmp_path, give_ups)
    try:
        await until(lambda: pool.num_starts == 3 and pool.pids[1] is None)
        await asyncio.sleep(0.3)  # longer than any pause
        assert pool.num_starts == 3
        assert give_ups == []
        assert pool.given_up is None
        for _ in range(2):
            pid = kill(pool.pids[0])
            await until(lambda pid=pid: pool.pids[0] not in (pid, *([] if give_ups else [None])))
        await until(lambda: bool(give_ups))
        assert pool.given_up is GiveUpReason.CRASHES
        assert len(give_ups) == 1
    finally:
        await pool.stop()


async def test_a_restart_revives_a_worker_that_was_given_up(tmp_path: Path) -> None:
    """An operator mends the cause, and asks for a restart: no new server is needed."""
    give_ups: list[str] = []
    pool = started_with_a_bad_worker(tmp_path, give_ups)
    try:
        await until(lambda: pool.num_starts == 3 and pool.pids[1] is None)
        with pytest.raises(WorkerRestartFailed, match="worker 1 was not restarted: it crashed too often"):
            await pool.restart(1)
        (tmp_path / "mended").touch()
        restart = asyncio.ensure_future(pool.restart(1))
        await until(lambda: pool.pids[1] is not None)
        pid = pool.pids[1]
        assert pid is not None
        pool.worker_joined(Hello(1, 1, 1, 1, 1, 1, (), 1, pid=pid))
        assert await restart == pid
        kill(pid)  # its crash budget is whole again
        await until(lambda: pool.pids[1] not in (pid, None))
        assert give_ups == []
    finally:
        await pool.stop()


ECHO = """
import signal, sys
from lineclear.process.standby import Standby
standby = Standby.claim()
flags = sys.argv[2:]
if standby is not None:
    flags += standby.wait_until_promoted()
with open(sys.argv[1], "a") as file:
    file.write(" ".join(flags) + "\\n")
signal.pause()
"""


async def test_a_promoted_standby_gets_the_flags_of_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One standby serves all workers."""
    monkeypatch.setattr(worker_process, "_STANDBY_DELAY_SECONDS", 0.01)
    file = tmp_path / "flags"
    file.touch()
    flags = ["--device=cpu:0", "--device=cpu:1 --x=a b"]
    pool = WorkerPool(
        [sys.executable, "-c", ECHO, str(file)],
        flags=[["--device=cpu:0"], ["--device=cpu:1", "--x=a b"]],
        environment=ENVIRONMENT,
        standby=True,
    )

    def lines() -> list[str]:
        return file.read_text().splitlines()

    pool.start()
    try:
        await until(lambda: len(lines()) == 2)
        assert sorted(lines()) == flags
        for count, slot in ((3, 1), (4, 0)):
            pid = pool.pids[slot]
            assert pid is not None
            pool.worker_joined(Hello(1, 1, 1, 1, 1, 1, (), 1, pid=pid))
            await until(lambda: pool.standby_pid is not None)
            standby = pool.standby_pid
            kill(pid)
            await until(lambda count=count: len(lines()) == count)
            assert pool.pids[slot] == standby
            assert lines()[-1] == flags[slot]
    finally:
        await pool.stop()


def restart_all(harness: EngineHarness, pool: WorkerPool) -> None:
    assert harness.loop is not None
    restarted = asyncio.run_coroutine_threadsafe(pool.restart_all(), harness.loop)
    assert restarted.result(PATIENCE_SECONDS) == pool.pids


@pytest.mark.parametrize("count", [1, 2])
def test_rolling_restart_keeps_every_stream(count: int) -> None:
    with EngineHarness(options=OPTIONS) as harness:

        def body(pool: WorkerPool) -> None:
            harness.wait_joined(count)
            streams = [harness.submit(request(number, max_tokens=300)) for number in range(8)]
            harness.wait(lambda: all(stream.tokens for stream in streams))
            before = pool.pids
            restart_all(harness, pool)
            harness.check(streams)
            assert not {*before} & {*pool.pids}

        pool = supervised(harness, body, SupervisorLimits(max_worker_crashes=0), flags=((),) * count)
        assert pool.num_starts == 2 * count
        assert harness.give_ups == []


def test_rolling_restart_takes_over_a_new_model(tmp_path: Path) -> None:
    """The first new worker waits, with its model loaded, until the last one of the old model has left."""
    file = tmp_path / "model"
    file.write_text("old")
    with EngineHarness(options=replace(OPTIONS, model_file=str(file))) as harness:

        def body(pool: WorkerPool) -> None:
            harness.wait_joined(2)
            file.write_text("new")
            restart_all(harness, pool)
            harness.wait_joined(4)

        pool = supervised(harness, body, SupervisorLimits(max_worker_crashes=0), flags=TWO)
        assert pool.num_starts == 4
        assert harness.give_ups == []


def test_a_worker_that_ignores_sigterm_is_killed_and_replaced() -> None:
    limits = SupervisorLimits(max_worker_crashes=0, drain_timeout_seconds=0.2, stop_timeout_seconds=0.2)
    with EngineHarness(options=OPTIONS) as harness:

        def body(pool: WorkerPool) -> None:
            harness.wait_joined()
            pid = kill(pool.pids[0], signal.SIGSTOP)
            begin = time.monotonic()
            restart_all(harness, pool)
            assert time.monotonic() - begin >= 0.4
            assert pool.pids[0] != pid

        supervised(harness, body, limits)
