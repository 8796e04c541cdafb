"""Watchdog of this process: reports a blocked event loop or engine thread, and writes the stacks of all threads.

A blocked engine is reported to the health service as well. A blocked event loop answers no probe. The watchdog ends no
process: the liveness probe does.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger()

TICK_SECONDS = 0.25
_JOIN_SECONDS = 2.0


class Watchdog:
    """Ticks on the running event loop from `start` to `stop`, while a thread checks the ticks.

    `engine_busy_seconds()` returns how long the engine has been in one iteration. `on_live` is called on the loop with
    False when the engine has been stalled for `limit_seconds`, and with True when it has recovered; `on_tick` with each
    tick. `dump` writes the stacks of all threads.
    """

    def __init__(
        self,
        engine_busy_seconds: Callable[[], float],
        on_live: Callable[[bool], None],
        *,
        limit_seconds: float,
        on_tick: Callable[[], None] = lambda: None,
        dump: Callable[[], None] = lambda: faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True),
    ) -> None:
        self._engine_busy_seconds = engine_busy_seconds
        self._on_live = on_live
        self._limit_seconds = limit_seconds
        self._on_tick = on_tick
        self._dump = dump
        self._is_live = True
        self._tick_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._check_ticks, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the ticks and the thread."""
        self._tick()
        self._thread.start()

    def stop(self) -> None:
        """Stop the ticks and the thread. A thread that is writing stacks is not waited for."""
        if self._timer is not None:
            self._timer.cancel()
        self._stopped.set()
        self._thread.join(_JOIN_SECONDS)

    def _tick(self) -> None:
        self._tick_at = time.monotonic()
        is_live = self._engine_busy_seconds() < self._limit_seconds
        if is_live != self._is_live:
            self._is_live = is_live
            if not is_live:
                log.error("engine_stalled", seconds=round(self._engine_busy_seconds(), 1))
                self._dump()
            else:
                log.warning("engine_recovered")
            self._on_live(is_live)
        self._on_tick()
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _check_ticks(self) -> None:
        is_stalled = False
        while not self._stopped.wait(TICK_SECONDS):
            was_stalled, seconds = is_stalled, time.monotonic() - self._tick_at
            is_stalled = seconds >= self._limit_seconds
            if is_stalled and not was_stalled:
                log.error("event_loop_stalled", seconds=round(seconds, 1))
                self._dump()
            elif was_stalled and not is_stalled:
                log.warning("event_loop_recovered")
