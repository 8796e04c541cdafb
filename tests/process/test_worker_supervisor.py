"""The supervisor: starts, back-off, budget, stop, and nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs
from support.engine_harness import EngineHarness, eventually, kill, request, supervised
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS
from support.toy_worker import ToyOptions
from support.waiting import until

from lineclear.errors import WorkerRestartFailed
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.engine.worker_process import WorkerProcess
from lineclear.scheduler.engine.worker_slot import GiveUpReason, SupervisorLimits
from lineclear.scheduler.engine.worker_supervisor import WorkerSupervisor
from lineclear.wire.messages import Hello

FOR_EVER = [sys.executable, "-c", "import signal; signal.pause()"]
STUBBORN = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
while True:
    signal.pause()
"""


class Calls:
    """Callbacks of a supervisor."""

    def __init__(self) -> None:
        self.exits: list[tuple[float, int]] = []
        self.give_ups: list[str] = []

    def exited(self, pid: int, exit_code: int) -> None:
        self.exits.append((time.monotonic(), pid))


def started(command: list[str], **limits: float | int) -> tuple[WorkerSupervisor, Calls]:
    """Start a supervisor; return its callbacks too."""
    calls = Calls()
    supervisor = WorkerSupervisor(
        command,
        limits=SupervisorLimits(**limits),  # type: ignore[arg-type]
        on_exit=calls.exited,
        on_give_up=calls.give_ups.append,
    )
    supervisor.start()
    return supervisor, calls


def hello(pid: int) -> Hello:
    return Hello(1, 1, 1, 1, 1, 1, (), 1, pid=pid)


Scenario = Callable[[], Coroutine[object, object, None]]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
async def test_crash_starts_a_new_worker_at_once(run: Callable[..., None]) -> None:
    supervisor, calls = started(FOR_EVER)
    first = supervisor.pids[0]
    assert first is not None
    killed_at = time.monotonic()
    os.kill(first, signal.SIGKILL)
    await until(lambda: bool(calls.exits))
    assert calls.exits == [(calls.exits[0][0], first)]
    assert calls.exits[0][0] - killed_at < SOON_SECONDS
    await until(lambda: supervisor.pids[0] not in (None, first))
    assert await supervisor.stop()
    assert supervisor.num_starts == 2


async def test_crashing_worker_is_restarted_until_the_budget_is_spent() -> None:
    supervisor, calls = started(["/bin/false"], max_worker_crashes=4, min_backoff_seconds=0.05, max_backoff_seconds=0.2)
    await until(lambda: bool(calls.give_ups))
    await asyncio.sleep(0.3)  # longer than any back-off: nothing more may start
    assert supervisor.num_starts == 5
    assert supervisor.pids[0] is None
    await supervisor.stop()
    assert calls.give_ups == ["the worker crashed more than 4 times in 600 s without progress between the crashes"]
    moments = [moment for moment, _ in calls.exits]
    pauses = [after - before for before, after in pairwise(moments)]
    for pause, backoff in zip(pauses, (0.05, 0.1, 0.2, 0.2), strict=True):
        assert backoff <= pause < backoff + SOON_SECONDS


async def test_crashes_outside_the_window_are_forgotten() -> None:
    supervisor, calls = started(
        ["/bin/false"], max_worker_crashes=1, crash_window_seconds=0.05, min_backoff_seconds=0.1
    )
    await until(lambda: len(calls.exits) == 4)
    await supervisor.stop()
    assert calls.give_ups == []


async def test_any_number_of_crashes_with_progress_is_survived() -> None:
    supervisor, calls = started(FOR_EVER, max_worker_crashes=1, min_backoff_seconds=0.001)
    for number in range(1, 21):
        await until(lambda number=number: supervisor.num_starts == number)
        pid = supervisor.pids[0]
        assert pid is not None
        supervisor.worker_joined(hello(pid))
        supervisor.worker_progressed(hello(pid))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
    await until(lambda: supervisor.num_starts == 21)
    await supervisor.stop()
    assert calls.give_ups == []


async def test_configuration_that_has_served_is_tried_again(tmp_path: Path) -> None:
    """As when the volume with the model is away for a while: every start ends with 78, which alone is no reason."""
    away = tmp_path / "away"
    command = ["/bin/sh", "-c", f"test -e {away} && exit 78; exec sleep 1000"]

    supervisor, calls = started(command, min_backoff_seconds=0.01, max_backoff_seconds=0.02)
    assert supervisor.pids[0] is not None
    supervisor.worker_joined(hello(supervisor.pids[0]))
    await asyncio.sleep(0)
    away.touch()
    os.kill(supervisor.pids[0], signal.SIGKILL)
    await until(lambda: len(calls.exits) == 4)
    away.unlink()
    last = supervisor.num_starts
    await until(lambda: supervisor.num_starts > last or supervisor.pids[0] is not None)
    assert supervisor.given_up is None
    await supervisor.stop()
    assert calls.give_ups == []


async def test_configuration_that_stays_broken_spends_the_budget(tmp_path: Path) -> None:
    away = tmp_path / "away"
    command = ["/bin/sh", "-c", f"test -e {away} && exit 78; exec sleep 1000"]

    supervisor, calls = started(command, max_worker_crashes=3, min_backoff_seconds=0.001, max_backoff_seconds=0.002)
    assert supervisor.pids[0] is not None
    supervisor.worker_joined(hello(supervisor.pids[0]))
    await asyncio.sleep(0)
    away.touch()
    os.kill(supervisor.pids[0], signal.SIGKILL)
    await until(lambda: bool(calls.give_ups))
    assert supervisor.given_up is GiveUpReason.CRASHES
    await supervisor.stop()
    assert len(calls.exits) == 4


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
@pytest.mark.parametrize("what", ["subprocess.Popen", "os.pidfd_open"])
async def test_lack_of_processes_memory_or_descriptors_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    asked = []
    module, name = (subprocess, "Popen") if what == "subprocess.Popen" else (os, "pidfd_open")
    real = getattr(module, name)

    def short(*args: object, **options: object) -> object:
        asked.append(args)
        if len(asked) <= 3:
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    monkeypatch.setattr(module, name, short)

    supervisor, calls = started(FOR_EVER, min_backoff_seconds=0.001)
    await until(lambda: supervisor.pids[0] is not None)
    assert len(asked) == 4
    await supervisor.stop()
    assert calls.give_ups == []
    assert _zombies() == []


async def test_a_worker_that_joined_resets_the_back_off() -> None:
    supervisor, _ = started(FOR_EVER, max_worker_crashes=20, min_backoff_seconds=0.05, max_backoff_seconds=3600.0)
    for number in range(1, 14):  # without a reset the last pause would be 102 s
        await until(lambda number=number: supervisor.num_starts == number, SOON_SECONDS)
        pid = supervisor.pids[0]
        assert pid is not None
        supervisor.worker_joined(hello(pid))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
    await supervisor.stop()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/bin/sh", "-c", "exit 78"], "cannot run with this configuration"),
        (["/nonexistent"], "cannot start /nonexistent"),
    ],
)
async def test_wrong_configuration_is_not_tried_again(command: list[str], reason: str) -> None:
    supervisor, calls = started(command)
    await until(lambda: bool(calls.give_ups))
    assert supervisor.num_starts <= 1
    await supervisor.stop()
    assert len(calls.give_ups) == 1
    assert reason in calls.give_ups[0]


async def test_a_worker_that_never_joins_is_killed_and_started_again() -> None:
    supervisor, calls = started(FOR_EVER, start_timeout_seconds=0.1)
    await until(lambda: len(calls.exits) == 2)
    await supervisor.stop()
    assert supervisor.num_starts >= 2


async def test_joined_worker_has_no_start_timeout() -> None:
    supervisor, calls = started(FOR_EVER, start_timeout_seconds=0.1)
    assert supervisor.pids[0] is not None
    supervisor.worker_joined(hello(supervisor.pids[0]))
    await asyncio.sleep(0.3)  # three times the limit
    assert calls.exits == []
    await supervisor.stop()


async def test_engine_kills_only_the_supervised_worker() -> None:
    supervisor, calls = started(FOR_EVER)
    pid = supervisor.pids[0]
    assert pid is not None
    assert not supervisor.worker_broken(hello(pid + 1), "somebody else")
    await asyncio.sleep(0.05)
    assert calls.exits == []
    threading.Thread(target=supervisor.worker_broken, args=(hello(pid), "silent")).start()
    await until(lambda: bool(calls.exits))
    await supervisor.stop()


@pytest.mark.parametrize("state", ["D", "R"])
async def test_a_killed_process_is_given_up_once_the_kernel_holds_it(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, a killed process with much memory exits late. Its state is R then."""
    looked: list[int] = []
    supervisor, calls = started(FOR_EVER, reap_timeout_seconds=0.05)
    pid = supervisor.pids[0]
    assert pid is not None
    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "send", lambda process, number: None)  # as if it did not exit
        patch.setattr(WorkerProcess, "kernel_state", property(lambda process: looked.append(process.pid) or state))
        supervisor.worker_broken(hello(pid), "a test")
        await until(lambda: len(looked) >= (1 if state == "D" else 3))
        if state == "D":
            assert calls.give_ups == [f"process {pid} cannot be killed: 0.05 s after SIGKILL it is in state D"]
            assert supervisor.given_up is GiveUpReason.STUCK
        else:
            os.kill(pid, signal.SIGKILL)
            await until(lambda: supervisor.pids[0] not in (None, pid))
            assert calls.give_ups == []
    assert await supervisor.stop(kill=True)


async def test_a_killed_process_is_waited_for_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, calls = started(FOR_EVER, reap_timeout_seconds=0.05)
    pid = supervisor.pids[0]
    assert pid is not None
    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "send", lambda process, number: None)
        patch.setattr(WorkerProcess, "kernel_state", property(lambda process: "R"))
        supervisor.worker_broken(hello(pid), "a test")
        await until(lambda: bool(calls.give_ups))
    assert calls.give_ups == [f"process {pid} cannot be killed: 0.6 s after SIGKILL it is in state R"]
    assert await supervisor.stop(kill=True)


async def test_stop_sends_sigterm_then_sigkill(tmp_path: Path) -> None:
    armed = tmp_path / "armed"

    supervisor, calls = started([sys.executable, "-c", STUBBORN, str(armed)], stop_timeout_seconds=0.3)
    await until(armed.exists)
    begin = time.monotonic()
    assert await supervisor.stop()
    assert 0.3 <= time.monotonic() - begin < SOON_SECONDS
    assert len(calls.exits) == supervisor.num_starts == 1


async def test_stop_during_a_back_off_starts_nothing() -> None:
    supervisor, calls = started(["/bin/false"], min_backoff_seconds=0.3)
    await until(lambda: bool(calls.exits))
    assert await supervisor.stop()
    num_starts = supervisor.num_starts  # 1, unless the machine stalled
    await asyncio.sleep(0.6)  # more than the back-off
    assert supervisor.num_starts == num_starts


def has_ended(pid: int) -> None:
    """Returns when it has, and leaves it to be reaped by others."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_on_exit_set_after_start_misses_no_exit() -> None:
    """The worker has ended by then, and the loop has not turned: the engine is made while the worker is starting."""
    calls = Calls()

    supervisor = WorkerSupervisor(["/bin/false"])
    supervisor.start()
    pid = supervisor.pids[0]
    assert pid is not None
    has_ended(pid)
    supervisor.on_exit = calls.exited
    await until(lambda: bool(calls.exits))
    assert [found for _, found in calls.exits] == [pid]
    await supervisor.stop()


async def test_failing_callback_ends_the_supervisor() -> None:
    give_ups: list[str] = []

    def fail(pid: int, exit_code: int) -> None:
        raise RuntimeError("no")

    supervisor = WorkerSupervisor(["/bin/true"], on_exit=fail, on_give_up=give_ups.append)
    supervisor.start()
    await until(lambda: bool(give_ups))
    await supervisor.stop()
    assert give_ups == ["the supervisor failed: RuntimeError: no"]


async def test_a_worker_does_not_get_the_terminals_interrupt() -> None:
    supervisor, _ = started(FOR_EVER)
    assert supervisor.pids[0] is not None
    assert os.getpgid(supervisor.pids[0]) != os.getpgid(0)
    await supervisor.stop()


async def joined_pids(supervisor: WorkerSupervisor) -> list[int]:
    """Wait until each worker runs, report that it has joined, and return the pids."""
    await until(lambda: None not in supervisor.pids)
    pids = [pid for pid in supervisor.pids if pid is not None]
    for pid in pids:
        supervisor.worker_joined(hello(pid))
    await asyncio.sleep(0)
    return pids


async def test_rolling_restart_waits_for_a_worker_that_starts() -> None:
    """Another worker has just crashed: the one that is left is not stopped before the crashed one serves again."""
    supervisor = WorkerSupervisor(FOR_EVER, flags=((), ()), limits=SupervisorLimits(min_backoff_seconds=0.001))
    supervisor.start()
    try:
        with capture_logs() as lines:
            first, second = await joined_pids(supervisor)
            os.kill(second, signal.SIGKILL)
            await until(lambda: supervisor.pids[1] not in (None, second))
            restart = asyncio.create_task(supervisor.restart_all())
            for _ in range(100):
                await asyncio.sleep(0)
            assert supervisor.pids[0] == first
            assert "worker_restarting" not in [line["event"] for line in lines]
            third = (await joined_pids(supervisor))[1]
            await until(lambda: supervisor.pids[0] not in (None, first))
            assert supervisor.pids[1] == third
            await joined_pids(supervisor)
            await until(lambda: supervisor.pids[1] not in (None, third))
            pids = await joined_pids(supervisor)
            assert await restart == pids
    finally:
        await supervisor.stop(kill=True)


async def test_a_server_that_drains_restarts_no_worker() -> None:
    supervisor = WorkerSupervisor(FOR_EVER, flags=((), ()))
    supervisor.start()
    try:
        pids = await joined_pids(supervisor)
        supervisor.drain()
        with capture_logs() as lines, pytest.raises(WorkerRestartFailed, match="the server is stopping"):
            await supervisor.restart_all()
        assert lines == []
        assert supervisor.pids == pids
    finally:
        await supervisor.stop(kill=True)


async def test_a_stop_ends_a_rolling_restart_that_waits() -> None:
    supervisor = WorkerSupervisor(FOR_EVER, flags=((), ()), limits=SupervisorLimits(min_backoff_seconds=60.0))
    supervisor.start()
    _, second = await joined_pids(supervisor)
    os.kill(second, signal.SIGKILL)
    await until(lambda: supervisor.pids[1] is None)  # for a minute
    restart = asyncio.create_task(supervisor.restart_all())
    await asyncio.sleep(0)
    await supervisor.stop(kill=True)
    with pytest.raises(WorkerRestartFailed, match="the server is stopping"):
        await asyncio.wait_for(restart, PATIENCE_SECONDS)


def _zombies() -> list[str]:
    """Zombie children of this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" and int(parent) == os.getpid():
            found.append(path.parent.name)
    return found


def test_twenty_restarts_leave_no_zombie_and_no_descriptor() -> None:
    options = ToyOptions(min_step_seconds=0.001, max_step_seconds=0.002)
    # So many kills without a step between them would make a request a suspect.
    with EngineHarness(options=options, core=CoreLimits(max_isolated_kills=100)) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            harness.wait_joined()
            streams = [harness.submit(request(i, max_tokens=300)) for i in range(4)]
            before: set[str] = set()
            for number in range(1, 21):
                # What is there now may be half way through a step; it dies all the same.
                kill(supervisor.pids[0])
                harness.wait_joined(number + 1)
                if number == 1:
                    before = descriptors()
            eventually(lambda: len(descriptors()) <= len(before), what="as few descriptors as after the first restart")
            harness.check(streams)

        supervised(harness, body, SupervisorLimits(max_worker_crashes=100, min_backoff_seconds=0.001))
        assert len(harness.joins) == 21
        assert _zombies() == []
        assert harness.snapshot().worker.num_joins == 21


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_spent_budget_is_reported_while_requests_wait() -> None:
    with EngineHarness(
        options=ToyOptions(fault="exit", fault_step=1), core=CoreLimits(max_isolated_crashes=10)
    ) as harness:

        def body(supervisor: WorkerSupervisor) -> None:
            stream = harness.submit(request(1))
            eventually(lambda: bool(harness.give_ups))
            # Supervisor and engine see a death by themselves; the engine may come second.
            eventually(lambda: len(harness.losses) == 3)
            assert stream.end is None

        supervised(harness, body, SupervisorLimits(max_worker_crashes=2, min_backoff_seconds=0.01))
