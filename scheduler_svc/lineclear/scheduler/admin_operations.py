"""What this process can be told to do by whoever operates it, through the admin service or a signal.

Decides on which thread each is done, and how long one waits for it. Who may ask is the listeners' concern.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path

from lineclear.errors import RecordingFailed
from lineclear.process import logging_setup
from lineclear.scheduler.engine.engine import Engine
from lineclear.scheduler.flight_recorder.recording_files import RecordingFiles
from lineclear.scheduler.shutdown import ShutdownController

_RECORDING_SECONDS = 10.0


class AdminOperations:
    """The doors to leaving, engine and recordings. On the event loop."""

    def __init__(self, leaving: ShutdownController, engine: Engine, recordings: RecordingFiles) -> None:
        self._shutdown, self._engine, self._recordings = leaving, engine, recordings

    def shut_down(self) -> None:
        """Begin to leave in peace; nothing if that has begun."""
        self._shutdown.request("an operator asked")

    def begin_recording(self, reason: str) -> Future[Future[Path]]:
        """Have the flight recorder written between two turns of the engine, the only moment when it stands still."""
        begun: Future[Future[Path]] = Future()
        self._engine.call_on_engine_thread(lambda: begun.set_result(self._recordings.write(reason)))
        return begun

    async def dump_recording(self) -> Path:
        """The file, once it is written. Raises RecordingFailed."""
        try:
            async with asyncio.timeout(_RECORDING_SECONDS):
                # Shielded: a caller who hangs up must not cancel what the engine is about to set.
                writing = await asyncio.shield(asyncio.wrap_future(self.begin_recording("an operator asked")))
                return await asyncio.shield(asyncio.wrap_future(writing))
        except TimeoutError:
            raise RecordingFailed(f"the recording is not written after {_RECORDING_SECONDS:g} s") from None
        except OSError as error:
            raise RecordingFailed(f"the recording cannot be written: {error.strerror or error}") from None

    def flush_prefix_cache(self) -> None:
        """Empty the prefix cache before anything that is submitted from now on."""
        self._engine.clear_prefix_cache()

    def set_log_level(self, level: str) -> str:
        """Log from `level` upwards, here and in the worker; the level before, here."""
        self._engine.set_log_level(level)
        return logging_setup.set_level(level)
