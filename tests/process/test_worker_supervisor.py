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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from structlog.testing import capture_logs
from support.engine_harness import EngineHarness, eventually, kill, request, supervised
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS
from support.toy_worker import ToyOptions
from support.waiting import until

from lineclear.errors import WorkerRestartFailed
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.engine.worker_process import WorkerProcess
from lineclear.scheduler.engine.worker_supervisor import GiveUpReason, SupervisorLimits
from lineclear.wire.messages import Hello

FOR_EVER = [sys.executable, "-c", "import signal; signal.pause()"]


class Calls:
    def __init__(self) -> None:
        self.exits: list[tuple[float, int]] = []
        self.give_ups: list[str] = []

    def exited(self, pid: int, exit_code: int) -> None:
        self.exits.append((time.monotonic(), pid))


def started(command: list[str], **limits: float | int) -> tuple[WorkerPool, Calls]:
    calls = Calls()
    pool = WorkerPool(
        command,
        limits=SupervisorLimits(**limits),  # type: ignore[arg-type]
        on_exit=calls.exited,
        on_give_up=calls.give_ups.append,
    )
    pool.start()
    return pool, calls


def hello(pid: int) -> Hello:
    return Hello(1, 1, 1, 1, 1, 1, (), 1, pid=pid)


def pid_of(pool: WorkerPool) -> int:
    pid = pool.pids[0]
    assert pid is not None
    return pid


async def joined(pool: WorkerPool) -> list[int]:
    """Wait until each worker runs, report that it has joined, and return the pids."""
    await until(lambda: None not in pool.pids)
    pids = [pid for pid in pool.pids if pid is not None]
    for pid in pids:
        pool.worker_joined(hello(pid))
    await asyncio.sleep(0)
    return pids


async def test_crashing_worker_is_restarted_until_the_budget_is_spent() -> None:
    pool, calls = started(["/bin/false"], max_worker_crashes=4, min_backoff_seconds=0.05, max_backoff_seconds=0.2)
    await until(lambda: bool(calls.give_ups))
    await asyncio.sleep(0.3)  # longer than any back-off: nothing more may start
    assert pool.num_starts == 5
    assert pool.pids[0] is None
    await pool.stop()
    assert calls.give_ups == ["the worker crashed more than 4 times in 600 s without progress between the crashes"]
    moments = [moment for moment, _ in calls.exits]
    pauses = [after - before for before, after in pairwise(moments)]
    for pause, backoff in zip(pauses, (0.05, 0.1, 0.2, 0.2), strict=True):
        assert backoff <= pause < backoff + SOON_SECONDS


async def test_any_number_of_crashes_with_progress_is_survived() -> None:
    """A worker that joined resets the back-off, too: without it the last pause would be 102 s."""
    pool, calls = started(FOR_EVER, max_worker_crashes=1, min_backoff_seconds=0.05, max_backoff_seconds=3600.0)
    for number in range(1, 14):
        await until(lambda number=number: pool.num_starts == number, SOON_SECONDS)
        await joined(pool)
        pool.worker_progressed(hello(pid_of(pool)))
        await asyncio.sleep(0)
        kill(pool.pids[0])
    await until(lambda: pool.num_starts == 14)
    await pool.stop()
    assert calls.give_ups == []


@pytest.mark.parametrize(("max_crashes", "comes_back"), [(50, True), (3, False)])
async def test_configuration_that_has_served_is_tried_again(tmp_path: Path, max_crashes: int, comes_back: bool) -> None:
    """While its model is away every start ends with 78, which alone is no reason to give up, but spends the budget."""
    away = tmp_path / "away"
    command = ["/bin/sh", "-c", f"test -e {away} && exit 78; exec sleep 1000"]
    limits = {"min_backoff_seconds": 0.01, "max_backoff_seconds": 0.02}
    pool, calls = started(command, max_worker_crashes=max_crashes, **limits)
    await joined(pool)
    away.touch()
    kill(pool.pids[0])
    await until(lambda: len(calls.exits) == 4)
    if comes_back:
        away.unlink()
        last = pool.num_starts
        await until(lambda: pool.num_starts > last or pool.pids[0] is not None)
        assert pool.given_up is None
    else:
        await until(lambda: bool(calls.give_ups))
        assert pool.given_up is GiveUpReason.CRASHES
        assert len(calls.exits) == 4
    await pool.stop()
    assert bool(calls.give_ups) != comes_back


@pytest.mark.parametrize(
    ("module", "name", "number"),
    [(subprocess, "Popen", errno.EAGAIN), (subprocess, "Popen", errno.ENOMEM), (os, "pidfd_open", errno.EMFILE)],
)
async def test_lack_of_processes_memory_or_descriptors_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, number: int
) -> None:
    asked = []
    real = getattr(module, name)

    def short(*args: object, **options: object) -> object:
        asked.append(args)
        if len(asked) <= 3:
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    monkeypatch.setattr(module, name, short)

    pool, calls = started(FOR_EVER, min_backoff_seconds=0.001)
    await until(lambda: pool.pids[0] is not None)
    assert len(asked) == 4
    await pool.stop()
    assert calls.give_ups == []
    assert _zombies() == []


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/bin/sh", "-c", "exit 78"], "cannot run with this configuration"),
        (["/nonexistent"], "cannot start /nonexistent"),
    ],
)
async def test_wrong_configuration_is_not_tried_again(command: list[str], reason: str) -> None:
    pool, calls = started(command)
    await until(lambda: bool(calls.give_ups))
    assert pool.num_starts <= 1
    await pool.stop()
    assert len(calls.give_ups) == 1
    assert reason in calls.give_ups[0]


async def test_a_worker_that_never_joins_is_killed_and_started_again() -> None:
    """A joined one has no such limit."""
    pool, calls = started(FOR_EVER, start_timeout_seconds=0.1)
    await until(lambda: len(calls.exits) == 2 and pool.pids[0] is not None)
    await joined(pool)
    num_exits = len(calls.exits)
    await asyncio.sleep(0.3)  # three times the limit
    assert len(calls.exits) == num_exits
    await pool.stop()
    assert pool.num_starts == num_exits + 1


async def test_engine_kills_only_the_supervised_worker() -> None:
    pool, calls = started(FOR_EVER)
    pid = pid_of(pool)
    assert not pool.worker_broken(hello(pid + 1), "somebody else")
    await asyncio.sleep(0.05)
    assert calls.exits == []
    threading.Thread(target=pool.worker_broken, args=(hello(pid), "silent")).start()
    await until(lambda: bool(calls.exits))
    await pool.stop()


@contextmanager
def unkillable(monkeypatch: pytest.MonkeyPatch, state: str) -> Iterator[list[int]]:
    """Workers do not exit at signals, and the kernel reports this state; yield the pids that were looked up."""
    looked: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "send", lambda process, number: None)
        patch.setattr(WorkerProcess, "kernel_state", property(lambda process: looked.append(process.pid) or state))
        yield looked


async def test_a_killed_process_is_given_up_once_the_kernel_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, calls = started(FOR_EVER, reap_timeout_seconds=0.05)
    pid = pid_of(pool)
    with unkillable(monkeypatch, "D") as looked:
        pool.worker_broken(hello(pid), "a test")
        await until(lambda: bool(looked))
        assert calls.give_ups == [f"process {pid} cannot be killed: 0.05 s after SIGKILL it is in state D"]
        assert pool.given_up is GiveUpReason.STUCK
    assert await pool.stop(kill=True)


@pytest.mark.parametrize("exits", [True, False])
async def test_a_killed_process_is_waited_for_within_a_bound(exits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a killed process with much memory exits late. Its state is R then."""
    pool, calls = started(FOR_EVER, reap_timeout_seconds=0.05)
    pid = pid_of(pool)
    with unkillable(monkeypatch, "R") as looked:
        pool.worker_broken(hello(pid), "a test")
        if exits:
            await until(lambda: len(looked) >= 3)
            kill(pid)
            await until(lambda: pool.pids[0] not in (None, pid))
            assert calls.give_ups == []
        else:
            await until(lambda: bool(calls.give_ups))
            assert calls.give_ups == [f"process {pid} cannot be killed: 0.6 s after SIGKILL it is in state R"]
    assert await pool.stop(kill=True)


async def test_stop_kills_a_worker_that_ignores_sigterm() -> None:
    pool, calls = started(FOR_EVER, stop_timeout_seconds=0.2)
    pid = kill(pool.pids[0], signal.SIGSTOP)
    await until(
        lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T"
    )  # of two pending signals, TERM is first
    begin = time.monotonic()
    assert await pool.stop()
    assert time.monotonic() - begin >= 0.2
    assert len(calls.exits) == pool.num_starts == 1


async def test_stop_during_a_back_off_starts_nothing() -> None:
    pool, calls = started(["/bin/false"], min_backoff_seconds=0.3)
    await until(lambda: bool(calls.exits))
    assert await pool.stop()
    num_starts = pool.num_starts  # 1, unless the machine stalled
    await asyncio.sleep(0.6)  # more than the back-off
    assert pool.num_starts == num_starts


def wait_for_end(pid: int) -> None:
    """Wait until the process has ended, and leave it to be reaped by others."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_on_exit_set_after_start_misses_no_exit() -> None:
    """The worker has ended by then, and the loop has not turned: the engine is made while the worker is starting."""
    calls = Calls()
    pool = WorkerPool(["/bin/false"])
    pool.start()
    pid = pid_of(pool)
    wait_for_end(pid)
    pool.on_exit = calls.exited
    await until(lambda: bool(calls.exits))
    assert [found for _, found in calls.exits] == [pid]
    await pool.stop()


async def test_failing_callback_ends_the_supervisor() -> None:
    give_ups: list[str] = []

    def fail(pid: int, exit_code: int) -> None:
        raise RuntimeError("no")

    pool = WorkerPool(["/bin/true"], on_exit=fail, on_give_up=give_ups.append)
    pool.start()
    await until(lambda: bool(give_ups))
    await pool.stop()
    assert give_ups == ["the supervisor failed: RuntimeError: no"]


async def test_a_worker_does_not_get_the_terminals_interrupt() -> None:
    pool, _ = started(FOR_EVER)
    assert os.getpgid(pid_of(pool)) != os.getpgid(0)
    await pool.stop()


async def test_rolling_restart_waits_for_a_worker_that_starts() -> None:
    """Another worker has just crashed: the one that is left is not stopped before the crashed one serves again."""
    pool = WorkerPool(FOR_EVER, flags=((), ()), limits=SupervisorLimits(min_backoff_seconds=0.001))
    pool.start()
    try:
        with capture_logs() as lines:
            first, second = await joined(pool)
            os.kill(second, signal.SIGKILL)
            await until(lambda: pool.pids[1] not in (None, second))
            restart = asyncio.create_task(pool.restart_all())
            for _ in range(100):
                await asyncio.sleep(0)
            assert pool.pids[0] == first
            assert "worker_restarting" not in [line["event"] for line in lines]
            third = (await joined(pool))[1]
            await until(lambda: pool.pids[0] not in (None, first))
            assert pool.pids[1] == third
            await joined(pool)
            await until(lambda: pool.pids[1] not in (None, third))
            pids = await joined(pool)
            assert await restart == pids
    finally:
        await pool.stop(kill=True)


async def test_a_server_that_drains_restarts_no_worker() -> None:
    pool = WorkerPool(FOR_EVER, flags=((), ()))
    pool.start()
    try:
        pids = await joined(pool)
        pool.drain()
        with capture_logs() as lines, pytest.raises(WorkerRestartFailed, match="the server is stopping"):
            await pool.restart_all()
        assert lines == []
        assert pool.pids == pids
    finally:
        await pool.stop(kill=True)


async def test_a_stop_ends_a_rolling_restart_that_waits() -> None:
    pool = WorkerPool(FOR_EVER, flags=((), ()), limits=SupervisorLimits(min_backoff_seconds=60.0))
    pool.start()
    _, second = await joined(pool)
    os.kill(second, signal.SIGKILL)
    await until(lambda: pool.pids[1] is None)  # for a minute
    restart = asyncio.create_task(pool.restart_all())
    await asyncio.sleep(0)
    await pool.stop(kill=True)
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


def test_restarts_leave_no_zombie_and_no_descriptor() -> None:
    options = ToyOptions(min_step_seconds=0.001, max_step_seconds=0.002)
    # So many kills without a step between them would make a request a suspect.
    with EngineHarness(options=options, core=CoreLimits(max_isolated_kills=100)) as harness:

        def body(pool: WorkerPool) -> None:
            harness.wait_joined()
            streams = [harness.submit(request(i, max_tokens=300)) for i in range(4)]
            before = 0
            for number in range(1, 8):
                # What is there now may be half way through a step; it dies all the same.
                kill(pool.pids[0])
                harness.wait_joined(number + 1)
                before = before or num_descriptors()
            eventually(lambda: num_descriptors() <= before, what="as few descriptors as after the first restart")
            harness.check(streams)

        supervised(harness, body, SupervisorLimits(max_worker_crashes=100, min_backoff_seconds=0.001))
        assert len(harness.joins) == harness.snapshot().worker.num_joins == 8
        assert _zombies() == []


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
