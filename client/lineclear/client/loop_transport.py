"""The calls of a Client's transport, read by tasks of an event loop that runs in a thread of its own.

A request of a Session wakes the loop when a response arrives. Any other call has a thread that waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Generic, TypeVar

from .channel import Pairs
from .concurrency import AsyncEvent, AsyncInbox, Inbox
from .rpc_methods import Method
from .transports import AsyncCall, Call, StreamTransport

Req = TypeVar("Req")
Res = TypeVar("Res")


class LoopTransport:
    """An AsyncStreamTransport for `loop`. Its calls are those of `transport`."""

    def __init__(self, transport: StreamTransport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop

    @property
    def target(self) -> str:
        return self._transport.target

    def stream_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> AsyncCall[Res]:
        call = self._transport.stream(method, request, timeout_seconds=timeout_seconds, metadata=metadata)
        inbox: Inbox[Any] | None = getattr(call, "inbox", None)
        return _ThreadedCall(call, self._loop) if inbox is None else _SessionCall(call, inbox, self._loop)


class _SessionCall(AsyncCall[Res], Generic[Res]):
    """A request of a Session, whose responses come through `inbox`."""

    def __init__(self, call: Call[Res], inbox: Inbox[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._inbox = inbox
        self._loop = loop
        self._ready = AsyncEvent()
        inbox.when_filled(self._wake)

    async def __anext__(self) -> Res:
        while not self._inbox.is_ready:
            self._ready.clear()
            if not self._inbox.is_ready:  # an item may have arrived before the event was cleared
                await self._ready.wait_for(self._inbox.seconds_left)
        try:
            return next(self._call)
        except StopIteration:
            raise StopAsyncIteration from None

    def cancel(self) -> None:
        self._call.cancel()

    def _wake(self) -> None:
        if not self._ready.is_set():
            self._loop.call_soon_threadsafe(self._ready.set)


class _ThreadedCall(AsyncCall[Res], Generic[Res]):
    """A call and the thread that reads it."""

    def __init__(self, call: Call[Res], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop
        self._inbox = AsyncInbox[Res | BaseException](None)
        threading.Thread(target=self._read, name="lineclear-future", daemon=True).start()

    async def __anext__(self) -> Res:
        item = await self._inbox.get()
        if isinstance(item, StopIteration):
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self._call.cancel()

    def _read(self) -> None:
        item: Res | BaseException
        while True:
            try:
                item = next(self._call)
            except BaseException as error:
                item = error
            try:
                self._loop.call_soon_threadsafe(self._inbox.put, item)
            except RuntimeError:  # the loop is closed: no task waits for the answer
                return
            if isinstance(item, BaseException):
                return
