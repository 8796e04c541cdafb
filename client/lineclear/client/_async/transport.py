"""The transport of a client that makes gRPC calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

import grpc

from lineclear.v1 import inference_pb2 as pb

from .. import rpc_methods
from ..call_errors import ErrorTranslator
from ..channel import Options, Pairs
from ..grpc_channel import AsyncChannel
from ..rpc_methods import Method
from ..session_messages import names_one_server
from ..session_multiplexer import SessionMultiplexer
from ..sigint import AsyncCanceller
from ..transports import AsyncCall
from .session import AsyncSession

Req = TypeVar("Req")
Res = TypeVar("Res")


class AsyncGrpcTransport:
    """A gRPC channel. With `sessions`, calls of Generate that run at the same time share one Session.

    `sessions` None: where the target names a single server.
    """

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None, options: Options, sessions: bool | None = None
    ) -> None:
        self._translator = ErrorTranslator(target)
        shares = names_one_server(self.target) if sessions is None else sessions
        self._multiplexer = SessionMultiplexer[AsyncSession](shares, self._open_session)
        self._channel = AsyncChannel(self._translator, credentials, options)

    @property
    def target(self) -> str:
        return self._translator.target

    async def unary_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Res:
        return await self._channel.unary(method, request, timeout_seconds, metadata)

    def stream_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> AsyncCall[Res]:
        def make_direct_call() -> AsyncCall[Res]:
            return self._channel.stream(method, request, timeout_seconds, metadata)

        self._translator.owner.enter()
        if method is not rpc_methods.GENERATE:
            return make_direct_call()
        generate = cast("pb.GenerateRequest", request)
        call = self._multiplexer.start(generate, timeout_seconds, tuple(metadata), make_direct_call)
        return cast("AsyncCall[Res]", _TrackedCall(call, self._multiplexer.on_end, self._translator))

    async def close_async(self) -> None:
        self._translator.closed = True
        if self._translator.owner.is_elsewhere:
            return
        with AsyncCanceller.deferred():
            if (session := self._multiplexer.session) is not None:
                await session.close()
            await self._channel.close()

    def _open_session(self, metadata: Pairs) -> AsyncSession:
        def open_call(messages: AsyncIterator[pb.SessionRequest]) -> Any:
            return self._channel.bidirectional(rpc_methods.SESSION, messages, metadata)

        return AsyncSession(self.target, open_call, self._translator.session_failure)


class _TrackedCall(AsyncCall[Res]):
    """A call of Generate, which the multiplexer counts as open until it ends."""

    def __init__(self, call: Any, on_end: Callable[[], None], translator: ErrorTranslator) -> None:
        self._call = call
        self._on_end: Callable[[], None] | None = on_end
        self._translator = translator

    async def __anext__(self) -> Res:
        self._translator.owner.enter()
        try:
            response: Res = await self._call.__anext__()
        except BaseException:
            self._end()
            raise
        return response

    def cancel(self) -> None:
        if not self._translator.owner.is_elsewhere:
            self._call.cancel()
            self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
