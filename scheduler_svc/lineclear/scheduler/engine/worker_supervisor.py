"""Keeps one worker process running: starts, kills, restarts it, and gives it up.

Runs on the main thread's event loop: the kernel's parent-death signal is bound to the thread that started the child,
and the main thread ends last. `WorkerPool` has one supervisor for each worker.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import structlog

from lineclear.errors import WorkerRestartFailed
from lineclear.exit_codes import ExitCode
from lineclear.scheduler.engine.worker_process import Backoff, LoopTimer, StandbyKeeper, WorkerProcess

log = structlog.get_logger()

_MAX_REAP_WAITS = 12  # for a killed process to exit: the pages of a large one take long to free beside busy processes
_PROMOTION_SECONDS = 2.0  # for a standby to acknowledge: it reads and writes a line
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
    """Limits of restarts and waits, for each worker."""

    max_worker_crashes: int = 5
    """Crashes without progress within `crash_window_seconds` (see `CrashBudget`); one more gives the worker up. Failed
    starts count."""
    crash_window_seconds: float = 600.0
    min_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 10.0
    start_timeout_seconds: float = 900.0
    """From the start of the process to its Hello: loading the model."""
    stop_timeout_seconds: float = 10.0
    """From SIGTERM to SIGKILL."""
    drain_timeout_seconds: float = 30.0
    """How long a worker may run plans after SIGTERM. A restart waits this long, too, before it kills."""
    reap_timeout_seconds: float = 10.0
    """From SIGKILL to the exit. After that, a process in state D is stuck in the kernel and still holds its device. In
    another state it gets twelve times as long."""


class CrashBudget:
    """Allows `max_crashes` crashes without progress within `window_seconds`. Reads no clock.

    As Kubernetes' CrashLoopBackOff, with progress instead of time: a server survives any number of crashes while its
    streams progress. Progress is a confirmed token, because later crashes cannot undo it, or some seconds joined
    without work. A prompt computed in part is no progress: the next worker computes it again.
    """

    def __init__(self, max_crashes: int, window_seconds: float) -> None:
        self._max_crashes = max_crashes
        self._window_seconds = window_seconds
        self._crashes: deque[float] = deque()

    def __len__(self) -> int:
        """Return the crashes without progress so far."""
        return len(self._crashes)

    def progressed(self) -> None:
        """Forget the crashes so far, also if the report arrives after the crash of its worker."""
        self._crashes.clear()

    def crashed(self, now: float) -> bool:
        """Count a crash, of a joined worker or not; return True when the budget is spent."""
        self._crashes.append(now)
        while self._crashes[0] < now - self._window_seconds:
            self._crashes.popleft()
        return len(self._crashes) > self._max_crashes


class WorkerSupervisor:
    """Starts a worker with `flags` and starts it again when it exits. On the main thread's event loop.

    `spawn(flags)` starts a process. `on_exit(pid, exit_code)` is called when it has exited, `on_give_up(kind, reason)`
    once, when no further one will start. A ready process of `standby` is promoted in place of a new process.
    """

    def __init__(
        self,
        number: int,
        flags: Sequence[str],
        spawn: Callable[[Sequence[str]], WorkerProcess],
        limits: SupervisorLimits,
        standby: StandbyKeeper | None,
        guard: Callable[..., None],
        on_exit: Callable[[int, int], None],
        on_give_up: Callable[[GiveUpReason, str], None],
    ) -> None:
        self.number = number
        self.num_starts = 0
        self.recent_pids: tuple[int, ...] = ()
        """Of the current worker and those before it. Replaced, never changed: any thread may read it."""
        self.given_up: GiveUpReason | None = None
        self.budget = CrashBudget(limits.max_worker_crashes, limits.crash_window_seconds)
        self._flags = list(flags)
        self._spawn_process = spawn
        self._limits = limits
        self._standby = standby
        self._guard = guard
        self._on_process_exit = on_exit
        self._on_give_up = on_give_up
        self._worker: WorkerProcess | None = None
        self._backoff = Backoff(limits.min_backoff_seconds, limits.max_backoff_seconds)
        self._has_joined = False  # any worker of this supervisor, ever
        self._timer = LoopTimer(guard)  # the only one: a supervisor waits for one thing at a time
        self.settled = asyncio.Event()
        """The worker has joined, waits to join, or is given up."""
        self._stopping = False
        self.is_draining = False
        """Do not replace a worker that exits with code 0: it was stopped too, and no request needs another one."""
        self._restarting = False  # its process has been sent SIGTERM, and another one follows

    @property
    def pid(self) -> int | None:
        """Process id of the current worker."""
        return None if self._worker is None else self._worker.pid

    async def stop(self, *, kill: bool) -> bool:
        """Stop the worker and start no other one. Return False if it cannot be killed."""
        self._stopping = True
        self._timer.cancel()
        worker = self._worker
        if worker is None:
            self.settled.set()
            return True
        if not kill:
            worker.send(signal.SIGTERM)
            kill = not await worker.ended_within(self._limits.stop_timeout_seconds)
            if kill:
                log.warning("worker_ignored_sigterm", pid=worker.pid)
        if not kill:
            return True
        worker.send(signal.SIGKILL)
        for _ in range(_MAX_REAP_WAITS):
            if await worker.ended_within(self._limits.reap_timeout_seconds):
                return True
            if worker.kernel_state == "D":
                break
        return False

    async def restart(self) -> int:
        """Stop the worker with SIGTERM and start another one; return its pid once it has joined or waits to join.

        A worker that is not running is waited for, and one that is given up is started again with a new crash budget,
        unless its process is stuck. Raises WorkerRestartFailed if it is given up again or the server stops.
        """
        if self.is_draining or self._stopping:
            raise WorkerRestartFailed(f"worker {self.number} was not restarted: {self._reason()}")
        worker = self._worker
        if self.given_up is not None and self.given_up is not GiveUpReason.STUCK:
            log.info("worker_tried_again", worker=self.number, given_up=self.given_up.value)
            self.given_up = None
            self.budget.progressed()
            self._backoff.reset()
            self.settled.clear()
            self.spawn()
        elif worker is not None and not self._restarting:
            self._restarting = True
            self.settled.clear()
            log.info("worker_restarting", pid=worker.pid)
            worker.send(signal.SIGTERM)
            self._kill_after(self._limits.drain_timeout_seconds + self._limits.stop_timeout_seconds, worker, "stop")
        await self.settled.wait()
        if self.given_up is not None or self.pid is None:
            raise WorkerRestartFailed(f"worker {self.number} was not restarted: {self._reason()}")
        return self.pid

    def _reason(self) -> str:
        return "the server is stopping" if self.given_up is None else self.given_up.value

    def spawn(self) -> None:
        """Start a worker: a ready standby, else a new process. Until a standby acknowledges, its end is no crash."""
        worker = None if self._standby is None else self._standby.take()
        if worker is None:
            try:
                worker = self._spawn_process(self._flags)
            except OSError as error:
                problem = f"cannot start {error.filename or 'a worker'}: {error.strerror or error}"
                if not self._has_joined and error.errno not in _TRANSIENT_ERRORS:
                    self.give_up(GiveUpReason.CONFIGURATION, problem)
                else:
                    log.error("worker_start_failed", problem=problem)
                    self._retry()
                return
        self._worker = worker
        self.num_starts += 1
        self.recent_pids = (*self.recent_pids[-3:], worker.pid)
        worker.watch(self._guard, self._on_exit, self._on_acknowledged)
        shown = {"pid": worker.pid, "start": self.num_starts, "worker": self.number}
        if worker.line is None:
            self._kill_after(self._limits.start_timeout_seconds, worker, "join")
        else:
            worker.line.promote(self._flags)
            self._timer.set(_PROMOTION_SECONDS, self.kill, worker.pid, "the standby did not answer")
            shown["standby"] = True
        log.info("worker_started", **shown)

    def _kill_after(self, seconds: float, worker: WorkerProcess, expected: str) -> None:
        self._timer.set(seconds, self.kill, worker.pid, f"it did not {expected} within {seconds:g} s")

    def _on_acknowledged(self, standby: WorkerProcess) -> None:
        """Handle that the promoted standby has written to its line or closed it. It is a normal worker then."""
        if standby.receive():  # else it has exited: its pidfd becomes readable
            standby.close_line()
            self._kill_after(self._limits.start_timeout_seconds, standby, "join")

    def _on_exit(self, worker: WorkerProcess) -> None:
        """Handle that the worker has exited: its pidfd is readable, so reaping does not block."""
        was_promoted, code = worker.line is None, worker.reap()
        self._worker = None
        self.settled.clear()
        self._timer.cancel()
        pid = worker.pid
        seconds = round(time.monotonic() - worker.started_at, 3)
        was_restarting, self._restarting = self._restarting, False
        self._on_process_exit(pid, code)
        if self._stopping or self.given_up is not None or (self.is_draining and code == 0):
            log.info("worker_exited", pid=pid, exit_code=code, seconds=seconds)
            self.settled.set()
        elif was_restarting:
            log.info("worker_exited", pid=pid, exit_code=code, seconds=seconds)
            self.spawn()
        elif code == ExitCode.CONFIGURATION and was_promoted and not self._has_joined:
            log.info("worker_exited", pid=pid, exit_code=code, seconds=seconds)
            self.give_up(
                GiveUpReason.CONFIGURATION, "the worker cannot run with this configuration; see its last log line"
            )
        else:
            log.error("worker_crashed", pid=pid, exit_code=code, seconds=seconds)
            if was_promoted:
                self._retry()
            else:
                self.spawn()

    def _retry(self) -> None:
        """Start a worker after a pause, or give it up, after a crash or a failed start."""
        if self.budget.crashed(time.monotonic()):
            most, window_seconds = self._limits.max_worker_crashes, self._limits.crash_window_seconds
            self.give_up(
                GiveUpReason.CRASHES,
                f"the worker crashed more than {most} times in {window_seconds:g} s without"
                " progress between the crashes",
            )
        else:
            pause = self._backoff.next_seconds()
            has_standby = self._standby is not None and self._standby.is_ready
            self._timer.set(0.0 if has_standby else pause, self.spawn)

    def give_up(self, kind: GiveUpReason, reason: str) -> None:
        """Start no further worker. No effect after the first call."""
        if self.given_up is not None:
            return
        self.given_up = kind
        self._timer.cancel()
        self.settled.set()
        self._on_give_up(kind, reason)

    def on_settled(self, *, has_joined: bool) -> None:
        """The current worker has joined, or waits until it may join, however long that takes."""
        assert self._worker is not None
        if has_joined:
            self._has_joined = True
            self._backoff.reset()
            self._worker.close_line()  # its acknowledgement may not be read yet, and would set the timer again
        if not self._restarting:  # else the timer is that of its end
            self._timer.cancel()
            self.settled.set()

    def kill(self, pid: int, reason: str) -> None:
        """Kill the current worker if it is this process."""
        worker = self._worker
        if worker is None or worker.pid != pid or self._stopping:
            return
        log.warning("worker_killed", pid=pid, reason=reason)
        worker.send(signal.SIGKILL)
        # No second worker while this one may still hold the device.
        self._timer.set(self._limits.reap_timeout_seconds, self._on_not_reaped, worker, 1)

    def _on_not_reaped(self, worker: WorkerProcess, num_waits: int) -> None:
        """Give up a killed worker that the kernel holds. On a busy machine it may only need more time to exit."""
        state, seconds = worker.kernel_state, self._limits.reap_timeout_seconds
        if state != "D" and num_waits < _MAX_REAP_WAITS:
            self._timer.set(seconds, self._on_not_reaped, worker, num_waits + 1)
            return
        self.give_up(
            GiveUpReason.STUCK,
            f"process {worker.pid} cannot be killed: {num_waits * seconds:g} s after SIGKILL it is in state {state}",
        )
