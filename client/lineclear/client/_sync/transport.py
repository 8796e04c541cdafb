# Generated from _async/transport.py by client/unasync.py. Do not edit.
"""The transport of a client that makes gRPC calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import grpc

from lineclear.v1 import inference_pb2 as pb

from .. import rpc_methods
from ..call_errors import ErrorTranslator
from ..channel import Options, Pairs
from ..grpc_channel import Channel
from ..rpc_methods import Method
from ..session_messages import names_one_server
from ..session_multiplexer import SessionMultiplexer
from ..sigint import Canceller
from ..transports import Call
from .session import Session

Req = TypeVar("Req")
Res = TypeVar("Res")


class GrpcTransport:
    """A gRPC channel. With `sessions`, calls of Generate that run at the same time share one Session.

    `sessions` None: where the target names a single server.
    """

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None, options: Options, sessions: bool | None = None
    ) -> None:
        self._translator = ErrorTranslator(target)
        shares = names_one_server(self.target) if sessions is None else sessions
        self._multiplexer = SessionMultiplexer[Session](shares, self._open_session)
        self._channel = Channel(self._translator, credentials, options)

    @property
    def target(self) -> str:
        return self._translator.target

    def unary(self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs) -> Res:
        return self._channel.unary(method, request, timeout_seconds, metadata)

    def stream(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Call[Res]:
        def make_direct_call() -> Call[Res]:
            return self._channel.stream(method, request, timeout_seconds, metadata)

        self._translator.owner.enter()
        if method is not rpc_methods.GENERATE:
            return make_direct_call()
        generate = cast("pb.GenerateRequest", request)
        call = self._multiplexer.start(generate, timeout_seconds, tuple(metadata), make_direct_call)
        return cast("Call[Res]", _TrackedCall(call, self._multiplexer.on_end, self._translator))

    def close(self) -> None:
        self._translator.closed = True
        if self._translator.owner.is_elsewhere:
            return
        with Canceller.deferred():
            if (session := self._multiplexer.session) is not None:
                session.close()
            self._channel.close()

    def _open_session(self, metadata: Pairs) -> Session:
        def open_call(messages: Iterator[pb.SessionRequest]) -> Any:
            return self._channel.bidirectional(rpc_methods.SESSION, messages, metadata)

        return Session(self.target, open_call, self._translator.session_failure)


class _TrackedCall(Call[Res]):
    """A call of Generate, which the multiplexer counts as open until it ends."""

    def __init__(self, call: Any, on_end: Callable[[], None], translator: ErrorTranslator) -> None:
        self._call = call
        self._on_end: Callable[[], None] | None = on_end
        self._translator = translator

    def __next__(self) -> Res:
        self._translator.owner.enter()
        try:
            response: Res = self._call.__next__()
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
