"""Wait for a state of a process or server, on a thread or on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from support.time_limits import PATIENCE_SECONDS


def eventually(
    condition: Callable[[], object], seconds: float = PATIENCE_SECONDS, what: str = "the condition"
) -> float:
    """Wait until `condition()` holds and return the seconds that took; AssertionError after `seconds`."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, f"{what} did not come true in {seconds} s"
        time.sleep(0.002)
    return time.monotonic() - begin


async def until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait on the event loop until `condition()` holds; TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # conditions of many kinds, some in other threads
            await asyncio.sleep(0.001)
