"""The transport of a client that makes gRPC calls, and its choice between a direct call and the shared Session."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

import grpc

from lineclear.v1 import inference_pb2 as pb

from .. import rpc_methods
from ..call_errors import ErrorTranslator
from ..grpc_channel import AsyncChannel
from ..requests import TENANT_KEY, TRACE_KEY
from ..retry import MAX_TIMEOUT_SECONDS, log
from ..rpc_methods import AsyncCall, Method, Options, Pairs
from ..sigint import AsyncCanceller
from ..target import checked_target, names_one_server
from .session import AsyncSession

Req = TypeVar("Req")
Res = TypeVar("Res")

_MIN_REFUSAL_SECONDS = 10.0
"""Shortest time for which requests are direct calls after the server refused a Session."""


class AsyncGrpcTransport:
    """A gRPC channel. With `sessions`, calls of Generate that run at the same time share one Session.

    `sessions` None: where the target names a single server.
    """

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None, options: Options, sessions: bool | None = None
    ) -> None:
        self._translator = ErrorTranslator(checked_target(target))
        shares = names_one_server(self.target) if sessions is None else sessions
        self._multiplexer = AsyncSessionMultiplexer(shares, self._open_session)
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


class AsyncSessionMultiplexer:
    """The number of open calls of a transport and the Session they share. Safe from any thread or task.

    `shares` False makes every call direct.
    """

    def __init__(
        self, shares: bool, open_session: Callable[[Pairs], AsyncSession], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.session: AsyncSession | None = None  # opened last
        self._shares = shares
        self._refused_until = -math.inf  # on `clock`
        self._open_session = open_session
        self._clock = clock
        self._lock = threading.Lock()
        self._num_open = 0
        self._metadata: Pairs | None = None

    def start(
        self,
        request: pb.GenerateRequest,
        timeout_seconds: float | None,
        metadata: Pairs,
        make_direct_call: Callable[[], Any],
    ) -> Any:
        """Start a call, through the Session or by `make_direct_call`. It counts as open until `on_end`."""
        tenant = next((str(value) for key, value in metadata if key == TENANT_KEY), "")
        try:
            with self._lock:
                session = self._choose(tuple(pair for pair in metadata if pair[0] != TENANT_KEY))
            if session is None:
                return make_direct_call()
            return session.start(request, timeout_seconds, make_direct_call, tenant)
        except BaseException:
            self.on_end()
            raise

    def on_end(self) -> None:
        """Decrement the number of open calls."""
        with self._lock:
            self._num_open -= 1

    def _choose(self, metadata: Pairs) -> AsyncSession | None:
        """Count one more open call and return the Session for it, None for a direct call.

        The only open call is a direct one. A Session has the metadata of one caller: that of the first call which
        shares, without its tenant, which each request names. Calls with other metadata or a trace are direct.
        """
        self._num_open += 1
        if self._num_open == 1 or not self._shares or any(key == TRACE_KEY for key, _ in metadata):
            return None
        if self._metadata is None:
            self._metadata = metadata
        if metadata != self._metadata:
            return None
        if self.session is None or self.session.is_over or self.session.is_closing:
            self.session = self._replace(self.session, metadata)
        return self.session

    def _replace(self, ended: AsyncSession | None, metadata: Pairs) -> AsyncSession | None:
        """Open a Session in the place of `ended`, None while the server has no room for one."""
        if ended is not None and ended.refusal is not None:
            refusal = ended.refusal
            log.info("the server refused a session (%s); requests are calls of their own", refusal.reason)
            pause_seconds = min(refusal.retry_after_seconds or 0.0, MAX_TIMEOUT_SECONDS)
            self._refused_until = self._clock() + max(_MIN_REFUSAL_SECONDS, pause_seconds)
        elif ended is not None:
            log.info("a session has ended; another is opened")
        return self._open_session(metadata) if self._clock() >= self._refused_until else None


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
