"""What every call of our service goes through: errors become statuses, and nothing else of ours reaches a caller.

Decides how a call ends that does not end well. A LineclearError is sent as it is; any other exception is a bug, is
logged with the place it happened (never its text, which may hold a prompt) and sent as an incident number. Bytes that
are no message of the schema are Malformed, where gRPC itself would answer UNKNOWN and print a traceback.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from lineclear.api_limits import MAX_MESSAGE_BYTES
from lineclear.errors import InternalError, LineclearError, ResponseTooLarge
from lineclear.grpc_status import to_status
from lineclear.process.exception_location import exception_fields
from lineclear.scheduler.grpc_api.request_reader import LONG, MALFORMED, RequestReader, checked

log = structlog.get_logger()

_ABORT_TIMEOUT_SECONDS = 1.0

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behavior = Callable[[Any, Any], Awaitable[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Guards the methods of `services` on one listener; those of others pass untouched.

    The methods are coroutine functions of (request, context); one that takes a stream of requests answers with one.
    `reading` bounds what their requests take. `on_error` is called with the reason of each error that a call ends with.
    """

    def __init__(
        self, *services: str, reading: RequestReader, on_error: Callable[[str], None] = lambda reason: None
    ) -> None:
        self._reading = reading
        self._on_error = on_error
        self.is_stopping = False
        """The listeners are being closed: calls end because we cut them, and that is no incident."""
        self.num_came = 0
        """Calls of guarded methods that came so far."""
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._prefixes = tuple(f"/{service}/" for service in services)
        self._guarded: dict[str, Handler] = {}

    def pause(self) -> None:
        """Answer nobody who comes from now on until `release`; calls in progress go on."""
        self._goes_on.clear()

    def resume(self) -> None:
        """Answer those who were held."""
        self._goes_on.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The guarded handler of the call's method."""
        method = str(handler_call_details.method)
        if not method.startswith(self._prefixes):
            return await continuation(handler_call_details)
        self.num_came += 1
        if method not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:  # gRPC answers UNIMPLEMENTED
                return handler
            self._guarded[method] = self._guard(method, handler)
        return self._guarded[method]

    def _guard(self, method: str, handler: Handler) -> Handler:
        """The handler of `method` as one that gRPC reads nothing for: its requests are read here, within bounds."""
        return grpc.stream_stream_rpc_method_handler(
            self._map_errors(method, self._reader(handler, is_long=method.rpartition("/")[2] in LONG)),
            request_deserializer=_deserializer(handler.request_deserializer),
            response_serializer=handler.response_serializer,
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
            await context.write(response)

        if handler.request_streaming:
            assert handler.response_streaming, "no method of ours takes many and answers once"
            return many
        return stream if handler.response_streaming else unary

    def _map_errors(self, method: str, behavior: Any) -> Behavior:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                if not self._goes_on.is_set():
                    await self._goes_on.wait()
                return await behavior(request, context)
            except LineclearError as error:
                return await self._abort(context, error)
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError as error:
                # A call that ends like this sends no status: right if the caller is gone, but otherwise it would wait.
                # gRPC cancels the call's task when the caller has gone, and we never do; context.cancelled() is only
                # true once a status is there.
                task = asyncio.current_task()
                if self.is_stopping or (task is not None and task.cancelling()):
                    raise
                return await self._abort(context, incident(method, error))
            except Exception as error:
                return await self._abort(context, incident(method, error))

        return guarded

    async def _abort(self, context: Context, error: LineclearError) -> None:
        self._on_error(error.reason)
        _forget_frames(sys.exception())
        await abort(context, error)


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of its causes, and with them the request that their frames hold.

    gRPC keeps the error in a reference cycle. Until the garbage collector finds it, every refused request would stay in
    memory: hundreds of MiB where a caller sends large ones.
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


async def _each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield checked(request)


def _check_size(response: Message | bytes) -> None:
    """Raises ResponseTooLarge where gRPC would not send the response, and end the call with a sentence of its own."""
    size = len(response) if isinstance(response, bytes) else response.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise ResponseTooLarge(
            f"the answer has {size} bytes, a message has at most {MAX_MESSAGE_BYTES}; ask for less at once (what Submit"
            " began can be read with Attach, in pieces)",
            metadata={"response_bytes": str(size), "limit": str(MAX_MESSAGE_BYTES)},
        )


def incident(where: str, error: BaseException) -> InternalError:
    """What a caller is told of a bug of ours; what happened is in the log under the same number."""
    incident_id = secrets.token_hex(8)
    log.error("incident", incident_id=incident_id, where=where, **exception_fields(error))
    message = f"internal error; the server's log has it as incident {incident_id}"
    return InternalError(message, metadata={"incident_id": incident_id})


async def abort(context: Context, error: LineclearError) -> None:
    """End the call with the error's status. Raises AbortError, as gRPC wants it, once that is on its way.

    Returns where the caller does not take the status either: it is queued behind what was not read, and the call is
    left to the transport.
    """
    status = rpc_status.to_status(to_status(error))
    try:
        async with asyncio.timeout(_ABORT_TIMEOUT_SECONDS):
            await context.abort(*status)
    except TimeoutError:
        log.info("abort_timed_out", reason=error.reason)
