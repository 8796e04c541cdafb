"""Flight recordings as files: written aside, by a thread of their own, readable by the owner only, and never many."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog

from lineclear.scheduler.recording.recorder import RecordedScheduler

log = structlog.get_logger()

_KEPT_FILES = 4
_SECONDS_BETWEEN = 10.0


class Recordings:
    """Writes the recording of `core` into `directory` as flight-0.jsonl to flight-3.jsonl, the oldest one again."""

    def __init__(self, core: RecordedScheduler, directory: Path | None = None) -> None:
        self._core, self._directory = core, directory or default_directory()
        self._count = 0
        self._last = float("-inf")
        self._writer: threading.Thread | None = None

    def dump(self, reason: str) -> Path | None:
        """Begin to write what is recorded now. On the thread that owns the core.

        Returns the file's path, or None when one was written a moment ago or is being written.
        """
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN or (self._writer is not None and self._writer.is_alive()):
            return None
        self._last = now
        path = self._directory / f"flight-{self._count % _KEPT_FILES}.jsonl"
        self._count += 1
        entries = self._core.recording()
        self._writer = threading.Thread(target=_write, args=(path, entries, reason), name="recording", daemon=True)
        self._writer.start()
        return path

    def wait(self) -> None:
        """Return when no file is being written."""
        if self._writer is not None:
            self._writer.join()


def private_directory(path: Path) -> Path:
    """`path`, made if it is not there. Raises OSError if others could read or write in it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise OSError(f"{path} must be a directory of ours with mode 0700")
    return path


def default_directory() -> Path:
    """Where recordings are written when no setting says it."""
    return Path(tempfile.gettempdir()) / f"lineclear-recordings-{os.geteuid()}"


def _write(path: Path, entries: Iterable[Any], reason: str) -> None:
    try:
        private_directory(path.parent)
        write(path, entries)
    except OSError as error:
        log.warning("recording_failed", path=str(path), problem=str(error))
    else:
        log.info("recording_written", path=str(path), reason=reason, hint="lineclear-scheduler replay FILE")


def write(path: Path, entries: Iterable[Any]) -> None:
    """A recording, one entry a line, in place of whatever was at `path`."""
    aside = path.with_suffix(".part")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        for entry in entries:
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")
    aside.rename(path)
