"""Writes flight recordings to a few private files, in its own thread."""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from lineclear.process.exception_location import exception_fields
from lineclear.process.private_dir import private_directory
from lineclear.scheduler.flight_recorder.recorder import RecordingScheduler

log = structlog.get_logger()

_DEFAULT_DIRECTORY = Path(tempfile.gettempdir()) / f"lineclear-recordings-{os.geteuid()}"
_KEPT_FILES = 4
_SECONDS_BETWEEN = 10.0
_CLOSE_SECONDS = 10.0


class _WriteJob(NamedTuple):
    path: Path
    entries: Iterable[Any]
    reason: str
    written: Future[Path]


class RecordingFiles:
    """Writes the recording of `core` to flight-0.jsonl ... flight-3.jsonl in `directory`, replacing the oldest file.

    The thread starts with the object, since an anomaly may leave the process unable to start threads.
    """

    def __init__(self, core: RecordingScheduler, directory: Path | None = None) -> None:
        self._core, self._directory = core, directory or _DEFAULT_DIRECTORY
        self._count = 0
        self._last = float("-inf")
        self._writing: Future[Path] | None = None
        self._jobs: queue.SimpleQueue[_WriteJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recordings", daemon=True)
        self._thread.start()

    def dump(self, reason: str) -> None:
        """Start to write the recording unless one was written in the last 10 seconds. On the core's thread.

        Never raises: a failed recording must not stop the engine.
        """
        try:
            if time.monotonic() - self._last >= _SECONDS_BETWEEN:
                self.write(reason)
        except Exception as error:
            log.warning("recording_failed", **exception_fields(error))

    def write(self, reason: str) -> Future[Path]:
        """Start to write the recording. On the core's thread.

        The future returns the path or raises OSError. While a file is being written, its future is returned instead.
        """
        if self._writing is not None and not self._writing.done():
            return self._writing
        self._last = time.monotonic()
        path = self._directory / f"flight-{self._count % _KEPT_FILES}.jsonl"
        self._count += 1
        written = self._writing = Future()
        self._jobs.put(_WriteJob(path, self._core.recording(), reason, written))
        return written

    def wait(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Wait for the file that is being written, at most `timeout_seconds`."""
        if self._writing is not None:
            wait((self._writing,), timeout_seconds)

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Finish the file that is being written and stop the thread, within `timeout_seconds`."""
        self._jobs.put(None)
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            _write(*job)


def _write(path: Path, entries: Iterable[Any], reason: str, written: Future[Path]) -> None:
    try:
        private_directory(path.parent, "recording directory", parents=True)
        write(path, entries)
    except BaseException as error:
        log.warning("recording_failed", path=str(path), **exception_fields(error))
        written.set_exception(error)
    else:
        log.info("recording_written", path=str(path), reason=reason, hint="lineclear-scheduler replay FILE")
        written.set_result(path)


def write(path: Path, entries: Iterable[Any]) -> None:
    """Write a recording, one entry a line, and move it over `path`."""
    partial = path.with_suffix(".part")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        for entry in entries:
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")
    partial.rename(path)
