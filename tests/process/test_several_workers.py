"""Several workers behind one engine: real processes, real sockets."""

from __future__ import annotations

import asyncio
import os
import random
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
from lineclear.scheduler.engine.worker_session import WorkerTimeouts
from lineclear.scheduler.engine.worker_slot import GiveUpReason, SupervisorLimits
from lineclear.scheduler.engine.worker_supervisor import WorkerSupervisor
from lineclear.wire.messages import Hello, StepPlan

OPTIONS = ToyOptions(num_slots=8, min_step_seconds=0.002, max_step_seconds=0.004)


def both_at_work(harness: EngineHarness, count: int = 2) -> None:
    """Wait until every worker runs requests."""

    def running() -> list[int]:
        return [worker.num_requests_running for worker in harness.engine.snapshot().core.workers]

    eventually(lambda: len(running()) == count and all(running()), what="requests on each worker")


def test_workers_share_the_requests() -> None:
    with EngineHarness(options=OPTIONS) as harness:
        for _ in range(3):
            harness.start_worker()
        harness.wait_joined(3)
        streams = [harness.submit(request(number, max_tokens=100)) for number in range(24)]
        both_at_work(harness, 3)
        harness.check(streams)
        figures = harness.snapshot().workers
        assert [worker.index for worker in figures] == [0, 1, 2]
        assert all(worker.num_steps > 0 for worker in figures)


def test_requests_of_a_killed_worker_continue_on_the_others() -> None:
    """Nothing replaces the killed worker here."""
    with EngineHarness(options=OPTIONS, num_workers=2) as harness:
        killed = harness.workers[0]
        streams = [harness.submit(request(number, max_tokens=200)) for number in range(12)]
        both_at_work(harness)
        killed.kill()
        harness.wait(lambda: len(harness.losses) == 1, what="the loss")
        harness.check(streams)
        assert len(harness.joins) == 2


def test_no_second_plan_for_a_worker_that_a_plan_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineHarness(options=OPTIONS) as harness:
        harness.start_worker(), harness.start_worker()
        harness.wait_joined(2)
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
        streams = [harness.submit(request(number, max_tokens=400)) for number in range(12)]
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
        assert stopped.wait(PATIENCE_SECONDS) == 0
        assert any(stream.end is None for stream in streams), "it did not wait for their end"
        harness.check(streams)


def test_workers_that_stop_together_finish_the_requests() -> None:
    with EngineHarness(options=replace(OPTIONS, drain_timeout_seconds=600.0), num_workers=2) as harness:
        workers = list(harness.workers)
        streams = [harness.submit(request(number, max_tokens=200)) for number in range(12)]
        both_at_work(harness)
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        harness.check(streams)
        assert [worker.wait(PATIENCE_SECONDS) for worker in workers] == [0, 0]


def test_draining_server_leaves_requests_where_they_run() -> None:
    with EngineHarness(options=replace(OPTIONS, drain_timeout_seconds=600.0), num_workers=2) as harness:
        workers = list(harness.workers)
        streams = [harness.submit(request(number, max_tokens=200)) for number in range(12)]
        both_at_work(harness)
        harness.engine.drain()
        workers[0].send_signal(signal.SIGTERM)
        harness.check(streams)
        assert all(stream.end is not None and stream.end.stats.recoveries == 0 for stream in streams)


def test_another_model_waits_for_all_workers() -> None:
    with EngineHarness(options=OPTIONS, num_workers=2) as harness:
        workers = list(harness.workers)
        harness.start_worker(replace(OPTIONS, model="other"))
        eventually(lambda: len(harness.engine.snapshot().workers) == 3)
        assert [figure.state for figure in harness.snapshot().workers] == ["joined", "joined", "waiting"]
        workers[0].kill()
        harness.wait(lambda: len(harness.losses) == 1)
        assert len(harness.joins) == 2
        workers[1].kill()
        harness.wait_joined(3)


# --- supervised -----------------------------------------------------------------------------------------------------

TWO = ((), ())


def test_killed_workers_are_replaced_in_their_slots() -> None:
    # So many kills without progress between them would make a request a suspect.
    limits = CoreLimits(max_batch_size=8, max_isolated_kills=100)
    with EngineHarness(options=OPTIONS, core=limits) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined(2)
            streams = [harness.submit(request(number, max_tokens=400)) for number in range(12)]
            rng = random.Random(1)
            for number in range(3, 13):
                kill(supervisor.pids[rng.randrange(2)])
                harness.wait_joined(number)
            harness.check(streams)

        supervisor = supervised(
            harness, body, SupervisorLimits(max_worker_crashes=100, min_backoff_seconds=0.001), flags=TWO
        )
        assert supervisor.num_starts == 12
        assert harness.snapshot().worker.num_joins == 12


FLAGGED = "import signal, sys; sys.exit(1) if sys.argv[1:] == ['bad'] else signal.pause()"


async def test_one_given_up_worker_does_not_end_the_server() -> None:
    give_ups: list[str] = []
    supervisor = WorkerSupervisor(
        [sys.executable, "-c", FLAGGED],
        flags=[["good"], ["bad"]],
        limits=SupervisorLimits(max_worker_crashes=1, min_backoff_seconds=0.01),
        on_give_up=give_ups.append,
    )
    supervisor.start()
    try:
        await until(lambda: supervisor.num_starts == 3)
        await until(lambda: supervisor.pids[1] is None)
        await asyncio.sleep(0.3)  # longer than any pause
        assert supervisor.num_starts == 3
        assert give_ups == []
        assert supervisor.given_up is None
        with pytest.raises(WorkerRestartFailed, match="worker 1 was not restarted"):
            await supervisor.restart(1)
        for _ in range(2):
            pid = kill(supervisor.pids[0])
            await until(lambda pid=pid: supervisor.pids[0] not in (pid, *([] if give_ups else [None])))
        await until(lambda: bool(give_ups))
        assert supervisor.given_up is GiveUpReason.CRASHES
    finally:
        await supervisor.stop()


async def test_a_restart_revives_a_worker_that_was_given_up(tmp_path: Path) -> None:
    """An operator mends the cause, and asks for a restart: no new server is needed."""
    fault = tmp_path / "fault"
    fault.touch()
    program = (
        f"import os, signal, sys; sys.exit(1) if sys.argv[1:] == ['bad'] and os.path.exists({str(fault)!r}) else 0"
    )
    give_ups: list[str] = []
    supervisor = WorkerSupervisor(
        [sys.executable, "-c", f"{program}; signal.pause()"],
        flags=[["good"], ["bad"]],
        limits=SupervisorLimits(max_worker_crashes=1, min_backoff_seconds=0.01),
        on_give_up=give_ups.append,
    )
    supervisor.start()
    try:
        await until(lambda: supervisor.num_starts == 3 and supervisor.pids[1] is None)
        with pytest.raises(WorkerRestartFailed, match="worker 1 was not restarted: it crashed too often"):
            await supervisor.restart(1)
        fault.unlink()
        restart = asyncio.ensure_future(supervisor.restart(1))
        await until(lambda: supervisor.pids[1] is not None)
        pid = supervisor.pids[1]
        assert pid is not None
        supervisor.worker_joined(Hello(1, 1, 1, 1, 1, 1, (), 1, pid=pid))
        assert await restart == pid
        os.kill(pid, signal.SIGKILL)  # its crash budget is whole again
        await until(lambda: supervisor.pids[1] not in (pid, None))
        assert give_ups == []
    finally:
        await supervisor.stop()


async def test_each_worker_has_its_own_crash_budget() -> None:
    give_ups: list[str] = []
    supervisor = WorkerSupervisor(
        [sys.executable, "-c", FLAGGED],
        flags=[["bad"], ["bad"]],
        limits=SupervisorLimits(max_worker_crashes=2, min_backoff_seconds=0.01),
        on_give_up=give_ups.append,
    )
    supervisor.start()
    await until(lambda: bool(give_ups))
    assert supervisor.num_starts == 6
    await supervisor.stop()
    assert len(give_ups) == 1


def test_one_standby_serves_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_STANDBY_DELAY_SECONDS", 0.01)
    with EngineHarness(options=OPTIONS) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined(2)
            for number, slot in ((3, 1), (4, 0), (5, 1)):
                eventually(lambda: supervisor.standby_pid is not None, what="a standby")
                standby, pid = supervisor.standby_pid, supervisor.pids[slot]
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                harness.wait_joined(number)
                assert supervisor.pids[slot] == standby

        supervised(harness, body, SupervisorLimits(max_worker_crashes=9), standby=True, flags=TWO)


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


async def test_a_promoted_standby_gets_the_flags_of_its_slot(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_STANDBY_DELAY_SECONDS", 0.01)
    file = f"{tmp_path}/flags"
    supervisor = WorkerSupervisor(
        [sys.executable, "-c", ECHO, file],
        flags=[["--device=cpu:0"], ["--device=cpu:1", "--x=a b"]],
        environment=ENVIRONMENT,
        standby=True,
    )

    def lines() -> list[str]:
        if not os.path.exists(file):
            return []
        with open(file) as opened:
            return opened.read().splitlines()

    supervisor.start()
    try:
        await until(lambda: len(lines()) == 2)
        pid = supervisor.pids[1]
        assert pid is not None
        supervisor.worker_joined(Hello(1, 1, 1, 1, 1, 1, (), 1, pid=pid))
        await until(lambda: supervisor.standby_pid is not None)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: len(lines()) == 3)
        assert sorted(lines()[:2]) == ["--device=cpu:0", "--device=cpu:1 --x=a b"]
        assert lines()[2] == "--device=cpu:1 --x=a b"
    finally:
        await supervisor.stop()


@pytest.mark.parametrize("count", [1, 2])
def test_rolling_restart_keeps_every_stream(count: int) -> None:
    with EngineHarness(options=OPTIONS) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined(count)
            streams = [harness.submit(request(number, max_tokens=300)) for number in range(8)]
            harness.wait(lambda: all(stream.tokens for stream in streams))
            before, loop = supervisor.pids, harness.loop
            assert loop is not None
            for number in range(count):
                restarted = asyncio.run_coroutine_threadsafe(supervisor.restart(number), loop)
                assert restarted.result(PATIENCE_SECONDS) == supervisor.pids[number]
            harness.check(streams)
            assert not {*before} & {*supervisor.pids}

        supervisor = supervised(harness, body, SupervisorLimits(max_worker_crashes=0), flags=((),) * count)
        assert supervisor.num_starts == 2 * count
        assert harness.give_ups == []


def test_rolling_restart_takes_over_a_new_model(tmp_path: Path) -> None:
    """The first new worker waits, with its model loaded, until the last one of the old model has left."""
    file = tmp_path / "model"
    file.write_text("old")
    with EngineHarness(options=replace(OPTIONS, model_file=str(file))) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined(2)
            file.write_text("new")
            loop = harness.loop
            assert loop is not None
            for number in range(2):
                asyncio.run_coroutine_threadsafe(supervisor.restart(number), loop).result(PATIENCE_SECONDS)
            harness.wait_joined(4)

        supervisor = supervised(harness, body, SupervisorLimits(max_worker_crashes=0), flags=TWO)
        assert supervisor.num_starts == 4
        assert harness.give_ups == []


def test_a_worker_that_ignores_sigterm_is_killed_and_replaced() -> None:
    limits = SupervisorLimits(max_worker_crashes=0, drain_timeout_seconds=0.2, stop_timeout_seconds=0.2)
    with EngineHarness(options=OPTIONS) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined(2)
            pid, loop = supervisor.pids[0], harness.loop
            assert pid is not None
            assert loop is not None
            os.kill(pid, signal.SIGSTOP)
            begin = time.monotonic()
            asyncio.run_coroutine_threadsafe(supervisor.restart(0), loop).result(PATIENCE_SECONDS)
            assert time.monotonic() - begin >= 0.4
            assert supervisor.pids[0] != pid

        supervised(harness, body, limits, flags=TWO)
