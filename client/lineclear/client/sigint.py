"""Ctrl-C while a call is made or read: the call is cancelled, and no code of gRPC is cut off half way.

A KeyboardInterrupt is raised between any two steps of what the main thread runs. Where that is inside of gRPC or
threading, after a lock was taken and before that is known, the lock is never released and the next call waits for
ever. So inside a guard Ctrl-C is only noted, another thread cancels what is waited for, and the guard raises
KeyboardInterrupt at its end.
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
    """In the block Ctrl-C calls `cancel`, on another thread; the block's end then raises KeyboardInterrupt.

    A second Ctrl-C is raised at once. Where the program does not listen to Ctrl-C, not in this thread, or in a way of
    its own (a handler, `signal.set_wakeup_fd`), the block is left as it is.
    """
    canceller = Canceller(cancel)
    try:
        with canceller.guard():
            yield
    finally:
        canceller.close()


def defer_sigint() -> AbstractContextManager[None]:
    """In the block, which must be short, Ctrl-C does nothing; the block's end then raises KeyboardInterrupt."""
    return _Guard(None) if _is_ours_to_hear() else _UNGUARDED


class Canceller:
    """Calls `cancel` when Ctrl-C is pressed in one of its guards: any number of them, one after the other."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._waker: socket.socket | None = None

    def guard(self) -> AbstractContextManager[None]:
        """A block as that of `cancelling`."""
        return _Guard(self) if _is_ours_to_hear() else _UNGUARDED

    def close(self) -> None:
        """End its thread; not in one of its guards."""
        waker, self._waker = self._waker, None
        if waker is not None:
            waker.close()

    def waker(self) -> socket.socket:
        """What the signal is written to. It wakes the thread that cancels; that thread is there from the first call on.

        The main thread may be about to wait, when Python's own handler runs too late to end the wait.
        """
        if self._waker is None:
            reader, waker = socket.socketpair()
            waker.setblocking(False)
            threading.Thread(
                target=_cancel_when_told, args=(reader, self._cancel), name="interrupts", daemon=True
            ).start()
            self._waker = waker
        return self._waker


def _cancel_when_told(reader: socket.socket, cancel: Callable[[], None]) -> None:
    with reader:
        while numbers := reader.recv(64):
            if signal.SIGINT in numbers:
                cancel()


class _Guard:
    """Notes Ctrl-C from its beginning to its end. The order of its steps leaves no moment in which one is lost.

    The handler is set first and taken away last. Between the two, an interrupt is raised only by the second Ctrl-C,
    which has put everything back before.
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
            if self._was_pressed:  # before the waker was there
                waker.send(bytes([signal.SIGINT]))
        except (OSError, RuntimeError):  # no thread, or no file descriptor, to be had: as if there were no guard
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


_UNGUARDED = contextlib.nullcontext()


def _is_ours_to_hear() -> bool:
    if threading.get_ident() != threading.main_thread().ident:
        return False
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    watched = signal.set_wakeup_fd(-1)
    if watched != -1:
        signal.set_wakeup_fd(watched)
    return watched == -1
