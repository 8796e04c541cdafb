"""The Session of a client: one bidirectional stream that carries many requests at once.

Its requests are read like direct calls. If the server refuses the session because too many are open, the requests end
with SessionRefused and are sent again as direct calls.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from lineclear import errors
from lineclear.v1 import inference_pb2 as pb

from ..call_errors import check_request_size
from ..concurrency import AsyncEvent, AsyncInbox, AsyncWorkers
from ..session_messages import (
    Command,
    Item,
    Outbox,
    SessionRefused,
    items,
    max_request_bytes,
    num_open_outputs,
    submit_command,
)


class AsyncSession:
    """One open Session. `open_call` makes the gRPC call from the messages to send; `translate` names its error.

    `is_over`: the stream has ended. `is_closing`: the server completes the requests in progress and takes no others.
    `refusal`: the error with which the server refused the session before it answered anything.
    """

    def __init__(
        self,
        target: str,
        open_call: Callable[[AsyncIterator[pb.SessionRequest]], Any],
        translate: Callable[[BaseException], errors.LineclearError],
    ) -> None:
        self.is_over = False
        self.is_closing = False
        self.refusal: errors.LineclearError | None = None
        self._error: errors.LineclearError = errors.ConnectionLost(f"no answer from {target}: it ended the session")
        self._translate = translate
        self._lock = threading.Lock()  # guards _calls
        self._calls: dict[int, AsyncSessionCall] = {}
        self._handles = itertools.count(1)
        self._outbox = Outbox()
        self._max_request_bytes: int | None = None  # unknown until the server has sent its headers
        self._has_commands = AsyncEvent()
        self._call = open_call(self._messages())
        self._workers = AsyncWorkers()
        self._workers.start("lineclear-session", self._read)

    def start(
        self,
        request: pb.GenerateRequest,
        timeout_seconds: float | None,
        make_direct_call: Callable[[], Any],
        tenant: str = "",
    ) -> Any:
        """Send a request and return its call. A large request becomes a direct call, by `make_direct_call`.

        gRPC ends a stream with all its requests when one message is too large. Raises RequestTooLarge if the server
        has announced a smaller limit.
        """
        handle = next(self._handles)
        command = submit_command(handle, request, timeout_seconds, tenant)
        num_bytes = command.ByteSize()
        if self._max_request_bytes is not None:
            check_request_size(num_bytes, self._max_request_bytes)
        if num_bytes > self._outbox.max_bytes:
            return make_direct_call()
        call = AsyncSessionCall(self, handle, timeout_seconds, num_open_outputs(request))
        with self._lock:
            self._calls[handle] = call
            is_over = self.is_over
        if is_over:
            call.put(self._end())
        self.send(command)
        return call

    def send(self, command: Command) -> None:
        """Queue a command for the server."""
        if not self.is_over:
            self._outbox.put(command)
            self._has_commands.set()

    def remove(self, handle: int) -> None:
        """Drop whatever the server still sends for a request."""
        with self._lock:
            self._calls.pop(handle, None)

    async def close(self) -> None:
        """End the session and its requests."""
        self._call.cancel()
        await self._workers.join()

    async def _messages(self) -> AsyncIterator[pb.SessionRequest]:
        """Yield the messages to send until the session ends."""
        await self._has_commands.wait()
        # The error of a write to a refused stream would hide the refusal.
        self._max_request_bytes = max_request_bytes(await self._call.initial_metadata())
        self._outbox.limit_bytes(self._max_request_bytes)
        while not self.is_over:
            self._has_commands.clear()
            while (message := self._outbox.take()) is not None:
                yield message
            await self._has_commands.wait()

    async def _read(self) -> None:
        was_answered = False
        try:
            async for message in self._call:
                was_answered = True
                for handle, item in items(message):
                    self.is_closing = self.is_closing or isinstance(item, errors.ServerDraining)
                    with self._lock:
                        call = self._calls.get(handle)
                    if call is not None:
                        call.put(item)
        except BaseException as raised:
            self._error = self._translate(raised)
            if not was_answered and self._error.code == "RESOURCE_EXHAUSTED":
                self.refusal = self._error
        with self._lock:
            self.is_over = True
            calls = list(self._calls.values())
        self._has_commands.set()  # ends _messages
        for call in calls:
            call.put(self._end())

    def _end(self) -> Item:
        return self._error if self.refusal is None else SessionRefused()


class AsyncSessionCall:
    """One request of a session (see `AsyncCall`). Its deadline is kept here: gRPC knows only that of the session."""

    def __init__(self, session: AsyncSession, handle: int, timeout_seconds: float | None, num_outputs: int = 1) -> None:
        self._session = session
        self._handle = handle
        self._inbox = AsyncInbox[Item](timeout_seconds)
        self._lock = threading.Lock()
        self._is_over = False  # nothing more is put into the inbox
        self._is_read = False
        self._num_open = num_outputs

    async def __anext__(self) -> pb.GenerateResponse:
        if self._is_read:
            raise StopAsyncIteration
        try:
            item = await self._inbox.get()
        except TimeoutError:
            self._end(errors.DeadlineExceeded("the deadline of the call passed before the answer was complete"))
            item = await self._inbox.get()
        if isinstance(item, pb.GenerateResponse):
            return item
        self._is_read = True
        if item is None:
            raise StopAsyncIteration
        raise item

    def put(self, item: Item) -> None:
        """Deliver a response, the error that the request ended with, or None after the last response of an output."""
        with self._lock:
            if self._is_over:
                return
            if item is None:
                self._num_open -= 1
                if self._num_open:
                    return
            self._is_over = not isinstance(item, pb.GenerateResponse)
            self._inbox.put(item)
        if self._is_over:
            self._inbox.close()
            self._session.remove(self._handle)

    def cancel(self) -> None:
        """End the request. Its reader gets Cancelled after the responses that have arrived."""
        self._end(errors.Cancelled("the call was cancelled"))

    def _end(self, error: errors.LineclearError) -> None:
        if not self._is_over:
            self._session.send(pb.CancelCommand(handle=self._handle))
            self.put(error)
