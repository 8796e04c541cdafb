"""Whether this process still does its work: a watch on the event loop and on the engine.

Decides when one of them stands still, and has that seen. An event loop that stands still answers no probe, so all that
is left to do is to write down where it stands; of an engine that does, the health service is told. Ends nothing: that
is for whoever reads the health.
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
    """Beats on the running event loop from `start` to `stop`; a thread listens.

    `engine_busy_seconds` says how long the engine has been at one turn. `on_live` is called on the loop when the engine
    has stood still for `limit_seconds` (False), and when it goes on (True); `on_tick` with every beat. `dump` writes
    the stacks of all threads.
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
        self._thread = threading.Thread(target=self._watch, name="pulse", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._tick()
        self._thread.start()

    def stop(self) -> None:
        """End the beats and the thread. One that is writing stacks is left behind."""
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
                log.error("engine_stands_still", seconds=round(self._engine_busy_seconds(), 1))
                self._dump()
            else:
                log.warning("engine_goes_on")
            self._on_live(is_live)
        self._on_tick()
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _watch(self) -> None:
        told = False
        while not self._stopped.wait(TICK_SECONDS):
            silent = time.monotonic() - self._tick_at
            if silent >= self._limit_seconds and not told:
                log.error("event_loop_stands_still", seconds=round(silent, 1))
                self._dump()
            elif told and silent < self._limit_seconds:
                log.warning("event_loop_goes_on")
            told = silent >= self._limit_seconds
