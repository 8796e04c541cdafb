"""Translate gRPC errors to LineclearErrors."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from lineclear import errors, status_codec

from .fork_guard import OwnerProcess
from .rpc_methods import Method
from .target import hint_of_default

Res = TypeVar("Res")

# How gRPC refuses a request: at the server, or here before it is sent.
_TOO_LARGE = re.compile(r"^(?:SERVER: Received|CLIENT: Sent) message larger than max \((\d+) vs\.? (\d+)\)")

# Texts with which gRPC reports a stream that ended without a status, as INTERNAL or UNKNOWN.
_CUT = ("RST_STREAM", "Stream removed", "Internal error from Core")
# Texts for a server that could not be reached. Other texts mean that a connection broke.
_NEVER_REACHED = ("backends failing", "ailed to connect", "rrors resolving", "DNS resolution failed", "name resolution")
# The prefix of these texts with round_robin, which has one server here.
_ROUND_ROBIN_PREFIX = re.compile(r"^connections to all backends failing; last error: ([A-Z_]+: )?")


def check_request_size(size: int, limit: int) -> None:
    """Raise RequestTooLarge if a request of `size` bytes exceeds `limit`."""
    if size > limit:
        raise errors.RequestTooLarge(
            f"the request has {size} bytes and the limit is {limit}; shorten it, or raise --max-message-bytes of the "
            "server, and grpc.max_send_message_length in `options` of the client",
            metadata={"bytes": str(size), "limit": str(limit)},
        )


class ErrorTranslator:
    """Translates the errors of one transport, and remembers whether its server was reachable. Thread-safe."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.closed = False
        """Whether this client was closed."""
        self.owner = OwnerProcess()
        self.was_reachable = False
        """Whether this target has ever answered. If so, a failure to connect means that the server went away."""

    def decoded(self, method: Method[Any, Res], data: bytes) -> Res:
        """Decode a response. Raises DataLoss if the bytes are not such a message."""
        self.was_reachable = True
        try:
            return method.decode(data)
        except DecodeError:
            raise errors.DataLoss(f"the server's answer to {method.path} is no such message") from None

    def failure(self, error: Any, cancelled: bool) -> errors.LineclearError:
        """Return the error of the server, or one for what happened on the way. `cancelled`: this client cancelled."""
        code = error.code().name
        trailers = dict(error.trailing_metadata() or ())
        trailer = trailers.get(status_codec.TRAILER)
        found = status_codec.from_trailer(code, error.details() or f"the server gave no reason ({code})", trailer)
        if trailer is None:
            found = self._without_trailer(code, found, cancelled or self.closed)
        else:
            self.was_reachable = True
        if found.retry_after_seconds is None and _PUSHBACK in trailers:
            found.retry_after_seconds = _pushback_seconds(trailers[_PUSHBACK])
        return found

    def session_failure(self, error: BaseException) -> errors.LineclearError:
        """Return the LineclearError for any error that ended a session."""
        if isinstance(error, errors.LineclearError):
            return error
        if isinstance(error, asyncio.CancelledError):
            return errors.Cancelled("the call was cancelled")
        if isinstance(error, grpc.RpcError):  # AioRpcError is one too
            return self.failure(error, cancelled=False)
        return self._lost(f"no answer from {self.target}: the session broke ({type(error).__name__})")

    def misuse(self, error: ValueError) -> Exception:
        """Return RuntimeError for the ValueError that gRPC raises for a call on a closed channel."""
        return RuntimeError("the client is closed") if self.closed else error

    def _without_trailer(self, code: str, found: errors.LineclearError, cancelled: bool) -> errors.LineclearError:
        text = str(found)
        if code == "RESOURCE_EXHAUSTED" and (too_large := _TOO_LARGE.match(text)):
            self.was_reachable = True
            try:
                check_request_size(int(too_large[1]), int(too_large[2]))
            except errors.RequestTooLarge as refusal:
                return refusal
        if code in ("INTERNAL", "UNKNOWN") and any(sign in text for sign in _CUT):
            return self._lost(f"the connection to {self.target} was cut: {text}")
        if isinstance(found, errors.Unreachable):
            sentence = f"no answer from {self.target}: {_ROUND_ROBIN_PREFIX.sub('', text)}"
            if not self.was_reachable and any(sign in text for sign in _NEVER_REACHED):
                return errors.Unreachable(sentence + hint_of_default(self.target))
            return self._lost(sentence)
        if isinstance(found, errors.DeadlineExceeded):
            return errors.DeadlineExceeded("the deadline of the call passed before the answer was complete")
        if isinstance(found, errors.Cancelled):
            if cancelled:
                return errors.Cancelled("the call was cancelled")
            # A server that stops cancels the calls that arrive late. They may be retried.
            return self._lost(f"no answer from {self.target}: it ended the call")
        return found

    def _lost(self, sentence: str) -> errors.ConnectionLost:
        self.was_reachable = True
        return errors.ConnectionLost(sentence)


_PUSHBACK = "grpc-retry-pushback-ms"


def _pushback_seconds(value: str | bytes) -> float:
    """Parse gRPC's retry pushback. A negative or invalid value means that the call must not be retried."""
    try:
        milliseconds = int(value)
    except ValueError:
        return math.inf
    return milliseconds / 1000 if milliseconds >= 0 else math.inf
