"""Shutdown of the process: requested or not, reason, forced or graceful, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

import structlog

from lineclear.exit_codes import ExitCode
from lineclear.wire.codec import ProtocolMismatch

log = structlog.get_logger()

_LAST_LINE_SECONDS = 0.5


class ShutdownController:
    """Starts the shutdown once and keeps its reason and exit code. On the running event loop."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.exit_code: int = ExitCode.OK
        self.failure: BaseException = RuntimeError()
        """The error that ended a part of this process, if one did."""
        self._forced = asyncio.Event()
        self._is_signalled = False
        self._loop = asyncio.get_running_loop()

    def handle_signals(self) -> None:
        """Handle SIGTERM and SIGINT: the first starts the drain, the second ends it at once. SIGHUP is ignored."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._loop.add_signal_handler(signal.SIGHUP, log.info, "signal_ignored")

    def watch_standard_input(self) -> None:
        """Start the shutdown when standard input closes. Its content is ignored."""
        # On a thread, which can block on any kind of file; an event loop needs a pipe or a terminal.
        threading.Thread(target=self._read_standard_input, name="stdin", daemon=True).start()

    def start(self, exit_code: int, reason: str) -> None:
        """Start the shutdown. A drain that can no longer finish, because of an error, is forced to end."""
        if not self.started.is_set():
            self.exit_code = exit_code
            log.info("shutdown_started", reason=reason, exit_code=int(exit_code))
            self.started.set()
        elif self.exit_code == ExitCode.OK:
            self.exit_code = exit_code
            log.error("shutdown_forced", reason=reason, exit_code=int(exit_code))
            self._forced.set()

    def start_from_any_thread(self, exit_code: int, reason: str) -> None:
        """Call `start` on the event loop."""
        self._loop.call_soon_threadsafe(self.start, exit_code, reason)

    def request(self, reason: str) -> None:
        """Start a graceful shutdown. A second request does not force it."""
        if not self.started.is_set():
            self.start(ExitCode.OK, reason)

    def on_fatal(self, error: BaseException) -> None:
        """Shut down because the engine or the delivery of its events has died. Any thread."""
        self.failure = error
        if isinstance(error, ProtocolMismatch):
            self.start_from_any_thread(ExitCode.CONFIGURATION, str(error))
        else:
            self.start_from_any_thread(ExitCode.INTERNAL, "a part of this process died")

    def _read_standard_input(self) -> None:
        with contextlib.suppress(OSError):
            while sys.stdin is not None and os.read(sys.stdin.fileno(), 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is exiting
            self._loop.call_soon_threadsafe(self.request, "standard input ended")

    def _on_signal(self, number: signal.Signals) -> None:
        # Only a second signal forces. A preStop hook calls AdminService.Drain, and the kubelet then sends one signal.
        is_second, self._is_signalled = self._is_signalled, True
        if is_second:
            log.info("shutdown_forced", reason=number.name)
            self._forced.set()
        elif self.started.is_set():
            log.info("shutdown_already_started", reason=number.name)
        else:
            self.start(ExitCode.OK, number.name)

    async def run_unless_forced(self, step: Coroutine[Any, Any, object]) -> bool:
        """Run a step of the shutdown; cancel it and return False when the shutdown is forced. Raises its error."""
        task = asyncio.ensure_future(step)
        forced = asyncio.ensure_future(self._forced.wait())
        await asyncio.wait((task, forced), return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not task.done():
            task.cancel()
            return False
        task.result()
        return True


class ExitGuard:
    """Ends the process if its exit takes too long: a library may wait forever for a thread.

    The guard's thread starts with the process, because later the system may refuse a new one.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._is_exiting = threading.Event()
        threading.Thread(target=self._run, name="exit-guard", daemon=True).start()

    def start(self) -> None:
        """End the process after `limit_seconds` from now."""
        self._is_exiting.set()

    def _run(self) -> None:
        self._is_exiting.wait()
        time.sleep(self._limit_seconds)
        log.error("exit_overdue", seconds=self._limit_seconds, threads=[t.name for t in threading.enumerate()])
        time.sleep(_LAST_LINE_SECONDS)
        os._exit(ExitCode.INTERNAL)
