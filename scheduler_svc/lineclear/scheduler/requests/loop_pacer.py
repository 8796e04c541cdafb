"""Large requests one after the other, with pauses in between in which the event loop does other work.

A large request takes milliseconds to check. Several that arrive together would hold up every stream for their sum, so
after each the loop has as long for others as that one took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SMALL_BYTES = 1024
"""A request of at most so many bytes is checked in less time than refusing it takes, and does not count as large."""


class LoopPacer:
    """The pauses between large requests. On one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting = asyncio.Lock()
        self._free_at = 0.0  # when the next large request may be worked on

    async def wait(self) -> None:
        """Return when a large request may be worked on. To be awaited right before `measured`."""
        async with self._waiting:
            await asyncio.sleep(max(0.0, self._free_at - self._clock()))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Take the time of a piece of work that does not wait."""
        began = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            self._free_at = max(self._free_at, now + (now - began))
