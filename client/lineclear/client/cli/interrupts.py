"""Ctrl-C while an answer is read: the answer is cancelled, and nothing is cut off half way.

A KeyboardInterrupt comes between any two steps of what runs. Where that is after gRPC took a lock and before it knows,
the lock is never given back, and the next call waits for ever. So another thread cancels, and the reader hears of it
where it hears of any end.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from lineclear.errors import Cancelled


@contextlib.contextmanager
def cancelling(cancel: Callable[[], None]) -> Iterator[None]:
    """In the block Ctrl-C calls `cancel`, on another thread; the block's end then raises KeyboardInterrupt.

    A second Ctrl-C waits for nothing. Where the program does not listen to Ctrl-C, or not in this thread, the block is
    left as it is.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    orders: queue.SimpleQueue[bool] = queue.SimpleQueue()  # of all queues the one whose put() may interrupt itself
    was_pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal was_pressed
        if was_pressed:
            raise KeyboardInterrupt
        was_pressed = True
        orders.put(True)

    def obey() -> None:
        if orders.get():
            cancel()

    canceller = threading.Thread(target=obey, name="interrupts", daemon=True)
    canceller.start()
    signal.signal(signal.SIGINT, press)
    try:
        yield
    except Cancelled:
        if not was_pressed:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        orders.put(False)
        canceller.join()
    if was_pressed:
        raise KeyboardInterrupt
