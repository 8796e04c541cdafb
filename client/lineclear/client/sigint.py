"""Ctrl-C during a call: cancel the call, and interrupt no code of gRPC.

Python raises KeyboardInterrupt between any two instructions of the main thread. Inside gRPC or threading that can
leave a lock locked for ever, and the next call hangs. So in a guard the signal handler only records Ctrl-C, another
thread cancels the call, and the end of the guard raises KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, TracebackType


@contextlib.contextmanager
def cancel_on_sigint(cancel: Callable[[], None]) -> Iterator[None]:
    """Call `cancel` on Ctrl-C, in another thread. The end of the block then raises KeyboardInterrupt.

    A second Ctrl-C raises it at once. The block is not guarded outside the main thread, or if the program has a SIGINT
    handler or a `signal.set_wakeup_fd` of its own.
    """
    canceller = Canceller(cancel)
    try:
        with canceller.guard():
            yield
    finally:
        canceller.close()


def defer_sigint() -> AbstractContextManager[None]:
    """Defer Ctrl-C to the end of the block, which must be short; that raises KeyboardInterrupt."""
    return _Guard(None) if _is_default_handler() else _NO_GUARD


class Canceller:
    """Calls `cancel` if Ctrl-C is pressed in one of its guards. Guards may follow one another."""

    cancelling = staticmethod(cancel_on_sigint)
    deferred = staticmethod(defer_sigint)

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._waker: socket.socket | None = None

    def guard(self) -> AbstractContextManager[None]:
        """Return a block like that of `cancel_on_sigint`."""
        return _Guard(self) if _is_default_handler() else _NO_GUARD

    def close(self) -> None:
        """End the thread that cancels. Call it outside the guards."""
        waker, self._waker = self._waker, None
        if waker is not None:
            waker.close()

    def waker(self) -> socket.socket:
        """Return the socket that the signal is written to; it wakes the thread that cancels.

        Python's handler alone is too late: it runs in the main thread, after the wait that it should end.
        """
        if self._waker is None:
            reader, waker = socket.socketpair()
            waker.setblocking(False)
            threading.Thread(
                target=_cancel_on_signal, args=(reader, self._cancel), name="lineclear-sigint", daemon=True
            ).start()
            self._waker = waker
        return self._waker


def _cancel_on_signal(reader: socket.socket, cancel: Callable[[], None]) -> None:
    with reader:
        while numbers := reader.recv(64):
            if signal.SIGINT in numbers:
                cancel()


class _Guard:
    """Records Ctrl-C inside its block and loses none.

    The handler is installed first and removed last. In between only a second Ctrl-C raises KeyboardInterrupt, after
    restoring everything.
    """

    def __init__(self, canceller: Canceller | None) -> None:
        self._canceller = canceller
        self._is_on = True
        self._was_pressed = False

    def __enter__(self) -> None:
        signal.signal(signal.SIGINT, self._press)
        if self._canceller is None:
            return
        try:
            waker = self._canceller.waker()
            signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
            if self._was_pressed:  # before the waker was set
                waker.send(bytes([signal.SIGINT]))
        except (OSError, RuntimeError):  # no thread or file descriptor is free: continue without a guard
            self._end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_on:
            self._end()
        if self._was_pressed:
            raise KeyboardInterrupt

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self._was_pressed:
            self._end()
            raise KeyboardInterrupt
        self._was_pressed = True

    def _end(self) -> None:
        self._is_on = False
        if self._canceller is not None:
            signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)


_NO_GUARD = contextlib.nullcontext()


class AsyncCanceller:
    """`Canceller` for asyncio, which handles Ctrl-C itself: it cancels the main task."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        pass

    def guard(self) -> AbstractContextManager[None]:
        return _NO_GUARD

    @staticmethod
    def cancelling(cancel: Callable[[], None]) -> AbstractContextManager[None]:
        return _NO_GUARD

    @staticmethod
    def deferred() -> AbstractContextManager[None]:
        return _NO_GUARD

    def close(self) -> None:
        pass


def _is_default_handler() -> bool:
    if threading.get_ident() != threading.main_thread().ident:
        return False
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    watched = signal.set_wakeup_fd(-1)
    if watched != -1:
        signal.set_wakeup_fd(watched)
    return watched == -1
