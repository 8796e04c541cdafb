"""Whether the process is to end, why, how fast, and with which exit code. What is done then is `main`'s."""

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
    """Whether and why the process is to end, and whether that is urgent."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.exit_code: int = ExitCode.OK
        self.failure: BaseException = RuntimeError()
        """What a part of this process died of, if one did."""
        self._forced = asyncio.Event()
        self._is_signalled = False
        self._loop = asyncio.get_running_loop()

    def listen_to_signals(self) -> None:
        """Handle SIGTERM and SIGINT: the first starts the drain, the second ends it at once. SIGHUP is ignored."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_signal_handler(signal.SIGHUP, log.info, "signal_ignored")

    def listen_to_standard_input(self) -> None:
        """Its end: leave. What is written there says nothing."""
        # On a thread, which any kind of file can keep waiting; what waits in a loop must be a pipe or a terminal.
        threading.Thread(target=self._wait_for_the_end, name="stdin", daemon=True).start()

    def start(self, exit_code: int, reason: str) -> None:
        """Leave; at once if that was going on already and can now not be finished."""
        if not self.started.is_set():
            self.exit_code = exit_code
            log.info("leaving", reason=reason, exit_code=int(exit_code))
            self.started.set()
        elif self.exit_code == ExitCode.OK:
            self.exit_code = exit_code
            log.error("leaving_at_once", reason=reason, exit_code=int(exit_code))
            self._forced.set()

    def start_from_any_thread(self, exit_code: int, reason: str) -> None:
        """`begin`, soon."""
        self._loop.call_soon_threadsafe(self.start, exit_code, reason)

    def request(self, reason: str) -> None:
        """Leave in peace, if that is not going on already. Asking twice is no hurry."""
        if not self.started.is_set():
            self.start(ExitCode.OK, reason)

    def on_fatal(self, error: BaseException) -> None:
        """The engine, or what delivers its events, died. Any thread."""
        self.failure = error
        if isinstance(error, ProtocolMismatch):
            self._loop.call_soon_threadsafe(self.start, ExitCode.CONFIGURATION, str(error))
        else:
            self._loop.call_soon_threadsafe(self.start, ExitCode.INTERNAL, "a part of this process died")

    def _wait_for_the_end(self) -> None:
        with contextlib.suppress(OSError):
            while sys.stdin is not None and os.read(sys.stdin.fileno(), 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed: we have left
            self._loop.call_soon_threadsafe(self.request, "standard input ended")

    def _signalled(self, number: signal.Signals) -> None:
        # Only a second signal is a hurry. One signal after AdminService.Drain is what a preStop hook and a kubelet do.
        is_second, self._is_signalled = self._is_signalled, True
        if is_second:
            log.info("leaving_at_once", reason=number.name)
            self._forced.set()
        elif self.started.is_set():
            log.info("already_leaving", reason=number.name)
        else:
            self.start(ExitCode.OK, number.name)

    async def run_unless_forced(self, step: Coroutine[Any, Any, object]) -> bool:
        """Do a step of leaving; False if it was given up because of the hurry. What it raises is raised here."""
        task = asyncio.ensure_future(step)
        hurry = asyncio.ensure_future(self._forced.wait())
        await asyncio.wait((task, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not task.done():
            task.cancel()
            return False
        task.result()
        return True


class ExitGuard:
    """Ends the process when it takes too long to end by itself: a library may wait for a thread without end.

    The thread is there from the start, because later none may be had.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._is_ending = threading.Event()
        threading.Thread(target=self._run, name="exit-guard", daemon=True).start()

    def begin(self) -> None:
        """From now on the process has `limit_seconds`."""
        self._is_ending.set()

    def _run(self) -> None:
        self._is_ending.wait()
        time.sleep(self._limit_seconds)
        log.error("exit_overdue", seconds=self._limit_seconds, threads=[t.name for t in threading.enumerate()])
        time.sleep(_LAST_LINE_SECONDS)
        os._exit(ExitCode.INTERNAL)
