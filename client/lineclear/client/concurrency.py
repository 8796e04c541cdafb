"""Waiting, once for tasks of an event loop (`Async...`) and once for threads.

The source in `_async` uses the first of each pair. `client/generate_sources.py` puts the second in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

async_sleep = asyncio.sleep
sleep = time.sleep


async def async_call(callback: Callable[[T], object], value: T) -> None:
    """Call a function of the user, and await its result if that is awaitable."""
    if inspect.isawaitable(result := callback(value)):
        await result


def call(callback: Callable[[T], object], value: T) -> None:
    """Call a function of the user. Raises TypeError for a coroutine function."""
    if inspect.iscoroutine(result := callback(value)):
        result.close()
        raise TypeError("a callback of a Client is a plain function; AsyncClient takes coroutine functions")


class AsyncEvent(asyncio.Event):
    """An event whose wait may be bounded."""

    async def wait_for(self, timeout_seconds: float | None) -> None:
        """Wait until the event is set, at most that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self.wait()


class Event(threading.Event):
    """`AsyncEvent` for threads."""

    def wait_for(self, timeout_seconds: float | None) -> None:
        """Wait until the event is set, at most that long."""
        self.wait(timeout_seconds)


class AsyncCondition:
    """`threading.Condition` for the tasks of one event loop: its block needs no lock, since it awaits nothing else."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    async def wait(self) -> None:
        """Wait for the next `notify_all`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def notify_all(self) -> None:
        """Resume every task that waits."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


Condition = threading.Condition


class AsyncInbox(Generic[T]):
    """The unread items of one reader, who waits for the next until a deadline."""

    def __init__(self, timeout_seconds: float | None) -> None:
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_late = False
        loop = asyncio.get_running_loop()
        self._timer = None if timeout_seconds is None else loop.call_later(timeout_seconds, self._expire)

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)
        self._wake()

    async def get(self) -> T:
        """Remove and return the next item. Raises TimeoutError once the deadline has passed."""
        while not self._items:
            if self._is_late:
                raise TimeoutError
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()

    def close(self) -> None:
        """Forget the deadline."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self._is_late = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Inbox(Generic[T]):
    """`AsyncInbox` for threads; any thread may put items in."""

    def __init__(self, timeout_seconds: float | None) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.put(item)

    def get(self) -> T:
        """Remove and return the next item. Raises TimeoutError once the deadline has passed."""
        deadline = self._deadline
        try:
            return self._items.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> None:
        """Forget the deadline."""


class AsyncWorkers:
    """Tasks that run beside their creator until it joins them."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `function` in a task."""
        self._tasks.append(asyncio.create_task(function(), name=name))

    async def join(self) -> None:
        """Wait until every task has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Workers:
    """`AsyncWorkers` with threads. They are daemons: the end of the program does not wait for them."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, name: str, function: Callable[[], None]) -> None:
        """Run `function` in a thread."""
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        """Wait until every thread has ended."""
        for thread in self._threads:
            thread.join()


class _Reader(Generic[T]):
    """A thread that calls `read` when asked to, in the context of its creator.

    `read` may block for ever, as when a person types the prompts. So the thread is a daemon and is not joined.
    """

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self._context = contextvars.copy_context()
        self._requests: queue.SimpleQueue[Callable[[T | None], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def _ask(self, answer: Callable[[T | None], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lineclear-prompts", daemon=True)
            self._thread.start()
        self._requests.put(answer)

    def _run(self) -> None:
        while (answer := self._requests.get()) is not None:
            answer(self._context.run(self._read))


class AsyncReader(_Reader[T]):
    """Calls a blocking function for the tasks of an event loop, one call at a time."""

    def __init__(self, read: Callable[[], T]) -> None:
        super().__init__(read)
        self._result: asyncio.Future[T | None] | None = None

    async def read(self) -> T | None:
        """Return what the function returns, None after `close`."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T | None] = loop.create_future()
        self._result = result

        def answer(value: T | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_resolve, result, value)

        self._ask(answer)
        return await result

    def close(self) -> None:
        """End the thread after its current call, and the wait for that call now."""
        self._requests.put(None)
        if self._result is not None:
            _resolve(self._result, None)


class Reader(_Reader[T]):
    """Calls a blocking function whose wait another thread can end; one call at a time."""

    def __init__(self, read: Callable[[], T]) -> None:
        super().__init__(read)
        self._results: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def read(self) -> T | None:
        """Return what the function returns, None after `close`."""
        self._ask(self._results.put)
        return self._results.get()

    def close(self) -> None:
        """End the thread after its current call, and the wait for that call now."""
        self._requests.put(None)
        self._results.put(None)


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():  # the task that waited may be cancelled
        future.set_result(value)
