"""Ctrl-C while answers are read: they are cancelled, and nothing is cut off half way.

A KeyboardInterrupt comes between any two steps of what runs. Where that is after gRPC took a lock and before it knows,
the lock is never given back, and the next call waits for ever. So another thread cancels, and the reader hears of it
where it hears of any end.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from lineclear.errors import Cancelled


@contextlib.contextmanager
def cancelling(cancel: Callable[[], None]) -> Iterator[None]:
    """In the block Ctrl-C calls `cancel`, on another thread; the block's end then raises KeyboardInterrupt.

    A second Ctrl-C waits for nothing. Where the program does not listen to Ctrl-C, not in this thread, or in a way of
    its own (a handler, `signal.set_wakeup_fd`), the block is left as it is.
    """
    if not _is_ours_to_hear():
        yield
        return
    # The signal itself wakes the other thread, through a socket: this one may be about to wait, when Python's handler
    # comes too late to end the wait.
    heard, told = socket.socketpair()
    told.setblocking(False)
    was_pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal was_pressed
        if was_pressed:
            raise KeyboardInterrupt
        was_pressed = True

    def obey() -> None:
        while numbers := heard.recv(64):
            if signal.SIGINT in numbers:
                cancel()

    canceller = threading.Thread(target=obey, name="interrupts", daemon=True)
    canceller.start()
    try:
        signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, press)
        yield
    except Cancelled:
        if not was_pressed:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        told.close()
        canceller.join()
        heard.close()
    if was_pressed:
        raise KeyboardInterrupt


def _is_ours_to_hear() -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    watched = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(watched)
    return watched == -1
