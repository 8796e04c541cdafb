"""Map errors of handlers to gRPC statuses.

A LineclearError is sent unchanged. Any other exception is a bug: the log gets its location, and the client an incident
number. Its text may contain a prompt and is dropped. A request that cannot be parsed is MalformedMessage; gRPC itself
would answer UNKNOWN and print a traceback.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from lineclear.api_limits import MAX_MESSAGE_BYTES
from lineclear.errors import Cancelled, DeadlineExceeded, LineclearError, ResponseTooLarge
from lineclear.scheduler.grpc_api.request_reader import LONG, MALFORMED, RequestReader, checked
from lineclear.scheduler.grpc_api.response_writer import write_only
from lineclear.scheduler.requests.request_context import TRAVEL_SECONDS
from lineclear.scheduler.requests.services import incident
from lineclear.scheduler.security.identity import Context
from lineclear.status_codec import to_status

log = structlog.get_logger()

_ABORT_TIMEOUT_SECONDS = 1.0

Behavior = Callable[[Any, Any], Awaitable[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of `services` on one listener; other methods pass unchanged.

    Methods are coroutine functions of (request, context). `reading` limits the memory of incomplete requests.
    `on_error` is called with the reason of each error that ends a call, and of hang-ups during LONG calls.
    """

    def __init__(
        self, *services: str, reading: RequestReader, on_error: Callable[[str], None] = lambda reason: None
    ) -> None:
        self._reading = reading
        self._on_error = on_error
        self.is_stopping = False
        """The listeners are closing: cancelled calls are expected, not incidents."""
        self.num_calls = 0
        """Number of calls so far."""
        self._running = asyncio.Event()
        self._running.set()
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._guarded: dict[str, Handler] = {}

    def pause(self) -> None:
        """Hold new calls until `resume`. Calls in progress continue."""
        self._running.clear()

    def resume(self) -> None:
        """Start the held calls."""
        self._running.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the wrapped handler of the method."""
        method = str(handler_call_details.method)
        if not method.startswith(self._prefixes):
            return await continuation(handler_call_details)
        self.num_calls += 1
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:  # gRPC answers UNIMPLEMENTED
                return handler
            self._guarded[method] = self._guard(method, handler)
        return self._guarded[method]

    def _guard(self, method: str, handler: Handler) -> Handler:
        """Return a handler whose requests are read here, within limits, instead of by gRPC."""
        serialize, is_long = handler.response_serializer, method.rpartition("/")[2] in LONG
        return grpc.stream_stream_rpc_method_handler(
            self._map_errors(method, self._reader(handler, is_long), is_long),
            request_deserializer=_deserializer(handler.request_deserializer),
            response_serializer=serialize if handler.response_streaming else _serializer(serialize),
        )

    def _reader(self, handler: Any, is_long: bool) -> Behavior:
        async def many(requests: AsyncIterator[Any], context: Context) -> None:
            with self._reading.stream(context):
                await handler.stream_stream(_each(requests), context)

        async def stream(requests: AsyncIterator[Any], context: Context) -> None:
            await handler.unary_stream(await self._reading.first(requests, context, is_long=is_long), context)

        async def unary(requests: AsyncIterator[Any], context: Context) -> None:
            response = await handler.unary_unary(await self._reading.first(requests, context, is_long=is_long), context)
            _check_size(response)
            await write_only(context, response)

        if handler.request_streaming:
            assert handler.response_streaming, "no method has a request stream and a single response"
            return many
        return stream if handler.response_streaming else unary

    def _map_errors(self, method: str, behavior: Any, is_long: bool) -> Behavior:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                if not self._running.is_set():
                    await self._running.wait()
                return await behavior(request, context)
            except LineclearError as error:
                return await self._abort(context, error)
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError as error:
                # A cancelled handler sends no status: right after a hang-up, but otherwise the client would wait.
                # Only gRPC cancels the task of a call, after a hang-up; context.cancelled() is true later.
                task = asyncio.current_task()
                if self.is_stopping or (task is not None and task.cancelling()):
                    if is_long:  # also before its message is read
                        self._on_error(_reason_of_hang_up(context))
                    raise
                return await self._abort(context, incident(method, error))
            except Exception as error:
                return await self._abort(context, incident(method, error))

        return guarded

    async def _abort(self, context: Context, error: LineclearError) -> None:
        self._on_error(error.reason)
        _forget_frames(sys.exception())
        await abort(context, error)


def _reason_of_hang_up(context: Context) -> str:
    remaining = context.time_remaining()
    return DeadlineExceeded.reason if remaining is not None and remaining <= TRAVEL_SECONDS else Cancelled.reason


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and its causes, because their frames hold the request.

    gRPC keeps the error in a reference cycle. Rejected requests would stay in memory until the next garbage collection:
    hundreds of MiB of large requests.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _deserializer(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    assert deserialize is not None

    def total(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return MALFORMED

    return total


def _serializer(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """Return a serializer that takes encoded messages, too. None takes nothing else."""
    return lambda message: message if isinstance(message, bytes) or serialize is None else serialize(message)


async def _each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield checked(request)


def _check_size(response: Message | bytes) -> None:
    """Raises ResponseTooLarge for a response that gRPC would not send."""
    size = len(response) if isinstance(response, bytes) else response.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise ResponseTooLarge(
            f"the answer has {size} bytes, the limit is {MAX_MESSAGE_BYTES}; ask for less at once (a submitted"
            " answer can be read in parts with Attach)",
            metadata={"response_bytes": str(size), "limit": str(MAX_MESSAGE_BYTES)},
        )


async def abort(context: Context, error: LineclearError) -> None:
    """End the call with the error's status. Raises AbortError once the status is sent.

    Returns after a timeout if the client does not read: the status is queued behind unread messages.
    """
    status = rpc_status.to_status(to_status(error))
    try:
        async with asyncio.timeout(_ABORT_TIMEOUT_SECONDS):
            await context.abort(*status)
    except TimeoutError:
        log.info("abort_timed_out", reason=error.reason)


def rejecting_handler(error: LineclearError, on_error: Callable[[str], None]) -> Handler:
    """Return a handler that ends every call with `error`."""

    async def reject(requests: Any, context: Context) -> None:
        on_error(error.reason)
        await abort(context, error)

    # gRPC reads no message for a stream handler, and clients of every method kind accept its status.
    return grpc.stream_stream_rpc_method_handler(reject)
