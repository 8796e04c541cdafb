"""A value read from files that may change while we run: tokens, certificates.

Decides when the files are looked at again and what happens when the new ones are wrong: the old value stays, and the
log says so. What is in the files is the reader's business.
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
"""How old a value may be: a change of the files is in force after this long."""

T = TypeVar("T")
_Fingerprint = tuple[tuple[int, int, int], ...]


class ReloadingFile(Generic[T]):
    """What `read` makes of `paths`, made again when one of them changes. Any thread.

    Raises ConfigurationError from the constructor when there is nothing to begin with.
    """

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], T], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.version = 0
        """Counts the changes."""
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._problem = ""  # what was wrong with the files at the last look
        # Before reading: what changes meanwhile is seen the next time.
        self._seen = self._fingerprint()
        self._value = read()
        self._looked_at = clock()

    def current(self) -> T:
        """The value, at most about LOOK_SECONDS old. Looks at the files at most that often, and never raises."""
        now = self._clock()
        if now >= self._looked_at + CHECK_SECONDS and self._lock.acquire(blocking=False):
            try:
                self._looked_at = now
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
            # Tried again with every look: the reason may be one that passes, as too many open files. Logged once.
            if (found, str(error)) != (self._seen, self._problem):
                hint = "what was read before stays in force"
                log.error("files_not_reloaded", files=names, problem=str(error), hint=hint)
            self._seen, self._problem = found, str(error)
            return
        self._seen, self._problem = found, ""
        self.version += 1
        log.info("files_reloaded", files=names, version=self.version)

    def _fingerprint(self) -> _Fingerprint:
        return tuple(map(_identity, self._paths))


def _identity(path: Path) -> tuple[int, int, int]:
    """Different for another file or other contents. Follows links: mounted secrets are swapped by them."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)
