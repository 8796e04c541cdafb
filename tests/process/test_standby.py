"""The standby worker: promoted when the worker exits, replaced when it exits itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest
from support.engine_harness import EngineHarness, eventually, kill, request, supervised
from support.toy_worker import ToyOptions
from support.waiting import until

from lineclear.process.standby import PROMOTED, READY, Standby, StandbyLine
from lineclear.scheduler.engine import worker_process, worker_slot
from lineclear.scheduler.engine.worker_slot import SupervisorLimits
from lineclear.scheduler.engine.worker_supervisor import WorkerSupervisor
from lineclear.wire.messages import Hello

OPTIONS = ToyOptions(min_step_seconds=0.002, max_step_seconds=0.004)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start standbys without a pause."""
    monkeypatch.setattr(worker_process, "_STANDBY_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(worker_process, "_STANDBY_MIN_BACKOFF_SECONDS", 0.01)


def ready_standby(supervisor: WorkerSupervisor) -> int:
    eventually(lambda: supervisor.standby_pid is not None, what="a standby")
    pid = supervisor.standby_pid
    assert pid is not None
    return pid


def hello(pid: int) -> Hello:
    return Hello(1, 1, 1, 1, 1, 1, (), 1, pid=pid)


def test_the_standby_takes_over_and_another_one_is_kept() -> None:
    with EngineHarness(options=OPTIONS) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined()
            streams = [harness.submit(request(number, max_tokens=400)) for number in range(4)]
            for number in range(2, 5):
                standby = ready_standby(supervisor)
                kill(supervisor.pids[0])
                harness.wait_joined(number)
                assert supervisor.pids[0] == standby
            harness.check(streams)

        supervisor = supervised(harness, body, SupervisorLimits(max_worker_crashes=3), standby=True)
        assert supervisor.num_starts == 4


def test_standby_crash_costs_no_stream_and_no_budget() -> None:
    with EngineHarness(options=OPTIONS) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined()
            worker = supervisor.pids[0]
            stream = harness.submit(request(1, max_tokens=400))
            killed = set()
            for _ in range(3):
                killed.add(standby := ready_standby(supervisor))
                kill(standby)
                eventually(lambda standby=standby: supervisor.standby_pid != standby)  # type: ignore[misc]
            assert len(killed) == 3
            harness.check([stream])
            assert supervisor.pids[0] == worker

        supervised(harness, body, SupervisorLimits(max_worker_crashes=0), standby=True)
        assert harness.give_ups == []


def test_a_standby_that_hangs_is_killed_and_a_new_worker_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_slot, "_PROMOTION_SECONDS", 0.2)
    with EngineHarness(options=OPTIONS) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined()
            stream = harness.submit(request(1, max_tokens=400))
            harness.wait(lambda: len(stream.tokens) > 4)
            hung = ready_standby(supervisor)
            kill(hung, signal.SIGSTOP)
            kill(supervisor.pids[0])
            harness.wait_joined(2)
            assert supervisor.pids[0] != hung
            harness.check([stream])

        # One end is survived: the worker's. That of the standby does not count.
        supervised(harness, body, SupervisorLimits(max_worker_crashes=1), standby=True)
        assert harness.give_ups == []


def test_a_standby_that_still_imports_is_not_promoted() -> None:
    """It imports at a low priority that it cannot raise: beside a busy process a new worker is ready before it."""
    with EngineHarness(options=replace(OPTIONS, import_seconds=1.0)) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined()
            stream = harness.submit(request(1, max_tokens=400))
            keeper = supervisor._standby
            assert keeper is not None
            eventually(lambda: keeper.pid is not None)
            importing, worker = keeper.pid, supervisor.pids[0]
            kill(worker)
            harness.wait_joined(2)
            assert supervisor.pids[0] not in (importing, worker)
            # It goes on, and is there for the next end.
            assert ready_standby(supervisor) == importing
            kill(supervisor.pids[0])
            harness.wait_joined(3)
            assert supervisor.pids[0] == importing
            harness.check([stream])

        supervised(harness, body, SupervisorLimits(min_backoff_seconds=0.01), standby=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, None], ids=["one that is killed", "one that is due"])
def test_no_standby_is_started_during_a_drain(number: signal.Signals | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineHarness(options=OPTIONS) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined()
            keeper, loop = supervisor._standby, harness.loop
            assert keeper is not None
            assert loop is not None
            if number is not None:
                standby = ready_standby(supervisor)
                loop.call_soon_threadsafe(supervisor.drain)
                kill(standby, number)
                eventually(lambda: keeper.pid != standby)
            else:
                eventually(lambda: keeper._timer is not None)
                loop.call_soon_threadsafe(supervisor.drain)
            time.sleep(1.0)  # hundred times the pause before a start
            assert keeper.pid is None

        if number is None:
            monkeypatch.setattr(worker_process, "_STANDBY_DELAY_SECONDS", 0.5)
        supervised(harness, body, standby=True)


def test_ready_standby_takes_over_during_a_drain() -> None:
    with EngineHarness(options=OPTIONS) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined()
            stream = harness.submit(request(1, max_tokens=400))
            harness.wait(lambda: len(stream.tokens) > 4)
            standby = ready_standby(supervisor)
            assert harness.loop is not None
            harness.loop.call_soon_threadsafe(supervisor.drain)
            kill(supervisor.pids[0])
            harness.wait_joined(2)
            assert supervisor.pids[0] == standby
            harness.check([stream])

        supervised(harness, body, standby=True)


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
    supervisor = WorkerSupervisor(
        [sys.executable, "-c", WILLING],
        limits=SupervisorLimits(start_timeout_seconds=1.0),
        standby=True,
        on_exit=lambda pid, code: exits.append(pid),
    )
    supervisor.start()
    try:
        first = supervisor.pids[0]
        assert first is not None
        supervisor.worker_joined(hello(first))
        await until(lambda: supervisor.standby_pid is not None)
        standby = supervisor.standby_pid
        assert standby is not None
        kill(standby, signal.SIGSTOP)  # so that it acknowledges after its join is told
        kill(first)
        await until(lambda: supervisor.pids[0] == standby)
        supervisor.worker_joined(hello(standby))
        await asyncio.sleep(0.01)
        kill(standby, signal.SIGCONT)
        await asyncio.sleep(1.5)  # longer than a start may take
        assert exits == [first]
        assert supervisor.pids[0] == standby
    finally:
        await supervisor.stop()


def claimed(line: StandbyLine, monkeypatch: pytest.MonkeyPatch) -> Standby:
    """The other end of the line, as a process that has inherited it finds it."""
    (name,) = line.environment()
    monkeypatch.setenv(name, str(os.dup(line.inherited)))
    standby = Standby.claim()
    assert standby is not None
    return standby


def test_standby_imports_at_a_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    line = StandbyLine()
    standby = claimed(line, monkeypatch)
    assert not line.environment().keys() & os.environ.keys()  # a child of the standby is none
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    found: list[int] = []
    standby.run_in_background(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    assert found == [10]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    line.promote()
    standby.wait_until_promoted()
    assert line.receive() == READY + PROMOTED
    line.close()


def test_import_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    line = StandbyLine()
    standby = claimed(line, monkeypatch)

    def fail() -> None:
        raise ImportError("no")

    with pytest.raises(ImportError):
        standby.run_in_background(fail)
    line.close()


def test_without_a_line_a_process_is_no_standby() -> None:
    assert Standby.claim() is None
