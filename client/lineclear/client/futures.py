"""Answers as futures: an asyncio.Task for each, and a concurrent.futures.Future without a thread for each.

The futures of a Client are read by the code of AsyncClient, on an event loop in one thread (see `loop_transport`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeAlias

from lineclear.v1 import inference_pb2 as pb

from . import sigint
from .call_settings import CallOptions
from .fork_guard import OwnerProcess
from .loop_transport import LoopTransport
from .results import Generation
from .transports import AsyncStreamTransport, StreamTransport

OpenStream: TypeAlias = Callable[[AsyncStreamTransport, CallOptions], "LoopStream"]

MAX_OPEN_FUTURES = 256
"""Most futures of a client whose requests are open at once. The others wait in the client, in order."""


class LoopStream(Protocol):
    """The AsyncStream of an answer."""

    async def read_all(self) -> Generation: ...


class AsyncAnswerFuture(asyncio.Task[Generation]):
    """The answer of a request, as a task. `cancel` cancels the request on the server."""

    request_id: str


class AnswerFuture(Future[Generation]):
    """The answer of a request, as a future of concurrent.futures. `cancel` cancels the request on the server."""

    def __init__(self, request_id: str, owner: OwnerProcess) -> None:
        super().__init__()
        self.request_id = request_id
        self._owner = owner
        self._waits = set[threading.Event]()
        self.add_done_callback(AnswerFuture._end_waits)

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the complete answer. Raises the LineclearError of the request, TimeoutError, or CancelledError."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end of the request and return its error, None if the answer is complete."""
        self._wait(timeout)
        return super().exception(0)

    def cancel(self) -> bool:
        """Cancel the request and return True, unless the answer is complete."""
        return not self._owner.is_elsewhere and super().cancel()

    def _end_waits(self: Future[Generation]) -> None:
        assert isinstance(self, AnswerFuture)
        for wait in list(self._waits):
            wait.set()

    def _wait(self, timeout: float | None) -> None:
        """Wait for the end. Ctrl-C ends the wait even just before it begins, and not the request."""
        self._owner.enter()
        wait = threading.Event()
        self._waits.add(wait)
        try:
            if not self.done():
                with sigint.cancel_on_sigint(wait.set):
                    wait.wait(timeout)
        finally:
            self._waits.discard(wait)


class AsyncFutures:
    """The futures of an AsyncClient."""

    def __init__(self, transport: AsyncStreamTransport, open_stream: OpenStream) -> None:
        self._transport = transport
        self._open_stream = open_stream
        self._places = asyncio.Semaphore(MAX_OPEN_FUTURES)
        self._tasks = set[AsyncAnswerFuture]()

    def start(self, options: CallOptions) -> AsyncAnswerFuture:
        """Send the request of `options` and return its future."""
        request_id = _named(options)
        task = AsyncAnswerFuture(self._read(options), loop=asyncio.get_running_loop(), name=f"lineclear {request_id}")
        task.request_id = request_id
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel the requests of all futures that are not done."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _read(self, options: CallOptions) -> Generation:
        async with self._places:
            return await self._open_stream(self._transport, options).read_all()


class Futures:
    """The futures of a Client. The first one starts the thread that reads them."""

    def __init__(self, transport: StreamTransport, open_stream: OpenStream) -> None:
        self._transport = transport
        self._open_stream = open_stream
        self._owner = OwnerProcess()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: _LoopThread | None = None

    def start(self, options: CallOptions) -> AnswerFuture:
        """Send the request of `options` and return its future."""
        self._owner.enter()
        future = AnswerFuture(_named(options), self._owner)
        with sigint.defer_sigint(), self._lock:
            if self._is_closed:
                raise RuntimeError("the client is closed")
            self._thread = self._thread or _LoopThread(self._transport, self._open_stream)
            self._thread.follow(future, options)
        return future

    def close(self) -> None:
        """Cancel the requests of all futures that are not done, and end the thread."""
        if self._owner.is_elsewhere:
            return
        with sigint.defer_sigint():
            with self._lock:
                thread, self._thread, self._is_closed = self._thread, None, True
            if thread is not None:
                thread.close()


class _LoopThread:
    """A thread with an event loop, whose tasks read the answers of futures."""

    def __init__(self, transport: StreamTransport, open_stream: OpenStream) -> None:
        self._loop = asyncio.new_event_loop()
        self._futures = AsyncFutures(LoopTransport(transport, self._loop), open_stream)
        self._thread = threading.Thread(target=self._run, name="lineclear-futures", daemon=True)
        self._thread.start()

    def follow(self, future: AnswerFuture, options: CallOptions) -> None:
        """Send the request of `options` and complete `future`. From any thread."""
        self._loop.call_soon_threadsafe(self._start, future, options)

    def close(self) -> None:
        """Cancel the requests that are open and end the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        if self._thread is not threading.current_thread():  # not in a callback of a future
            self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_forever()

    async def _close(self) -> None:
        await self._futures.close()
        self._loop.stop()

    def _start(self, future: AnswerFuture, options: CallOptions) -> None:
        task = self._futures.start(options)

        def cancel(done: Future[Generation]) -> None:
            if done.cancelled():
                with contextlib.suppress(RuntimeError):  # the loop is closed: the task has ended
                    self._loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(lambda task: _settle(future, task))
        future.add_done_callback(cancel)


def _settle(future: AnswerFuture, task: asyncio.Task[Generation]) -> None:
    """Give `future` the outcome of `task`."""
    if task.cancelled():
        future.cancel()
        future.set_running_or_notify_cancel()
        return
    error = task.exception()
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


def _named(options: CallOptions) -> str:
    """Return the id of the request of `options`, which gets one if it has none."""
    message = options.message
    if isinstance(message, pb.GenerateRequest) and not options.has_own_id:
        message.request_id = secrets.token_hex(16)
    return message.request_id
