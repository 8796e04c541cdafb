"""A gRPC channel whose calls raise LineclearErrors: one of grpc.aio (`AsyncChannel`), one for threads (`Channel`).

The only module that makes gRPC calls. Both channels connect at the first call. Also channel options.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from lineclear import errors
from lineclear.api_limits import MAX_MESSAGE_BYTES
from lineclear.extras import installed_version

from . import sigint
from .call_errors import ErrorTranslator
from .fork_guard import AIO
from .rpc_methods import Method, Options, Pairs

Req = TypeVar("Req")
Res = TypeVar("Res")

KEEPALIVE_TIME_SECONDS = 30.0
"""Idle time after which a connection is pinged."""
KEEPALIVE_TIMEOUT_SECONDS = 10.0
"""Time without an answer to a ping after which the connection is lost. Its answers are then resumed."""


def channel_options(options: Options = ()) -> list[tuple[str, Any]]:
    """Return the options of every channel, overridden by those of the caller."""
    chosen: dict[str, Any] = {
        "grpc.primary_user_agent": f"lineclear-python/{installed_version()}",
        "grpc.keepalive_time_ms": round(KEEPALIVE_TIME_SECONDS * 1000),
        "grpc.keepalive_timeout_ms": round(KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # gRPC waits this long for the answer to a ping: 60 s by default, whatever the option above says.
        "grpc.http2.ping_timeout_ms": round(KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # A queued request is a call without data: its keepalives must not be limited.
        "grpc.http2.max_pings_without_data": 0,
        # The limits of a server. A larger request fails here and is not sent.
        "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
        "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
        # Reconnecting must not be slower than the pauses between attempts.
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.max_reconnect_backoff_ms": 5_000,
        # Despite its name, the timeout of one attempt to connect. A busy server accepts late; a stopped replica never.
        "grpc.min_reconnect_backoff_ms": 5_000,
        # Balances calls among the replicas of a headless Service.
        "grpc.service_config": '{"loadBalancingConfig": [{"round_robin": {}}]}',
        # http_proxy is often set, but the proxy hardly ever leads to an inference server.
        "grpc.enable_http_proxy": 0,
    }
    return list((chosen | dict(options)).items())


class AsyncChannel:
    """A channel of grpc.aio. It belongs to the event loop of its first call."""

    def __init__(
        self, translator: ErrorTranslator, credentials: grpc.ChannelCredentials | None, options: Options
    ) -> None:
        self._translator = translator
        self._credentials = credentials
        self._options = channel_options(options)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def unary(
        self, method: Method[Req, Res], request: Req, timeout_seconds: float | None, metadata: Pairs
    ) -> Res:
        """Send a request and return the response."""
        call: Any = self._open().unary_unary(method.path)
        try:
            data = await call(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
        except grpc.aio.AioRpcError as error:
            raise self._translator.failure(error, cancelled=False) from error
        except asyncio.CancelledError:
            if _was_call_cancelled(self._translator.closed):
                raise errors.Cancelled("the call was cancelled") from None
            raise
        return self._translator.decoded(method, data)

    def stream(
        self, method: Method[Req, Res], request: Req, timeout_seconds: float | None, metadata: Pairs
    ) -> AsyncResponses[Res]:
        """Send a request and return the responses."""
        call: Any = self._open().unary_stream(method.path)
        started = call(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
        return AsyncResponses(method, started, self._translator)

    def bidirectional(self, method: Method[Any, Any], messages: AsyncIterator[Any], metadata: Pairs) -> Any:
        """Send `messages` as they come and return gRPC's own call."""
        call: Any = self._open().stream_stream(method.path, method.encode, partial(self._translator.decoded, method))
        return call(messages, metadata=tuple(metadata))

    async def close(self) -> None:
        """Cancel all calls and disconnect."""
        if self._channel is not None:
            await self._channel.close()

    def _open(self) -> grpc.aio.Channel:
        loop = asyncio.get_running_loop()
        if self._translator.closed:
            raise RuntimeError("the client is closed")
        AIO.enter()
        if self._channel is None:
            self._loop = loop
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self._translator.target, options=self._options)
            else:
                self._channel = grpc.aio.secure_channel(
                    self._translator.target, self._credentials, options=self._options
                )
        if self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call; make one for each loop")
        return self._channel


class AsyncResponses(Generic[Res]):
    """The responses of a server-streaming call of grpc.aio."""

    def __init__(self, method: Method[Any, Res], call: Any, translator: ErrorTranslator) -> None:
        self._method = method
        self._call = call
        self._translator = translator
        self._is_cancelled = False

    async def __anext__(self) -> Res:
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._translator.failure(error, self._is_cancelled) from error
        except asyncio.CancelledError:
            if _was_call_cancelled(self._is_cancelled or self._translator.closed):
                raise errors.Cancelled("the call was cancelled") from None
            raise
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._translator.decoded(self._method, data)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._call.cancel()


class Channel:
    """A channel of the threaded gRPC. Safe for any number of threads."""

    def __init__(
        self, translator: ErrorTranslator, credentials: grpc.ChannelCredentials | None, options: Options
    ) -> None:
        self._translator = translator
        chosen = channel_options(options)
        if credentials is None:
            self._channel = grpc.insecure_channel(translator.target, options=chosen)
        else:
            self._channel = grpc.secure_channel(translator.target, credentials, options=chosen)

    def unary(self, method: Method[Req, Res], request: Req, timeout_seconds: float | None, metadata: Pairs) -> Res:
        """Send a request and return the response."""
        self._translator.owner.enter()
        call: Any = self._channel.unary_unary(method.path)
        try:
            with sigint.defer_sigint():
                future = call.future(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
            with sigint.cancel_on_sigint(future.cancel):
                data = future.result()
        except grpc.FutureCancelledError:
            raise errors.Cancelled("the call was cancelled") from None
        except grpc.RpcError as error:
            raise self._translator.failure(error, cancelled=False) from error
        except ValueError as error:
            raise self._translator.misuse(error) from error
        return self._translator.decoded(method, data)

    def stream(
        self, method: Method[Req, Res], request: Req, timeout_seconds: float | None, metadata: Pairs
    ) -> Responses[Res]:
        """Send a request and return the responses."""
        call: Any = self._channel.unary_stream(method.path)
        try:
            started = call(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
        except ValueError as error:
            raise self._translator.misuse(error) from error
        return Responses(method, started, self._translator)

    def bidirectional(self, method: Method[Any, Any], messages: Iterator[Any], metadata: Pairs) -> Any:
        """Send `messages` as they come and return gRPC's own call."""
        call: Any = self._channel.stream_stream(method.path, method.encode, partial(self._translator.decoded, method))
        try:
            return call(messages, metadata=tuple(metadata))
        except ValueError as error:
            raise self._translator.misuse(error) from error

    def close(self) -> None:
        """Cancel all calls and disconnect."""
        self._channel.close()


class Responses(Generic[Res]):
    """The responses of a server-streaming call, read by one thread and cancelled by any."""

    def __init__(self, method: Method[Any, Res], call: Any, translator: ErrorTranslator) -> None:
        self._method = method
        self._call = call
        self._translator = translator
        self._is_cancelled = False

    def __next__(self) -> Res:
        self._translator.owner.enter()
        try:
            data = next(self._call)
        except grpc.RpcError as error:
            raise self._translator.failure(error, self._is_cancelled) from error
        return self._translator.decoded(self._method, data)

    def cancel(self) -> None:
        if not self._translator.owner.is_elsewhere:
            self._is_cancelled = True
            self._call.cancel()


def _was_call_cancelled(by_this_side: bool) -> bool:
    """Whether a CancelledError ends the call only. gRPC raises it also when the reading task is cancelled."""
    task = asyncio.current_task()
    return by_this_side and not (task is not None and task.cancelling())
