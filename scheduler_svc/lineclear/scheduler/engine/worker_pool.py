"""Keeps the worker processes running: a supervisor for each worker, and one standby for all.

A worker that dies is replaced by the standby if it is ready, else by a new process. Each worker has its own crash
budget and backoff. The workers that are left serve on when one is given up.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog

from lineclear.errors import WorkerRestartFailed
from lineclear.process.parent_death import ParentDeathPipe
from lineclear.process.standby import StandbyLine
from lineclear.scheduler.engine.engine_stats import WantedWorker
from lineclear.scheduler.engine.worker_process import StandbyKeeper, WorkerProcess
from lineclear.scheduler.engine.worker_supervisor import GiveUpReason, SupervisorLimits, WorkerSupervisor
from lineclear.wire.messages import Hello

log = structlog.get_logger()


class WorkerPool:
    """Runs `command` once for each entry of `flags`. On the main thread, except methods marked "Any thread".

    An entry of `flags` is appended to the command of that worker. `on_exit(pid, exit_code)` is called on the event loop
    within milliseconds of a worker's exit. It may be set after `start` in the same callback of the loop.
    `on_give_up(reason)` is called once, when no further worker will start and none is left.
    A command counts as a wrong configuration only until its worker has joined. Later, errors at its start (a missing
    volume, no memory or processes) are failed starts and are tried again.
    Workers inherit standard output and error, and the parent-death pipe in their environment.
    With `standby`, one more process imports a worker's modules and waits (see `lineclear.process.standby`). It is
    promoted for whichever worker exits first. The exit of a standby ends no stream and is not counted as a crash.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        flags: Sequence[Sequence[str]] = ((),),
        limits: SupervisorLimits | None = None,
        environment: Mapping[str, str] | None = None,
        standby: bool = False,
        on_exit: Callable[[int, int], None] = lambda pid, exit_code: None,
        on_give_up: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.given_up: GiveUpReason | None = None
        """Set before `on_give_up` is called."""
        self._command = list(command)
        self._flags = flags
        self._limits = limits or SupervisorLimits()
        self._environment = dict(os.environ if environment is None else environment)
        self.on_exit = on_exit
        self._on_give_up = on_give_up
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death_pipe: ParentDeathPipe | None = None
        self._wants_standby = standby
        self._standby: StandbyKeeper | None = None
        self._supervisors: list[WorkerSupervisor] = []

    @property
    def pids(self) -> list[int | None]:
        """Process id of each worker; None while it is not running."""
        return [supervisor.pid for supervisor in self._supervisors]

    def wanted(self) -> tuple[WantedWorker, ...]:
        """Return the workers, those that are given up included. Empty if another program starts them. Any thread."""
        return tuple(
            WantedWorker(supervisor.number, supervisor.pid, supervisor.given_up is not None)
            for supervisor in self._supervisors
        )

    def number_of(self, hello: Hello) -> int | None:
        """Return the number of a worker; None if another program has started it. Any thread."""
        return next(
            (supervisor.number for supervisor in self._supervisors if hello.pid in supervisor.recent_pids), None
        )

    @property
    def num_starts(self) -> int:
        """Workers that were started so far."""
        return sum(supervisor.num_starts for supervisor in self._supervisors)

    @property
    def standby_pid(self) -> int | None:
        """Process id of the standby, once it is ready."""
        return self._standby.pid if self._standby is not None and self._standby.is_ready else None

    def start(self) -> None:
        """Start the workers. Needs the running event loop of the main thread."""
        assert threading.current_thread() is threading.main_thread(), "a worker dies with the thread that starts it"
        self._loop = asyncio.get_running_loop()
        self._death_pipe = ParentDeathPipe()
        if self._wants_standby:
            spawn = partial(self._spawn, ())
            self._standby = StandbyKeeper(spawn, self._guard, self._limits.start_timeout_seconds)
        for number, flags in enumerate(self._flags):
            self._supervisors.append(
                WorkerSupervisor(
                    number,
                    flags,
                    self._spawn,
                    self._limits,
                    self._standby,
                    self._guard,
                    lambda pid, code: self.on_exit(pid, code),
                    self._on_given_up,
                )
            )
        for supervisor in self._supervisors:
            supervisor.spawn()

    def drain(self) -> None:
        """Do not replace a worker that exits with code 0: it was stopped too, and no request needs another one.

        No further standby starts. A standby that is ready is still promoted when a worker crashes.
        """
        for supervisor in self._supervisors:
            supervisor.is_draining = True
        if self._standby is not None:
            self._standby.drain()

    async def stop(self, *, kill: bool = False) -> bool:
        """Stop all workers and start no other one. Return False if one cannot be killed: its device is not free then.

        Sends SIGTERM first, or SIGKILL at once with `kill`. A stopping worker waits for the engine's Goodbye, so call
        this before the engine stops, and with `kill` if the engine has died.
        """
        killed = await asyncio.gather(*(supervisor.stop(kill=kill) for supervisor in self._supervisors))
        if self._standby is not None:
            await self._standby.stop(self._limits.reap_timeout_seconds)
        if self._death_pipe is not None:
            self._death_pipe.close()
            self._death_pipe = None
        return all(killed)

    async def restart(self, number: int) -> int:
        """Restart one worker; return the pid of the new one once it has joined. Raises WorkerRestartFailed."""
        self._check_lives()
        return await self._supervisors[number].restart()

    async def restart_all(self) -> list[int]:
        """Restart one worker after the other; return the pids of the new ones. Raises WorkerRestartFailed.

        A worker is restarted once all others have joined, so that those carry its requests on.
        """
        if not self._supervisors:
            raise WorkerRestartFailed(
                "another program has started the workers; send SIGTERM to one after the other, and start it again"
            )
        pids = []
        for supervisor in self._supervisors:
            self._check_lives()
            for other in self._supervisors:
                if other is not supervisor:
                    await other.settled.wait()
            pids.append(await supervisor.restart())
        return pids

    def _check_lives(self) -> None:
        if self.given_up is not None:
            raise WorkerRestartFailed(f"no worker was restarted: the server is stopping, because {self.given_up.value}")

    # --- reports of the engine ------------------------------------------------------------------------------------

    def worker_joined(self, hello: Hello) -> None:
        """A worker has joined. Any thread."""
        self._call(self._on_settled, hello.pid, True)

    def worker_waits(self, hello: Hello) -> None:
        """A worker waits until it may join. Any thread."""
        self._call(self._on_settled, hello.pid, False)

    def worker_broken(self, hello: Hello, reason: str) -> bool:
        """Kill a lost worker if this supervisor has started it; return whether it has. Any thread."""
        supervisor = self._supervisor_of(hello.pid)
        if supervisor is None:
            return False
        self._call(supervisor.kill, hello.pid, reason)
        return True

    def worker_progressed(self, hello: Hello) -> None:
        """A worker has made progress (see `CrashBudget`). Any thread."""
        for supervisor in self._supervisors:
            if hello.pid in supervisor.recent_pids:  # also if the report arrives after the crash
                self._call(supervisor.budget.progressed)

    def crashes_explained(self) -> None:
        """Forget the crashes so far: the request that caused them has failed. Any thread."""
        for supervisor in self._supervisors:
            self._call(supervisor.budget.progressed)

    def _call(self, action: Callable[..., None], *args: object) -> None:
        if self._loop is not None:  # else another program has started the worker
            self._loop.call_soon_threadsafe(self._guard, action, *args)

    def _guard(self, action: Callable[..., None], *args: object) -> None:
        """Call `action`. An event loop only logs an error in a callback; a failed supervisor must end the process."""
        try:
            action(*args)
        except Exception as error:
            self._end(GiveUpReason.BUG, f"the supervisor failed: {type(error).__name__}: {error}")

    def _on_settled(self, pid: int, has_joined: bool) -> None:
        if (supervisor := self._supervisor_of(pid)) is not None:
            supervisor.on_settled(has_joined=has_joined)
            if has_joined and self._standby is not None:
                self._standby.keep()

    def _supervisor_of(self, pid: int) -> WorkerSupervisor | None:
        return next((supervisor for supervisor in self._supervisors if supervisor.pid == pid), None)

    def _spawn(self, flags: Sequence[str], line: StandbyLine | None = None) -> WorkerProcess:
        assert self._death_pipe is not None
        return WorkerProcess([*self._command, *flags], self._environment, self._death_pipe, line)

    def _on_given_up(self, kind: GiveUpReason, reason: str) -> None:
        num_left = sum(supervisor.given_up is None for supervisor in self._supervisors)
        log.error("worker_not_restarted", reason=reason, workers_left=num_left)
        if not num_left:
            self._end(kind, reason)

    def _end(self, kind: GiveUpReason, reason: str) -> None:
        if self.given_up is not None:
            return
        self.given_up = kind
        for supervisor in self._supervisors:
            supervisor.give_up(kind, reason)
        self._on_give_up(reason)
