"""How calls reach a server: the seam between the clients and gRPC, and gRPC behind it.

A transport carries one request and its answers and turns whatever goes wrong into a LineclearError; it never retries
and never looks into a message. `lineclear.client.testing.FakeTransport` is another one, without a server.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from lineclear import errors, status
from lineclear.limits import MAX_MESSAGE_BYTES
from lineclear.v1 import inference_pb2 as pb

from . import methods
from .methods import Method
from .routing import names_one_server
from .sessions import AioSession, Session

Req = TypeVar("Req")
Res = TypeVar("Res")
Res_co = TypeVar("Res_co", covariant=True)
Pairs = Sequence[tuple[str, str | bytes]]
Options = Sequence[tuple[str, Any]]

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_PORT = 50051


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
        self.target = checked_target(target)
        self._crowd = Crowd(names_one_server(self.target) if sessions is None else sessions)
        self._lock = threading.Lock()
        self._session: Session | None = None
        chosen = channel_options(options)
        if credentials is None:
            self._channel = grpc.insecure_channel(self.target, options=chosen)
        else:
            self._channel = grpc.secure_channel(self.target, credentials, options=chosen)
        self.closed = False

    def unary(self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs) -> Res:
        call: Any = self._channel.unary_unary(method.path)
        try:
            data = call(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
        except grpc.RpcError as error:
            raise failure(error, self.target, cancelled=self.closed) from error
        except ValueError as error:
            raise _closed(self.closed, error) from error
        return decoded(method, data)

    def stream(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Call[Res]:
        if method is not methods.GENERATE:
            return self._stream(method, request, timeout_seconds, metadata)
        pairs = tuple(metadata)
        with self._lock:
            shared = self._crowd.enter(pairs)
            if shared and (self._session is None or self._session.is_over):
                self._crowd.is_welcome = self._session is None or not self._session.is_missing
                shared = self._crowd.is_welcome
                self._session = self._open_session(pairs) if shared else None
            session = self._session if shared else None
        call: Any = (
            self._stream(method, request, timeout_seconds, pairs)
            if session is None
            else session.begin(
                cast("pb.GenerateRequest", request),
                timeout_seconds,
                lambda left: self._stream(method, request, left, pairs),
            )
        )
        return cast("Call[Res]", _Counted(call, self._leave))

    def _leave(self) -> None:
        with self._lock:
            self._crowd.leave()

    def _open_session(self, metadata: Pairs) -> Session:
        def open_call(orders: Iterator[pb.SessionRequest]) -> Any:
            multi = self._channel.stream_stream(
                methods.SESSION.path, methods.SESSION.encode, lambda data: decoded(methods.SESSION, data)
            )
            try:
                return multi(orders, metadata=tuple(metadata))
            except ValueError as error:
                raise _closed(self.closed, error) from error

        return Session(self.target, open_call, lambda error: _session_failure(error, self.target, self.closed))

    def _stream(
        self, method: Method[Req, Res], request: Req, timeout_seconds: float | None, metadata: Pairs
    ) -> Call[Res]:
        call: Any = self._channel.unary_stream(method.path)
        try:
            started = call(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
        except ValueError as error:
            raise _closed(self.closed, error) from error
        return _GrpcCall(method, started, self)

    def close(self) -> None:
        self.closed = True
        with self._lock:
            session = self._session
        if session is not None:
            session.close()
        self._channel.close()


class _GrpcCall(Call[Res]):
    def __init__(self, method: Method[Any, Res], call: Any, transport: GrpcTransport) -> None:
        self._method = method
        self._call = call
        self._transport = transport
        self._cancelled = False

    def __next__(self) -> Res:
        try:
            data = next(self._call)
        except grpc.RpcError as error:
            cancelled = self._cancelled or self._transport.closed
            raise failure(error, self._transport.target, cancelled) from error
        return decoded(self._method, data)

    def cancel(self) -> None:
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
        self.target = checked_target(target)
        self._crowd = Crowd(names_one_server(self.target) if sessions is None else sessions)
        self._session: AioSession | None = None
        self._credentials = credentials
        self._options = channel_options(options)
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    async def unary_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Res:
        call: Any = self._open().unary_unary(method.path)
        try:
            data = await call(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
        except grpc.aio.AioRpcError as error:
            raise failure(error, self.target, cancelled=self.closed) from error
        except asyncio.CancelledError:
            if self.hung_up(False):
                raise errors.Cancelled("the call was cancelled") from None
            raise
        return decoded(method, data)

    def stream_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> AsyncCall[Res]:
        if method is not methods.GENERATE:
            return self._stream(method, request, timeout_seconds, metadata)
        pairs = tuple(metadata)
        shared = self._crowd.enter(pairs)
        if shared and (self._session is None or self._session.is_over):
            self._crowd.is_welcome = self._session is None or not self._session.is_missing
            shared = self._crowd.is_welcome
            self._session = self._open_session(pairs) if shared else None
        call: Any = (
            self._stream(method, request, timeout_seconds, pairs)
            if not shared or self._session is None
            else self._session.begin(
                cast("pb.GenerateRequest", request),
                timeout_seconds,
                lambda left: self._stream(method, request, left, pairs),
            )
        )
        return cast("AsyncCall[Res]", _AioCounted(call, self._crowd.leave))

    def _open_session(self, metadata: Pairs) -> AioSession:
        multi = self._open().stream_stream(
            methods.SESSION.path, methods.SESSION.encode, lambda data: decoded(methods.SESSION, data)
        )
        call = multi(metadata=tuple(metadata))
        return AioSession(self.target, call, lambda error: _session_failure(error, self.target, self.closed))

    def _stream(
        self, method: Method[Req, Res], request: Req, timeout_seconds: float | None, metadata: Pairs
    ) -> AsyncCall[Res]:
        call: Any = self._open().unary_stream(method.path)
        started = call(method.encode(request), timeout=timeout_seconds, metadata=tuple(metadata))
        return _AioCall(method, started, self)

    async def close_async(self) -> None:
        self.closed = True
        if self._session is not None:
            await self._session.close()
        if self._channel is not None:
            await self._channel.close()

    def hung_up(self, cancelled: bool) -> bool:
        """Whether a CancelledError is about the call, which this side ended, and not about the task that waits.

        gRPC raises it for both; only the second may unwind the task.
        """
        task = asyncio.current_task()
        return (cancelled or self.closed) and not (task is not None and task.cancelling())

    def _open(self) -> grpc.aio.Channel:
        loop = asyncio.get_running_loop()
        if self.closed:
            raise RuntimeError("the client is closed")
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
    def __init__(self, method: Method[Any, Res], call: Any, transport: AioTransport) -> None:
        self._method = method
        self._call = call
        self._transport = transport
        self._cancelled = False

    async def __anext__(self) -> Res:
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise failure(error, self._transport.target, self._cancelled or self._transport.closed) from error
        except asyncio.CancelledError:
            if self._transport.hung_up(self._cancelled):
                raise errors.Cancelled("the call was cancelled") from None
            raise
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        return decoded(self._method, data)

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()


class Crowd:
    """How many calls of Generate are open, and whether the next one is to go through a session."""

    def __init__(self, wanted: bool) -> None:
        self.is_welcome = wanted
        """The server has sessions, as far as we know, and we want them."""
        self._open = 0
        self._metadata: Pairs | None = None

    def enter(self, metadata: Pairs) -> bool:
        """One more call. True: through the session, whose metadata is that of the first call that came here so."""
        self._open += 1
        if self._open == 1 or not self.is_welcome:
            return False
        if self._metadata is None:
            self._metadata = metadata
        return metadata == self._metadata  # a session has one caller; what others say is said by a call of their own

    def leave(self) -> None:
        """One less."""
        self._open -= 1


class _Counted(Call[Res]):
    """A call that says once when it is over."""

    def __init__(self, call: Any, on_end: Callable[[], None]) -> None:
        self._call = call
        self._on_end: Callable[[], None] | None = on_end

    def __next__(self) -> Res:
        try:
            found: Res = next(self._call)
        except BaseException:
            self._end()
            raise
        return found

    def cancel(self) -> None:
        self._call.cancel()
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


class _AioCounted(AsyncCall[Res]):
    def __init__(self, call: Any, on_end: Callable[[], None]) -> None:
        self._call = call
        self._on_end: Callable[[], None] | None = on_end

    async def __anext__(self) -> Res:
        try:
            found: Res = await self._call.__anext__()
        except BaseException:
            self._end()
            raise
        return found

    def cancel(self) -> None:
        self._call.cancel()
        self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


def checked_target(target: str) -> str:
    """The target as gRPC wants it. A bare host gets the default port. Raises ValueError with a sentence that helps."""
    target = target.strip().removeprefix("grpc://")
    if not target:
        raise ValueError("the target is empty; it is host:port or unix:/path")
    if target.startswith(("http://", "https://", "grpcs://")):
        raise ValueError(f"the target {target!r} is a URL; write host:port, and pass credentials for TLS")
    if target.startswith("unix:"):
        path = target.removeprefix("unix:")
        if len(path.encode()) > 107 + len("//"):
            raise ValueError("the path of a unix socket has at most 107 bytes")
        return target
    if ":" not in target:
        return f"{target}:{DEFAULT_PORT}"
    return target


def channel_options(options: Options = ()) -> list[tuple[str, Any]]:
    """Ours, with those of the caller in their place where the names are the same."""
    try:
        own_version = version("lineclear")
    except PackageNotFoundError:
        own_version = "unknown"
    chosen: dict[str, Any] = {
        "grpc.primary_user_agent": f"lineclear-python/{own_version}",
        "grpc.keepalive_time_ms": 30_000,
        "grpc.keepalive_timeout_ms": 10_000,
        # A request waiting in the queue is a call without data: its keepalives must not be rationed.
        "grpc.http2.max_pings_without_data": 0,
        # What a server takes and sends; a larger request is refused here before it travels.
        "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
        "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
        # Reconnecting must not be slower than the pauses between attempts.
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.min_reconnect_backoff_ms": 1_000,
        "grpc.max_reconnect_backoff_ms": 5_000,
        # Behind a headless Service every replica gets its share.
        "grpc.service_config": '{"loadBalancingConfig": [{"round_robin": {}}]}',
        # A proxy for the web is hardly ever on the way to an inference server, and http_proxy is often set.
        "grpc.enable_http_proxy": 0,
    }
    return list((chosen | dict(options)).items())


# What gRPC says, under codes of a bug, when a stream ends without a status.
_CUT = ("RST_STREAM", "Stream removed", "Internal error from Core")


def failure(error: Any, target: str, cancelled: bool) -> errors.LineclearError:
    """What ended a call, as a LineclearError: the server's own, or the one that says what happened on the way.

    `cancelled` says that this side hung up.
    """
    code = error.code().name
    trailer = dict(error.trailing_metadata() or ()).get(status.TRAILER)
    found = status.from_trailer(code, error.details() or f"the server gave no reason ({code})", trailer)
    if trailer is None:
        if code in ("INTERNAL", "UNKNOWN") and any(sign in str(found) for sign in _CUT):
            return errors.Unreachable(f"the connection to {target} was cut: {found}")
        if isinstance(found, errors.Unreachable):
            return errors.Unreachable(f"no answer from {target}: {found}")
        if isinstance(found, errors.DeadlineExceeded):
            return errors.DeadlineExceeded("the deadline of the call passed before the answer was complete")
        if isinstance(found, errors.Cancelled):
            if cancelled:
                return errors.Cancelled("the call was cancelled")
            # A server that stops ends what comes in late like this. Nobody hung up: whoever asked may ask again.
            return errors.Unreachable(f"no answer from {target}: it ended the call")
    return found


def _session_failure(error: BaseException, target: str, cancelled: bool) -> errors.LineclearError:
    """What ended a session, whatever was raised."""
    if isinstance(error, errors.LineclearError):
        return error
    if isinstance(error, grpc.RpcError):  # AioRpcError is one too
        return failure(error, target, cancelled)
    return errors.Unreachable(f"no answer from {target}: the session broke ({type(error).__name__})")


def decoded(method: Method[Any, Res], data: bytes) -> Res:
    try:
        return method.decode(data)
    except DecodeError:
        raise errors.DataLoss(f"the server's answer to {method.path} is no such message") from None


def _closed(closed: bool, error: ValueError) -> Exception:
    """gRPC reports a call on a closed channel as a ValueError, which says nothing to a caller of ours."""
    return RuntimeError("the client is closed") if closed else error
