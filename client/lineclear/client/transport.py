"""How calls reach a server: the seam between the clients and gRPC, and gRPC behind it.

A transport carries one request and its answers and turns whatever goes wrong into a LineclearError; it never retries
and never looks into a message. `lineclear.client.testing.FakeTransport` is another one, without a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio

from lineclear import errors
from lineclear.v1 import inference_pb2 as pb

from . import rpc_methods, sigint
from .call_errors import ErrorTranslator
from .channel import Options, Pairs, channel_options
from .fork_guard import AIO
from .rpc_methods import Method
from .session import AioSession, Session
from .session_messages import names_one_server
from .session_multiplexer import SessionMultiplexer, TrackedCall

Req = TypeVar("Req")
Res = TypeVar("Res")
Res_co = TypeVar("Res_co", covariant=True)


class Call(Protocol[Res_co]):
    """A running call: iterate for its answers. Ends by StopIteration, or by a LineclearError."""

    def __next__(self) -> Res_co: ...
    def cancel(self) -> None:
        """End it now; from any thread, and any number of times. Whoever waits for an answer gets Cancelled."""


class AsyncCall(Protocol[Res_co]):
    """A running call of an event loop. Ends by StopAsyncIteration, or by a LineclearError."""

    async def __anext__(self) -> Res_co: ...
    def cancel(self) -> None:
        """End it now. Whoever waits for an answer gets Cancelled."""


class Transport(Protocol):
    """What a `Client` needs. Safe to use from many threads. `target` names the server in error messages."""

    @property
    def target(self) -> str: ...
    def unary(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Res: ...
    def stream(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Call[Res]: ...
    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """What an `AsyncClient` needs."""

    @property
    def target(self) -> str: ...
    async def unary_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Res: ...
    def stream_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> AsyncCall[Res]: ...
    async def close_async(self) -> None: ...


class GrpcTransport:
    """A channel of the threaded gRPC. With `sessions`, calls of Generate at the same time share one Session."""

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        options: Options,
        sessions: bool | None = None,
    ) -> None:
        self._peer = ErrorTranslator(target)
        wanted = names_one_server(self.target) if sessions is None else sessions
        self._crowd = SessionMultiplexer[Session](wanted, self._open_session)
        chosen = channel_options(options)
        if credentials is None:
            self._channel = grpc.insecure_channel(self.target, options=chosen)
        else:
            self._channel = grpc.secure_channel(self.target, credentials, options=chosen)

    @property
    def target(self) -> str:
        return self._peer.target

    def unary(self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs) -> Res:
        self._peer.home.enter()
        call: Any = self._channel.unary_unary(method.path)
        try:
            with sigint.defer_sigint():
                future = call.future(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
            with sigint.cancel_on_sigint(future.cancel):
                data = future.result()
        except grpc.FutureCancelledError:
            raise errors.Cancelled("the call was cancelled") from None
        except grpc.RpcError as error:
            raise self._peer.failure(error, cancelled=False) from error
        except ValueError as error:
            raise self._peer.misuse(error) from error
        return self._peer.decoded(method, data)

    def stream(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Call[Res]:
        self._peer.home.enter()
        if method is not rpc_methods.GENERATE:
            return self._stream(method, request, timeout_seconds, metadata)
        pairs = tuple(metadata)
        call = self._crowd.start(
            cast("pb.GenerateRequest", request),
            timeout_seconds,
            pairs,
            lambda left: self._stream(method, request, left, pairs),
        )
        return cast("Call[Res]", _Counted(call, self._crowd.leave, self._peer))

    def _open_session(self, metadata: Pairs) -> Session:
        def open_call(orders: Iterator[pb.SessionRequest]) -> Any:
            multi = self._channel.stream_stream(
                rpc_methods.SESSION.path,
                rpc_methods.SESSION.encode,
                lambda data: self._peer.decoded(rpc_methods.SESSION, data),
            )
            try:
                return multi(orders, metadata=tuple(metadata))
            except ValueError as error:
                raise self._peer.misuse(error) from error

        return Session(self.target, open_call, self._peer.session_failure)

    def _stream(
        self, method: Method[Req, Res], request: Req, timeout_seconds: float | None, metadata: Pairs
    ) -> Call[Res]:
        call: Any = self._channel.unary_stream(method.path)
        try:
            started = call(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
        except ValueError as error:
            raise self._peer.misuse(error) from error
        return _GrpcCall(method, started, self._peer)

    def close(self) -> None:
        self._peer.closed = True
        if self._peer.home.is_elsewhere:
            return
        with sigint.defer_sigint():
            if (session := self._crowd.session) is not None:
                session.close()
            self._channel.close()


class _GrpcCall(Call[Res]):
    def __init__(self, method: Method[Any, Res], call: Any, peer: ErrorTranslator) -> None:
        self._method = method
        self._call = call
        self._peer = peer
        self._cancelled = False

    def __next__(self) -> Res:
        self._peer.home.enter()
        try:
            data = next(self._call)
        except grpc.RpcError as error:
            raise self._peer.failure(error, self._cancelled) from error
        return self._peer.decoded(self._method, data)

    def cancel(self) -> None:
        if self._peer.home.is_elsewhere:
            return
        self._cancelled = True
        self._call.cancel()


class AioTransport:
    """A channel of grpc.aio, opened by the first call, in whose event loop it then lives. `sessions` as above."""

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        options: Options,
        sessions: bool | None = None,
    ) -> None:
        self._peer = ErrorTranslator(target)
        wanted = names_one_server(self.target) if sessions is None else sessions
        self._crowd = SessionMultiplexer[AioSession](wanted, self._open_session)
        self._credentials = credentials
        self._options = channel_options(options)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def target(self) -> str:
        return self._peer.target

    async def unary_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Res:
        call: Any = self._open().unary_unary(method.path)
        try:
            data = await call(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
        except grpc.aio.AioRpcError as error:
            raise self._peer.failure(error, cancelled=False) from error
        except asyncio.CancelledError:
            if _hung_up(self._peer.closed):
                raise errors.Cancelled("the call was cancelled") from None
            raise
        return self._peer.decoded(method, data)

    def stream_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> AsyncCall[Res]:
        if method is not rpc_methods.GENERATE:
            return self._stream(method, request, timeout_seconds, metadata)
        pairs = tuple(metadata)
        call = self._crowd.start(
            cast("pb.GenerateRequest", request),
            timeout_seconds,
            pairs,
            lambda left: self._stream(method, request, left, pairs),
        )
        return cast("AsyncCall[Res]", _AioCounted(call, self._crowd.leave))

    def _open_session(self, metadata: Pairs) -> AioSession:
        multi = self._open().stream_stream(
            rpc_methods.SESSION.path,
            rpc_methods.SESSION.encode,
            lambda data: self._peer.decoded(rpc_methods.SESSION, data),
        )
        return AioSession(self.target, multi(metadata=tuple(metadata)), self._peer.session_failure)

    def _stream(
        self, method: Method[Req, Res], request: Req, timeout_seconds: float | None, metadata: Pairs
    ) -> AsyncCall[Res]:
        call: Any = self._open().unary_stream(method.path)
        started = call(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
        return _AioCall(method, started, self._peer)

    async def close_async(self) -> None:
        self._peer.closed = True
        if (session := self._crowd.session) is not None:
            await session.close()
        if self._channel is not None:
            await self._channel.close()

    def _open(self) -> grpc.aio.Channel:
        loop = asyncio.get_running_loop()
        if self._peer.closed:
            raise RuntimeError("the client is closed")
        AIO.enter()
        if self._channel is None:
            self._loop = loop
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.target, options=self._options)
            else:
                self._channel = grpc.aio.secure_channel(self.target, self._credentials, options=self._options)
        if self._loop is not loop:
            raise RuntimeError("an AsyncClient belongs to the event loop of its first call; make one for each loop")
        return self._channel


class _AioCall(AsyncCall[Res]):
    def __init__(self, method: Method[Any, Res], call: Any, peer: ErrorTranslator) -> None:
        self._method = method
        self._call = call
        self._peer = peer
        self._cancelled = False

    async def __anext__(self) -> Res:
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._peer.failure(error, self._cancelled) from error
        except asyncio.CancelledError:
            if _hung_up(self._cancelled or self._peer.closed):
                raise errors.Cancelled("the call was cancelled") from None
            raise
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._peer.decoded(self._method, data)

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()


def _hung_up(cancelled: bool) -> bool:
    """Whether a CancelledError is about the call, which this side ended, and not about the task that waits.

    gRPC raises it for both; only the second may unwind the task.
    """
    task = asyncio.current_task()
    return cancelled and not (task is not None and task.cancelling())


class _Counted(TrackedCall, Call[Res]):
    def __init__(self, call: Any, on_end: Callable[[], None], peer: ErrorTranslator) -> None:
        super().__init__(call, on_end)
        self._peer = peer

    def cancel(self) -> None:
        if not self._peer.home.is_elsewhere:
            super().cancel()

    def __next__(self) -> Res:
        self._peer.home.enter()
        try:
            found: Res = next(self._call)
        except BaseException:
            self._end()
            raise
        return found


class _AioCounted(TrackedCall, AsyncCall[Res]):
    async def __anext__(self) -> Res:
        try:
            found: Res = await self._call.__anext__()
        except BaseException:
            self._end()
            raise
        return found
