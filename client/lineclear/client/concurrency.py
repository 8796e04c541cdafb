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
from concurrent.futures import Future, InvalidStateError
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
    """The unread items of one reader, which waits for the next until a deadline."""

    def __init__(self, timeout_seconds: float | None) -> None:
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_late = False
        loop = asyncio.get_running_loop()
        self._timer = None if timeout_seconds is None else loop.call_later(timeout_seconds, self._expire)

    def put(self, item: T) -> None:
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


class AsyncCancellable(Generic[T]):
    """A call of a batch that is no stream. It runs once, and ends when it is cancelled."""

    def __init__(self, function: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._function = function
        self._task: asyncio.Task[T] | None = None

    async def read_all(self) -> T:
        self._task = asyncio.create_task(self._function())
        return await self._task

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Cancellable(Generic[T]):
    """`AsyncCancellable` for threads. It ends by itself: the server answers, or its deadline passes."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.read_all = function

    def cancel(self) -> None:
        pass


class Reader(Generic[T]):
    """Calls a blocking function in a thread, one call at a time, in the context of its creator.

    The function may block for ever, as when a person types the prompts. So the thread is a daemon and is not joined.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._context = contextvars.copy_context()
        self._asked: Any = queue.SimpleQueue[Future[T | None] | None]()
        self._result: Future[T | None] | None = None

    def read(self) -> T | None:
        """Return what the function returns, None after `close`."""
        return self._ask().result()

    def close(self) -> None:
        """End the thread after its current call, and the wait for that call now."""
        self._asked.put_nowait(None)
        if self._result is not None:
            _resolve(self._result, None)

    def _ask(self) -> Future[T | None]:
        if self._result is None:
            self._start()
        self._result = Future()
        self._asked.put_nowait(self._result)
        return self._result

    def _start(self) -> None:
        threading.Thread(target=self._run, name="lineclear-prompts", daemon=True).start()

    def _run(self) -> None:
        while (result := self._asked.get()) is not None:
            _resolve(result, self._context.run(self._function))


class AsyncReader(Reader[T]):
    """`Reader` for the tasks of an event loop. One task makes all calls of a coroutine function."""

    _task: asyncio.Task[None] | None = None

    async def read(self) -> T | None:  # type: ignore[override]
        """Return what the function returns, None after `close`."""
        return await asyncio.wrap_future(self._ask())

    def close(self) -> None:
        """End the thread or task, and the wait for its current call now."""
        super().close()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        if inspect.iscoroutinefunction(self._function):
            self._asked, self._task = asyncio.Queue(), asyncio.create_task(self._run_in_task(self._function))
        else:
            super()._start()

    async def _run_in_task(self, function: Callable[[], Coroutine[Any, Any, T]]) -> None:
        while (result := await self._asked.get()) is not None:
            _resolve(result, await function())


def _resolve(result: Future[T], value: T) -> None:
    with contextlib.suppress(InvalidStateError):  # closed or cancelled in the meantime
        result.set_result(value)
