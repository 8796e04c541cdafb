"""Keeps one worker process running: starts, kills, restarts it, and gives it up.

Runs on the main thread's event loop: the kernel's parent-death signal is bound to the thread that started the child,
and the main thread ends last. The engine reports when a worker has joined and when it must be killed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import structlog

from lineclear.exit_codes import ExitCode
from lineclear.process.parent_death import ParentDeathPipe
from lineclear.process.standby import StandbyLine
from lineclear.scheduler.engine.crash_budget import Backoff, CrashBudget
from lineclear.scheduler.engine.worker_process import StandbyKeeper, WorkerProcess
from lineclear.wire.messages import Hello

log = structlog.get_logger()

_PROMOTION_SECONDS = 2.0  # for a standby to acknowledge: it reads and writes one byte
_TRANSIENT_ERRORS = frozenset(
    {
        *(errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.ENOSPC, errno.ENOBUFS),
        *(errno.EIO, errno.EBUSY, errno.ETXTBSY, errno.ESTALE, errno.ETIMEDOUT),
    }
)
"""Errors that prevent a start now and may be over a moment later."""


class GiveUpReason(Enum):
    """Why no further worker is started."""

    CRASHES = "it crashed too often"
    CONFIGURATION = "its configuration is wrong"
    STUCK = "it cannot be killed and still holds its device"
    BUG = "the supervisor failed"


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    """Limits of restarts and waits."""

    max_crashes: int = 5
    """Crashes without progress within `crash_window_seconds` (see `crash_budget`); one more gives the worker up. Failed
    starts count."""
    crash_window_seconds: float = 600.0
    min_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 10.0
    start_timeout_seconds: float = 900.0
    """From the start of the process to its Hello: loading the model."""
    stop_timeout_seconds: float = 10.0
    """From SIGTERM to SIGKILL."""
    reap_timeout_seconds: float = 10.0
    """From SIGKILL to the exit. After that, the process is stuck in the kernel and still holds its device."""


class WorkerSupervisor:
    """Runs `command` and runs it again when it exits. On the main thread, except methods marked "Any thread".

    `on_exit(pid, exit_code)` is called on the event loop within milliseconds of a worker's exit. It may be set after
    `start` in the same callback of the loop. `on_give_up(reason)` is called once, when no further worker will start.
    A command counts as a wrong configuration only until a worker has joined. Later, errors at its start (a missing
    volume, no memory or processes) are failed starts and are tried again.
    The worker inherits standard output and error, and the parent-death pipe in its environment.
    With `standby`, a second process imports a worker's modules and waits (see `lineclear.process.standby`). When the
    worker exits and the standby is ready, it is promoted; otherwise a new process starts. The exit of a standby ends no
    stream and is not counted as a crash.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        limits: SupervisorLimits | None = None,
        environment: Mapping[str, str] | None = None,
        standby: bool = False,
        on_exit: Callable[[int, int], None] = lambda pid, exit_code: None,
        on_give_up: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.num_starts = 0
        self.given_up: GiveUpReason | None = None
        """Set before `on_give_up` is called."""
        self._command = list(command)
        self._limits = limits or SupervisorLimits()
        self._environment = dict(os.environ if environment is None else environment)
        self.on_exit = on_exit
        self._on_give_up = on_give_up
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death_pipe: ParentDeathPipe | None = None
        self._worker: WorkerProcess | None = None
        self._budget = CrashBudget(self._limits.max_crashes, self._limits.crash_window_seconds)
        self._backoff = Backoff(self._limits.min_backoff_seconds, self._limits.max_backoff_seconds)
        self._has_joined = False  # any worker, ever
        self._wants_standby = standby
        self._standby: StandbyKeeper | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._draining = False

    @property
    def pid(self) -> int | None:
        """Process id of the current worker."""
        return None if self._worker is None else self._worker.pid

    @property
    def standby_pid(self) -> int | None:
        """Process id of the standby, once it is ready."""
        return self._standby.pid if self._standby is not None and self._standby.is_ready else None

    def start(self) -> None:
        """Start the first worker. Needs the running event loop of the main thread."""
        assert threading.current_thread() is threading.main_thread(), "the worker dies with the thread that starts it"
        self._loop = asyncio.get_running_loop()
        self._death_pipe = ParentDeathPipe()
        if self._wants_standby:
            self._standby = StandbyKeeper(self._start_process, self._guard, self._limits.start_timeout_seconds)
        self._spawn()

    def worker_joined(self, hello: Hello) -> None:
        """A worker has joined. Any thread."""
        self._call(self._on_joined, hello.pid)

    def worker_broken(self, hello: Hello, reason: str) -> bool:
        """Kill a lost worker if this supervisor has started it; return whether it has. Any thread."""
        worker = self._worker
        if worker is None or worker.pid != hello.pid:
            return False
        self._call(self._kill, hello.pid, reason)
        return True

    def crashes_explained(self) -> None:
        """Forget the crashes so far: the request that caused them has failed. Any thread."""
        self._call(self._budget.progressed)

    def worker_progressed(self) -> None:
        """The joined worker has made progress (see `crash_budget`). Any thread."""
        self._call(self._budget.progressed)

    def _call(self, action: Callable[..., None], *args: object) -> None:
        if self._loop is not None:  # else another program has started the worker
            self._loop.call_soon_threadsafe(self._guard, action, *args)

    def _guard(self, action: Callable[..., None], *args: object) -> None:
        """Call `action`. An event loop only logs an error in a callback; a failed supervisor must end the process."""
        try:
            action(*args)
        except Exception as error:
            self._give_up(GiveUpReason.BUG, f"the supervisor failed: {type(error).__name__}: {error}")

    def drain(self) -> None:
        """Do not replace a worker that exits with code 0: it was stopped too, and no request needs another one.

        No further standby starts. A standby that is ready is still promoted when the worker crashes.
        """
        self._draining = True
        if self._standby is not None:
            self._standby.drain()

    async def stop(self, *, kill: bool = False) -> bool:
        """Stop the worker and start no other one. Return False if it cannot be killed: its device is not free then.

        Sends SIGTERM first, or SIGKILL at once with `kill`. A stopping worker waits for the engine's Goodbye, so call
        this before the engine stops, and with `kill` if the engine has died.
        """
        self._stopping = True
        self._set_timer(None)
        worker, killed = self._worker, True
        if worker is not None:
            if not kill:
                worker.send(signal.SIGTERM)
                kill = not await worker.ended_within(self._limits.stop_timeout_seconds)
                if kill:
                    log.warning("worker_ignored_sigterm", pid=worker.pid)
            if kill:
                worker.send(signal.SIGKILL)
                killed = await worker.ended_within(self._limits.reap_timeout_seconds)
        if self._standby is not None:
            await self._standby.stop(self._limits.reap_timeout_seconds)
        if self._death_pipe is not None:
            self._death_pipe.close()
            self._death_pipe = None
        return killed

    # --- start and exit of a worker ---------------------------------------------------------------------------------

    def _spawn(self) -> None:
        assert self._loop is not None
        self._timer = None
        if self._standby is not None and (standby := self._standby.take()) is not None:
            self._promote(standby)
            return
        try:
            worker = self._start_process()
        except OSError as error:
            problem = f"cannot start {self._command[0]}: {error.strerror or error}"
            if not self._has_joined and error.errno not in _TRANSIENT_ERRORS:
                self._give_up(GiveUpReason.CONFIGURATION, problem)
            else:
                log.error("worker_start_failed", problem=problem)
                self._restart()
            return
        self._watch(worker)
        self._set_timer(self._limits.start_timeout_seconds, self._kill, worker.pid, "it did not join in time")
        log.info("worker_started", pid=worker.pid, start=self.num_starts)

    def _watch(self, worker: WorkerProcess) -> None:
        assert self._loop is not None
        self.num_starts += 1
        self._worker = worker
        self._loop.add_reader(worker.pidfd, self._guard, self._on_exit, worker)

    def _promote(self, standby: WorkerProcess) -> None:
        """Promote a standby that is ready. Until it has acknowledged, its end does not count as a crash."""
        assert self._loop is not None
        assert standby.line is not None
        self._watch(standby)
        self._loop.add_reader(standby.line.fileno, self._guard, self._on_acknowledged, standby)
        standby.line.promote()
        self._set_timer(_PROMOTION_SECONDS, self._kill, standby.pid, "the standby did not answer")
        log.info("worker_started", pid=standby.pid, start=self.num_starts, standby=True)

    def _on_acknowledged(self, standby: WorkerProcess) -> None:
        """Handle that the promoted standby has written to its line or closed it."""
        assert self._loop is not None
        assert standby.line is not None
        if standby.line.receive():
            self._close_line(standby)
            self._set_timer(self._limits.start_timeout_seconds, self._kill, standby.pid, "it did not join in time")
        else:  # the process has exited: its pidfd becomes readable
            self._loop.remove_reader(standby.line.fileno)

    def _close_line(self, worker: WorkerProcess) -> None:
        """Close the line to a promoted standby, which is a normal worker now."""
        assert self._loop is not None
        if worker.line is not None:
            self._loop.remove_reader(worker.line.fileno)
            worker.line.close()
            worker.line = None

    def _start_process(self, line: StandbyLine | None = None) -> WorkerProcess:
        assert self._death_pipe is not None
        return WorkerProcess(self._command, self._environment, self._death_pipe, line)

    def _on_exit(self, worker: WorkerProcess) -> None:
        """Handle that the worker has exited: its pidfd is readable, so reaping does not block."""
        assert self._loop is not None
        self._loop.remove_reader(worker.pidfd)
        was_promoted = worker.line is None
        if worker.line is not None:
            self._loop.remove_reader(worker.line.fileno)
        code = worker.reap()
        self._worker = None
        self._set_timer(None)
        pid = worker.pid
        seconds = round(time.monotonic() - worker.started_at, 3)
        self.on_exit(pid, code)
        if self._stopping or self.given_up is not None or (self._draining and code == 0):
            log.info("worker_exited", pid=pid, exit_code=code, seconds=seconds)
            return
        log.error("worker_crashed", pid=pid, exit_code=code, seconds=seconds)
        if not was_promoted:
            self._spawn()
        elif code == ExitCode.CONFIGURATION and not self._has_joined:
            self._give_up(
                GiveUpReason.CONFIGURATION,
                "the worker cannot run with this configuration; see its last log line",
            )
        else:
            self._restart()

    def _restart(self) -> None:
        """Start a worker after a pause, or give it up, after a crash or a failed start."""
        if self._budget.crashed(time.monotonic()):
            limits = self._limits
            self._give_up(
                GiveUpReason.CRASHES,
                f"the worker crashed more than {limits.max_crashes} times in {limits.crash_window_seconds:g} s without"
                " progress between the crashes",
            )
        else:
            pause = self._backoff.next_seconds()
            has_standby = self._standby is not None and self._standby.is_ready
            self._set_timer(0.0 if has_standby else pause, self._spawn)

    def _give_up(self, kind: GiveUpReason, reason: str) -> None:
        if self.given_up is not None:
            return
        self.given_up = kind
        self._set_timer(None)
        log.error("worker_not_restarted", reason=reason)
        self._on_give_up(reason)

    # --- reports of the engine, and the timer -----------------------------------------------------------------------

    def _on_joined(self, pid: int) -> None:
        if self._worker is not None and self._worker.pid == pid:
            self._has_joined = True
            self._backoff.reset()
            self._set_timer(None)
            self._close_line(self._worker)  # its acknowledgement may not be read yet, and would set the timer again
            if self._standby is not None:
                self._standby.keep()

    def _kill(self, pid: int, reason: str) -> None:
        worker = self._worker
        if worker is None or worker.pid != pid or self._stopping:
            return
        log.warning("worker_killed", pid=pid, reason=reason)
        worker.send(signal.SIGKILL)
        # No second worker while this one may still hold the device.
        seconds = self._limits.reap_timeout_seconds
        self._set_timer(seconds, self._give_up, GiveUpReason.STUCK, f"process {pid} cannot be killed")

    def _set_timer(self, seconds: float | None, action: Callable[..., None] | None = None, *args: object) -> None:
        """Replace the only timer: the supervisor waits for one thing at a time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None and action is not None and self._loop is not None:
            self._timer = self._loop.call_later(seconds, self._guard, action, *args)
