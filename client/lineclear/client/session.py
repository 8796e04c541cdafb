"""One Session under the calls of a client that has many at once; to whoever reads an answer it is a call like others.

The first call of a client is a Generate. One that begins while another is open goes through the session, which stays
for those to come. Where a server has no Session, or has no room for one, the requests become calls of Generate.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lineclear import errors
from lineclear.api_limits import MAX_GATHERED_BYTES
from lineclear.v1 import inference_pb2 as pb

from .call_errors import check_request_size
from .outbox import Command, Outbox, most_request_bytes
from .session_messages import Item, items, submission

# Codes of a session that was not begun. An error about the caller, as UNAUTHENTICATED, would be that of Generate too.
_MISSING = ("UNIMPLEMENTED", "PERMISSION_DENIED")
_REFUSALS = ("RESOURCE_EXHAUSTED", *_MISSING)


def _late() -> errors.DeadlineExceeded:
    return errors.DeadlineExceeded("the deadline of the call passed before the answer was complete")


def _ended(target: str) -> errors.ConnectionLost:
    return errors.ConnectionLost(f"no answer from {target}: it ended the session")


def _goes_alone(order: pb.SubmitCommand, most_bytes: int | None) -> bool:
    """Whether a request is made as a call of its own because of its size.

    gRPC ends a stream with all its requests when one message is too large. Raises RequestTooLarge if the server has
    said that it takes no request so large.
    """
    size = order.ByteSize()
    if most_bytes is not None:
        check_request_size(size, most_bytes)
    return size > MAX_GATHERED_BYTES


class _SessionCall(ABC):
    """One request of a session, however its answer is waited for: when it goes on elsewhere, and how it is given up."""

    def __init__(self, session: AioSession | Session, handle: int, instead: Callable[[float | None], Any]) -> None:
        self._session = session
        self._handle = handle
        self._instead = instead
        self._other: Any = None  # the call that was made instead
        self._is_over = False
        self._is_cancelled = False

    @abstractmethod
    def put(self, item: Item) -> None:
        """Something came."""

    def _goes_elsewhere(self, error: errors.LineclearError) -> bool:
        """The server refused the session, which says nothing about the request: a call of its own is made instead."""
        return error is self._session.refusal

    def _hang_up(self, error: errors.LineclearError) -> None:
        if not self._is_over:
            self._session.order(pb.CancelCommand(handle=self._handle))
            self.put(error)


# --- for asyncio ------------------------------------------------------------------------------------------------------


class AioSession:
    """The session of an AsyncClient. `open` makes the gRPC call; `failure` names what ended it.

    `is_over`: it takes no more requests. `refusal`: the server ended it before it answered anything, and takes the
    requests by Generate. `is_missing`: it never takes any by a session.
    """

    def __init__(self, target: str, call: Any, failure: Callable[[BaseException], errors.LineclearError]) -> None:
        self.is_over = False
        self.is_closing = False  # the server takes no new requests on it, and completes those in progress
        self.refusal: errors.LineclearError | None = None
        self._target = target
        self._call = call
        self._failure = failure
        self._calls: dict[int, AioSessionCall] = {}
        self._handles = itertools.count(1)
        self._outbox = Outbox()
        self._most_bytes: int | None = None  # of a request, once the server has said
        self._bell = asyncio.Event()
        self._tasks = [asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read())]

    @property
    def is_missing(self) -> bool:
        return self.refusal is not None and self.refusal.code in _MISSING

    def begin(
        self, request: pb.GenerateRequest, timeout_seconds: float | None, instead: Callable[[float | None], Any]
    ) -> Any:
        """Begin a request. `instead` makes a call of its own, with so many seconds left: of a large request, or where
        there is no Session."""
        handle = next(self._handles)
        order = submission(handle, request, timeout_seconds)
        if _goes_alone(order, self._most_bytes):
            return instead(timeout_seconds)
        call = AioSessionCall(self, handle, timeout_seconds, instead)
        self._calls[handle] = call
        self.order(order)
        return call

    def order(self, order: Command) -> None:
        self._outbox.put(order)
        self._bell.set()

    def forget(self, handle: int) -> None:
        """Whatever still comes for it is nobody's."""
        self._calls.pop(handle, None)

    async def close(self) -> None:
        """End it, and with it the requests."""
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._over(errors.Cancelled("the call was cancelled"))

    async def _write(self) -> None:
        with contextlib.suppress(Exception):  # what ended the call is the reader's to say
            # A write that fails hides the status: so first hear that the server has a Session at all.
            greeting = await self._call.initial_metadata()
            self._most_bytes = most_request_bytes(greeting)
            self._outbox.share_messages(self._most_bytes)
            while True:
                await self._bell.wait()
                self._bell.clear()
                while (message := self._outbox.take()) is not None:
                    await self._call.write(message)

    async def _read(self) -> None:
        was_answered = False
        try:
            async for message in self._call:
                was_answered = True
                for handle, item in items(message):
                    self.is_closing = self.is_closing or isinstance(item, errors.ServerDraining)
                    call = self._calls.get(handle)
                    if call is not None:
                        call.put(item)
            error: errors.LineclearError = _ended(self._target)
        except asyncio.CancelledError:
            error = errors.Cancelled("the call was cancelled")
        except Exception as failed:
            error = self._failure(failed)
            if not was_answered and error.code in _REFUSALS:
                self.refusal = error
        self._tasks[0].cancel()
        self._over(error)

    def _over(self, error: errors.LineclearError) -> None:
        self.is_over = True
        for call in list(self._calls.values()):
            call.put(error)


class AioSessionCall(_SessionCall):
    """A request of an AioSession (transport.AsyncCall)."""

    def __init__(
        self,
        session: AioSession,
        handle: int,
        timeout_seconds: float | None,
        instead: Callable[[float | None], Any],
    ) -> None:
        super().__init__(session, handle, instead)
        self._unread: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None
        loop = asyncio.get_running_loop()
        self._deadline = None if timeout_seconds is None else loop.time() + timeout_seconds
        self._timer = None if timeout_seconds is None else loop.call_later(timeout_seconds, self._expire)

    async def __anext__(self) -> pb.GenerateResponse:
        while self._other is None:
            while not self._unread:
                if self._is_over:
                    raise StopAsyncIteration
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            item = self._unread.popleft()
            if isinstance(item, pb.GenerateResponse):
                return item
            if item is None:
                raise StopAsyncIteration
            if not self._goes_elsewhere(item):
                raise item
            left = None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()
            self._other = self._instead(left)
            if self._is_cancelled:  # after the end of the one call, before the beginning of the other
                self._other.cancel()
        response: pb.GenerateResponse = await self._other.__anext__()
        return response

    def put(self, item: Item) -> None:
        if self._is_over:
            return
        if not isinstance(item, pb.GenerateResponse):
            self._finish()
        self._unread.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._other is not None:
            self._other.cancel()
        self._hang_up(errors.Cancelled("the call was cancelled"))

    def _expire(self) -> None:
        self._hang_up(_late())

    def _finish(self) -> None:
        self._is_over = True
        self._session.forget(self._handle)
        if self._timer is not None:
            self._timer.cancel()


# --- for threads ------------------------------------------------------------------------------------------------------


class Session:
    """The same for a Client; from any thread. `open` gets the orders as an iterator and makes the gRPC call."""

    def __init__(
        self,
        target: str,
        open_call: Callable[[Iterator[pb.SessionRequest]], Any],
        failure: Callable[[BaseException], errors.LineclearError],
    ) -> None:
        self.is_over = False
        self.is_closing = False  # the server takes no new requests on it, and completes those in progress
        self.refusal: errors.LineclearError | None = None
        self._target = target
        self._failure = failure
        self._lock = threading.Lock()
        self._calls: dict[int, SessionCall] = {}
        self._handles = itertools.count(1)
        self._outbox = Outbox()
        self._most_bytes: int | None = None  # of a request, once the server has said
        self._bell = threading.Event()
        self._call = open_call(self._messages())
        threading.Thread(target=self._read, name="lineclear-session", daemon=True).start()

    @property
    def is_missing(self) -> bool:
        return self.refusal is not None and self.refusal.code in _MISSING

    def begin(
        self, request: pb.GenerateRequest, timeout_seconds: float | None, instead: Callable[[float | None], Any]
    ) -> Any:
        """Begin a request. `instead` makes a call of its own, with so many seconds left: of a large request, or where
        there is no Session."""
        handle = next(self._handles)
        order = submission(handle, request, timeout_seconds)
        if _goes_alone(order, self._most_bytes):
            return instead(timeout_seconds)
        call = SessionCall(self, handle, timeout_seconds, instead)
        with self._lock:
            self._calls[handle] = call
            over = self.is_over
        if over:
            call.put(self.refusal or _ended(self._target))
        self.order(order)
        return call

    def order(self, order: Command) -> None:
        if not self.is_over:
            self._outbox.put(order)
            self._bell.set()

    def forget(self, handle: int) -> None:
        """Whatever still comes for it is nobody's."""
        with self._lock:
            self._calls.pop(handle, None)

    def close(self) -> None:
        """End it, and with it the requests."""
        self._call.cancel()

    def _messages(self) -> Iterator[pb.SessionRequest]:
        """All that is to be told, on gRPC's thread; it ends with the session."""
        while not self.is_over:
            self._bell.wait()
            self._bell.clear()
            while (message := self._outbox.take()) is not None:
                yield message

    def _read(self) -> None:
        was_answered = False
        try:
            greeting = self._call.initial_metadata()
            self._most_bytes = most_request_bytes(greeting)
            self._outbox.share_messages(self._most_bytes)
            for message in self._call:
                was_answered = True
                for handle, item in items(message):
                    self.is_closing = self.is_closing or isinstance(item, errors.ServerDraining)
                    with self._lock:
                        call = self._calls.get(handle)
                    if call is not None:
                        call.put(item)
            error: errors.LineclearError = _ended(self._target)
        except Exception as failed:
            error = self._failure(failed)
            if not was_answered and error.code in _REFUSALS:
                self.refusal = error
        with self._lock:
            self.is_over = True
            calls = list(self._calls.values())
        self._bell.set()  # gRPC's thread, which waits for orders, may go
        for call in calls:
            call.put(error)


class SessionCall(_SessionCall):
    """A request of a Session (transport.Call)."""

    def __init__(
        self,
        session: Session,
        handle: int,
        timeout_seconds: float | None,
        instead: Callable[[float | None], Any],
    ) -> None:
        super().__init__(session, handle, instead)
        self._unread: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_read = False
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds

    def __next__(self) -> pb.GenerateResponse:
        while self._other is None:
            if self._is_read:
                raise StopIteration
            try:
                item = self._unread.get(timeout=self._left())
            except queue.Empty:
                self._hang_up(_late())
                continue
            if isinstance(item, pb.GenerateResponse):
                return item
            self._is_read = True
            if item is None:
                raise StopIteration
            if not self._goes_elsewhere(item):
                raise item
            other = self._instead(self._left())
            with self._lock:
                self._other, cancelled = other, self._is_cancelled
            if cancelled:  # between the end of the one call and the beginning of the other
                other.cancel()
        response: pb.GenerateResponse = next(self._other)
        return response

    def put(self, item: Item) -> None:
        """From the session's thread, or from one that hangs up."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = not isinstance(item, pb.GenerateResponse)
            self._unread.put(item)
            over = self._is_over
        if over:
            self._session.forget(self._handle)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            other = self._other
        if other is not None:
            other.cancel()
        self._hang_up(errors.Cancelled("the call was cancelled"))

    def _left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
