"""Worker processes: start, signal and reap one; keep a standby that is ready to be promoted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import structlog

from lineclear.process import logging_setup
from lineclear.process.parent_death import ParentDeathPipe
from lineclear.process.standby import READY, StandbyLine
from lineclear.scheduler.core.poison_detector import WorkerLoss

log = structlog.get_logger()

_MIN_LIFETIME_SECONDS = 1.0  # from SIGKILL to the exit of a new process
_STANDBY_DELAY_SECONDS = 1.0  # from the join of a worker to the start of its standby: the streams recover first
_STANDBY_MIN_BACKOFF_SECONDS, _STANDBY_MAX_BACKOFF_SECONDS = 1.0, 60.0
_SIGNALS_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)  # a process that crashes ends by other signals


def loss_by_exit(code: int | None) -> WorkerLoss:
    """Return how a worker was lost whose process exited with `code`: negative for a signal, None if unknown."""
    is_from_outside = code is None or code == 0 or -code in _SIGNALS_FROM_OUTSIDE
    return WorkerLoss.KILLED if is_from_outside else WorkerLoss.CRASHED


_Action: TypeAlias = "Callable[[WorkerProcess], None]"


class WorkerProcess:
    """A child process with its pidfd, which becomes readable when it exits.

    With `line` it is a standby until it is promoted. Raises OSError if it cannot start, and then leaves no process.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        lifeline: ParentDeathPipe,
        line: StandbyLine | None = None,
    ) -> None:
        self.started_at = time.monotonic()
        self.line = line
        self.is_ready = line is None
        """Whether the process has imported everything."""
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        own = {} if line is None else line.environment()
        self._process = subprocess.Popen(
            list(command),
            env={**environment, **lifeline.environment(), **own},
            pass_fds=(*lifeline.inherited, *(() if line is None else (line.inherited,))),
            stdin=subprocess.DEVNULL,
            stderr=logging_setup.standard_error_of_children(),
            # A Ctrl-C at the terminal must reach only the scheduler, which needs the worker to drain.
            process_group=0,
        )
        self.pid = self._process.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_MIN_LIFETIME_SECONDS)
            raise

    def watch(self, guard: Callable[..., None], on_exit: _Action, on_message: _Action) -> None:
        """Call `on_exit(self)` when the process has exited, and `on_message(self)` when it has written to its line."""
        self._loop.add_reader(self.pidfd, guard, on_exit, self)
        if self.line is not None:
            self._loop.add_reader(self.line.fileno, guard, on_message, self)

    def receive(self) -> bytes:
        """Return the message on its line, empty if the process has exited. The line is watched no longer."""
        assert self.line is not None
        self._loop.remove_reader(self.line.fileno)
        return self.line.receive()

    def close_line(self) -> None:
        """Close the line to a standby that was promoted or has exited."""
        if self.line is not None:
            self._loop.remove_reader(self.line.fileno)
            self.line.close()
            self.line = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process was reaped."""
        if not self._ended.is_set():
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """Wait for the exited process, close its descriptors and return its exit code, negative for a signal."""
        code = self._process.wait()
        self._loop.remove_reader(self.pidfd)
        os.close(self.pidfd)
        self.close_line()
        self._ended.set()
        return code

    async def ended_within(self, seconds: float) -> bool:
        """Whether the process was reaped, now or within `seconds`."""
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True

    @property
    def kernel_state(self) -> str:
        """The letter of its state in /proc. After SIGKILL: R or Z while it exits, D while the kernel holds it."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return "unknown"


class LoopTimer:
    """At most one pending call on the running event loop: setting another one replaces it. Calls go through `guard`."""

    def __init__(self, guard: Callable[..., None]) -> None:
        self._loop, self._guard = asyncio.get_running_loop(), guard
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float, action: Callable[..., None], *args: object) -> None:
        self.cancel()
        self._handle = self._loop.call_later(seconds, self._guard, action, *args)

    def cancel(self) -> None:
        """Drop the pending call, if there is one."""
        if self._handle is not None:
            self._handle.cancel()


class Backoff:
    """Pauses between starts: `first_seconds`, four times as long after each failure, at most `max_seconds`.

    The pauses of five failed starts, the default budget, add up to 18 s: longer than a short lack of processes or
    memory, or the remount of a volume.
    """

    _FACTOR, _MAX_EXPONENT = 4.0, 32  # an exponent without a bound would overflow a float

    def __init__(self, first_seconds: float, max_seconds: float) -> None:
        self._first_seconds, self._max_seconds = first_seconds, max_seconds
        self._num_failures = 0

    def reset(self) -> None:
        """Return to the first pause: the last start was a success."""
        self._num_failures = 0

    def next_seconds(self) -> float:
        """Return the pause after one more failure."""
        exponent = min(self._num_failures, self._MAX_EXPONENT)
        self._num_failures += 1
        return min(self._max_seconds, self._first_seconds * self._FACTOR**exponent)


class StandbyKeeper:
    """Keeps one standby ready after the first `keep`. On the event loop.

    A standby that exits is replaced, at most once a minute if it keeps exiting. A standby that is not ready within
    `ready_timeout_seconds` is killed. Neither affects the serving worker or the crash budget. A drain starts none.
    """

    def __init__(
        self, spawn: Callable[[StandbyLine], WorkerProcess], guard: Callable[..., None], ready_timeout_seconds: float
    ) -> None:
        self._spawn = spawn
        self._guard = guard
        self._ready_timeout_seconds = ready_timeout_seconds
        self._standby: WorkerProcess | None = None
        self._backoff = Backoff(_STANDBY_MIN_BACKOFF_SECONDS, _STANDBY_MAX_BACKOFF_SECONDS)
        self._timer = LoopTimer(guard)
        self._draining = False

    @property
    def pid(self) -> int | None:
        """Process id of the current standby."""
        return None if self._standby is None else self._standby.pid

    @property
    def is_ready(self) -> bool:
        """Whether a standby has imported everything."""
        return self._standby is not None and self._standby.is_ready

    def keep(self) -> None:
        """Start a standby in a moment, after the streams of the joined worker have recovered."""
        if self._standby is None and not self._draining:
            self._backoff.reset()
            self._timer.set(_STANDBY_DELAY_SECONDS, self._start)

    def take(self) -> WorkerProcess | None:
        """Return the standby if it is ready, not promoted yet and to be watched by the caller.

        A standby that still imports stays: it runs at a low priority that it cannot raise, so a new process may be
        faster. A standby that is due is not started before a worker has joined, which needs the processor now.
        """
        standby = self._standby
        if standby is None:
            self._timer.cancel()
        elif standby.is_ready:
            self._standby = None
            return standby
        return None

    def drain(self) -> None:
        """Start no further standby. The current one stays and can be taken."""
        self._draining = True
        if self._standby is None:
            self._timer.cancel()

    async def stop(self, seconds: float) -> None:
        """Kill the standby and start no further one."""
        self._draining = True
        self._timer.cancel()
        if (standby := self._standby) is not None:
            standby.send(signal.SIGKILL)
            await standby.ended_within(seconds)

    def _start(self) -> None:
        try:
            line = StandbyLine()
            try:
                self._standby = standby = self._spawn(line)
            except BaseException:
                line.close()
                raise
            line.started()
        except OSError as error:
            log.warning("standby_start_failed", problem=error.strerror or str(error))
            self._timer.set(self._backoff.next_seconds(), self._start)
            return
        standby.watch(self._guard, self._on_exit, self._on_message)
        self._timer.set(self._ready_timeout_seconds, standby.send, signal.SIGKILL)
        log.info("standby_started", pid=standby.pid)

    def _on_message(self, standby: WorkerProcess) -> None:
        if standby.receive() == READY:
            standby.is_ready = True
            self._timer.cancel()
            seconds = round(time.monotonic() - standby.started_at, 3)
            log.info("standby_ready", pid=standby.pid, seconds=seconds)

    def _on_exit(self, standby: WorkerProcess) -> None:
        code = standby.reap()
        self._standby = None
        self._timer.cancel()
        if self._draining:
            return
        log.warning("standby_exited", pid=standby.pid, exit_code=code)
        self._timer.set(self._backoff.next_seconds(), self._start)
