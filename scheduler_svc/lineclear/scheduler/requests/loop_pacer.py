"""Pauses between large requests, so that the event loop serves streams in between.

Validating a large request takes milliseconds. After each, the loop is free for other work for the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SMALL_BYTES = 1024
"""Largest request that is validated without a pause: that takes less time than rejecting it."""


class LoopPacer:
    """Spaces large requests. On one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self._free_at = 0.0  # earliest start of the next large request

    async def wait(self) -> None:
        """Wait until the next large request may be processed. To be awaited right before `measured`."""
        async with self._lock:
            await asyncio.sleep(max(0.0, self._free_at - self._clock()))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure work that does not await."""
        start = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            self._free_at = max(self._free_at, now + (now - start))
