"""A value that is read from files and read again when they change: tokens, certificates.

If the new files are invalid, the old value stays in force and the problem is logged.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from lineclear.process.settings_base import ConfigurationError

log = structlog.get_logger()

CHECK_SECONDS = 1.0
"""Time between checks, and until a change of the files is in force."""

T = TypeVar("T")
_Fingerprint = tuple[tuple[int, int, int], ...]


class ReloadingFile(Generic[T]):
    """The result of `read`, read again when one of `paths` changes. Thread-safe.

    The constructor raises ConfigurationError if the first read fails.
    """

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], T], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.version = 0
        """Number of reloads."""
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._problem = ""  # error of the last read
        # Before the read, so that a change during the read is found at the next check.
        self._seen = self._fingerprint()
        self._value = read()
        self._checked_at = clock()

    def current(self) -> T:
        """Return the value, at most about CHECK_SECONDS old. Does not raise."""
        now = self._clock()
        if now >= self._checked_at + CHECK_SECONDS and self._lock.acquire(blocking=False):
            try:
                self._checked_at = now
                self._check()
            finally:
                self._lock.release()
        return self._value

    def _check(self) -> None:
        found = self._fingerprint()
        if found == self._seen and not self._problem:
            return
        names = [str(path) for path in self._paths]
        try:
            self._value = self._read()
        except ConfigurationError as error:
            # Retried at every check, because errors such as too many open files are temporary. Logged once.
            if (found, str(error)) != (self._seen, self._problem):
                hint = "the previous content stays in force"
                log.error("reload_failed", files=names, problem=str(error), hint=hint)
            self._seen, self._problem = found, str(error)
            return
        self._seen, self._problem = found, ""
        self.version += 1
        log.info("files_reloaded", files=names, version=self.version)

    def _fingerprint(self) -> _Fingerprint:
        return tuple(map(_identity, self._paths))


def _identity(path: Path) -> tuple[int, int, int]:
    """Return the inode, time and size. Follows links, because Kubernetes updates mounted secrets through links."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)
