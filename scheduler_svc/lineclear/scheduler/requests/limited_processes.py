"""Child processes for work that cannot be stopped otherwise: started on demand, killed when it takes too long.

Tenants share them fairly, and short work goes first (FairSemaphore). A process counts its CPU time; its answer is also
awaited for a bounded time only, because on a busy machine a second of CPU time may take any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import structlog

from lineclear.errors import LineclearError, QueueFull
from lineclear.scheduler.requests.fair_semaphore import FairSemaphore
from lineclear.scheduler.security import identity
from lineclear.scheduler.text.limited_child import ANSWERED, LENGTH, Refused

log = structlog.get_logger()

_LEAST_WAIT_SECONDS, _MAX_SLOWDOWN = 10.0, 10  # an answer may take so long, or so many times the limit of CPU time
_START_SECONDS = 30.0
NICENESS = 5
"""Of the processes, and of threads that tokenize: beside one thread of a worker, each gets a quarter of a core. At 15
it gets a thirtieth, so that a second of CPU time takes half a minute."""
_CORES_PER_PROCESS, _MIN_PROCESSES, _MAX_PROCESSES = 4, 2, 8
_BYTES_PER_SECOND = 100_000
"""Least speed at which bytes alone count. A few bytes may take a second: tenants share the time of slower work."""
_EXIT_POLLS, _POLL_SECONDS = 100, 0.01  # for the exit code of a process that closed its connection


class ProcessKilled(Exception):
    """The process ended during the work, by this signal of its own limits: SIGPROF for CPU time."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


def num_processes(cores: int) -> int:
    """Return how many processes a machine of so many cores runs at once."""
    return min(max(cores // _CORES_PER_PROCESS, _MIN_PROCESSES), _MAX_PROCESSES)


class LimitedProcesses:
    """Processes that answer frames, one at a time in each. On one event loop."""

    def __init__(
        self,
        name: str,
        module: str,
        definition: Mapping[str, Any],
        *,
        cpu_seconds: float,
        max_bytes: int,
        max_waiting: int,
        what: str,
    ) -> None:
        """`module` serves (`limited_child`) by `definition`, with `cpu_seconds` and `max_bytes` for each answer.

        At most `max_waiting` pieces of work wait. Errors and the log have the `name` of the work, and `what` it does.
        """
        self._name, self._module, self._max_bytes = name, module, max_bytes
        self._definition = json.dumps({**definition, "cpu_seconds": cpu_seconds}).encode()
        self._wait_seconds = max(_LEAST_WAIT_SECONDS, _MAX_SLOWDOWN * cpu_seconds)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._places = num_processes(len(os.sched_getaffinity(0)))
        self.turns = FairSemaphore(self._places, max_waiting, what, cost_per_second=_BYTES_PER_SECOND)

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._all]

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def close(self) -> None:
        self._is_closed = True
        for process in list(self._all):
            self._end(process)
        self._idle.clear()

    async def prepare(self) -> None:
        """Start all processes before the first work."""
        with contextlib.suppress(LineclearError):
            for _ in range(self._places):
                self._idle.append(await self._start())

    async def ask(self, frame: bytes, cost: float) -> str:
        """Return the answer to a frame, when its turn comes. `cost` estimates the work by its bytes.

        Raises Refused with the reason of the process, or ProcessKilled if a limit ended it. Raises QueueFull if too
        much work waits, if the answer takes too long, if no process can be started, or if it was killed from outside.
        """
        answer = await self.turns.run(identity.flow(), cost, lambda: asyncio.ensure_future(self._answer(frame)))
        text = answer[1:].decode(errors="replace")
        if answer[:1] != ANSWERED:
            raise Refused(text)
        return text

    async def _answer(self, frame: bytes) -> bytes:
        process = self._take_idle() or await self._start()
        try:
            async with asyncio.timeout(self._wait_seconds):
                answer = await process.ask(frame, self._max_bytes)
        except TimeoutError:
            self._end(process)
            self._replace()
            log.warning("limited_process_too_slow", work=self._name, pid=process.popen.pid)
            raise QueueFull(
                f"the {self._name} took more than {self._wait_seconds:g} s, because the machine is busy; retry later",
                retry_after_seconds=self._wait_seconds,
            ) from None
        except (asyncio.IncompleteReadError, OSError):
            self._replace()
            raise await self._explanation(process) from None
        except BaseException:  # its late answer would be taken for the next one
            self._end(process)
            raise
        self._rest(process)
        return answer

    def _take_idle(self) -> _Process | None:
        while self._idle:
            process = self._idle.pop()
            if process.popen.poll() is None:
                return process
            self._end(process)  # killed from outside
        return None

    def _replace(self) -> None:
        """Start another process before the next work needs it."""

        async def replace() -> None:
            with contextlib.suppress(LineclearError):
                if not self._is_closed and len(self._all) < self._places:
                    self._rest(await self._start())

        task = asyncio.ensure_future(replace())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _rest(self, process: _Process) -> None:
        """Keep a process for the next work, unless another one was started in its place."""
        if len(self._all) > self._places:
            self._end(process)
        else:
            self._idle.append(process)

    async def _start(self) -> _Process:
        assert not self._is_closed, "work after close"
        try:
            process = await _Process.start(self._module)
        except OSError as error:
            log.warning("limited_process_not_started", work=self._name, problem=error.strerror)
            raise QueueFull(
                f"no process could be started for the {self._name}; retry later", retry_after_seconds=1.0
            ) from None
        self._all.add(process)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await process.ask(self._definition, 1)  # the answer: it is ready
        except (TimeoutError, asyncio.IncompleteReadError, OSError):
            raise await self._explanation(process) from None
        except BaseException:
            self._end(process)
            raise
        return process

    async def _explanation(self, process: _Process) -> Exception:
        """Kill a process that ended or does not answer. Return the error for its work."""
        exit_code = await process.exit_code()
        self._end(process)
        log.warning("limited_process_ended", work=self._name, pid=process.popen.pid, exit_code=exit_code)
        if exit_code in (-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV):
            return ProcessKilled(-exit_code)
        return QueueFull(f"the process of the {self._name} ended; retry", retry_after_seconds=1.0)

    def _end(self, process: _Process) -> None:
        self._all.discard(process)
        process.end()


class _Process:
    def __init__(
        self, popen: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.popen, self._reader, self._writer = popen, reader, writer

    @classmethod
    async def start(cls, module: str) -> _Process:
        """Start a process that is connected through its standard input and output. Raises OSError.

        Popen uses vfork, which runs no fork handlers. asyncio's subprocess forks, and gRPC's fork handlers break its
        threads.
        """
        parent_end, child_end = socket.socketpair()
        try:
            popen = subprocess.Popen(  # noqa: ASYNC220  # takes a millisecond
                (sys.executable, "-P", "-m", module),
                stdin=child_end.fileno(),
                stdout=child_end.fileno(),
                stderr=subprocess.DEVNULL,
                # Signals of the terminal go to the scheduler alone. Not a session: each has a share of the CPU of its
                # own (autogroup, sched(7)), and priorities count within it only.
                process_group=0,
            )
        except BaseException:
            parent_end.close()
            raise
        finally:
            child_end.close()
        with contextlib.suppress(OSError):  # the process may have ended
            os.setpriority(os.PRIO_PROCESS, popen.pid, NICENESS)
        return cls(popen, *await asyncio.open_connection(sock=parent_end))

    async def ask(self, content: bytes, max_bytes: int) -> bytes:
        """Send a frame and return the answer. Raises OSError or IncompleteReadError."""
        self._writer.write(LENGTH.pack(len(content)) + content)
        await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if not 0 < length <= max_bytes:
            raise OSError("a frame of a wrong length")
        return await self._reader.readexactly(length)

    async def exit_code(self) -> int | None:
        """Return the exit code; None if the process still runs."""
        for _ in range(_EXIT_POLLS):
            if self.popen.poll() is not None:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return self.popen.returncode

    def end(self) -> None:
        """Kill the process. The next Popen of this process reaps it."""
        self._writer.close()
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.poll()
