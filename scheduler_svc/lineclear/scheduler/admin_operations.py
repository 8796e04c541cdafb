"""What an operator can have this process do, through the admin service or a signal."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path

from lineclear.errors import ProfileFailed, RecordingFailed
from lineclear.process import logging_setup
from lineclear.scheduler.core.limits import SWITCHABLE, CoreLimits
from lineclear.scheduler.engine.engine import Engine
from lineclear.scheduler.engine.worker_pool import WorkerPool
from lineclear.scheduler.flight_recorder.recording_files import RecordingFiles
from lineclear.scheduler.observe.step_feed import StepFeed
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.shutdown import ShutdownController
from lineclear.wire.messages import Profiled

_RECORDING_SECONDS = 10.0
_TRACE_SECONDS = 30.0
"""For a worker to write a trace."""


class AdminOperations:
    """Shutdown, recording dump, prefix-cache flush, scheduling, log level, restart of workers and the steps.

    On the event loop.
    """

    def __init__(
        self,
        shutdown: ShutdownController,
        engine: Engine,
        recordings: RecordingFiles,
        pool: WorkerPool,
        steps: StepFeed,
    ) -> None:
        self._shutdown, self._engine, self._recordings = shutdown, engine, recordings
        self._pool = pool
        self._restart: asyncio.Task[list[int]] | None = None
        self.steps = steps
        """For watchers."""

    def shut_down(self) -> None:
        """Start a graceful shutdown, unless one has started."""
        self._shutdown.request("an operator asked")

    def start_recording(self, reason: str) -> Future[Future[Path]]:
        """Start writing the flight recorder on the engine's thread, between two changes of the core.

        The outer future is done when the core is copied, the inner one when the file is written.
        """
        started: Future[Future[Path]] = Future()
        self._engine.call_on_engine_thread(lambda: started.set_result(self._recordings.write(reason)))
        return started

    async def dump_recording(self) -> Path:
        """Write the flight recorder and return the file. Raises RecordingFailed."""
        try:
            async with asyncio.timeout(_RECORDING_SECONDS):
                # Shielded: a client that hangs up must not cancel a future that the engine is about to set.
                writing = await asyncio.shield(asyncio.wrap_future(self.start_recording("an operator asked")))
                return await asyncio.shield(asyncio.wrap_future(writing))
        except TimeoutError:
            raise RecordingFailed(f"the recording is not written after {_RECORDING_SECONDS:g} s") from None
        except OSError as error:
            raise RecordingFailed(f"the recording cannot be written: {error.strerror or error}") from None

    async def restart_workers(self) -> list[int]:
        """Restart one worker after the other; return the new pids. A second call joins the first.

        Raises WorkerRestartFailed.
        """
        if self._restart is None or self._restart.done():
            self._restart = asyncio.create_task(self._pool.restart_all())
        # Shielded: a client that hangs up does not leave the workers half restarted.
        return await asyncio.shield(self._restart)

    async def profile(self, num_steps: int, worker: int, seconds: float) -> Profiled:
        """Record the next steps of a worker, for at most `seconds`. Raises ProfileFailed."""
        done: Future[Profiled] = Future()
        self._engine.profile(num_steps, worker, done)
        answer = asyncio.wrap_future(done)
        try:
            await asyncio.wait((answer,), timeout=seconds)
        finally:  # also when the client has hung up
            self._engine.profile(0, worker, done)
        finished, _ = await asyncio.wait((answer,), timeout=_TRACE_SECONDS)
        profiled = await answer if finished else Profiled(0, problem="the worker does not answer")
        if profiled.problem:
            raise ProfileFailed(profiled.problem)
        return profiled

    async def switch_scheduling(self, settings: SchedulerSettings) -> None:
        """Have the core follow the scheduling settings. Returns when it does."""
        limits = settings.part(CoreLimits)
        self._engine.switch(**{name: getattr(limits, name) for name in SWITCHABLE})
        applied: Future[None] = Future()
        self._engine.call_on_engine_thread(lambda: applied.set_result(None))
        await asyncio.shield(asyncio.wrap_future(applied))

    def flush_prefix_cache(self) -> None:
        """Empty the prefix cache before any request that is submitted later."""
        self._engine.clear_prefix_cache()

    def set_log_level(self, level: str) -> str:
        """Set the log level here and in the worker; return the previous one of this process."""
        self._engine.set_log_level(level)
        return logging_setup.set_level(level)
