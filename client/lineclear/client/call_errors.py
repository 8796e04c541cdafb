"""Who is at the other end: whether anybody has ever been there, and what it means when a call fails.

From what gRPC reports to the LineclearError that says what happened. No waiting, and no retrying.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from lineclear import errors, grpc_status

from .channel import checked_target
from .fork_guard import OwnerProcess
from .rpc_methods import Method

Res = TypeVar("Res")

# How gRPC refuses a request: at the server, or here before it is sent.
_TOO_LARGE = re.compile(r"^(?:SERVER: Received|CLIENT: Sent) message larger than max \((\d+) vs\.? (\d+)\)")

# What gRPC says, under codes of a bug, when a stream ends without a status.
_CUT = ("RST_STREAM", "Stream removed", "Internal error from Core")
# What it says of a server that it did not get to. Anything else befell a connection that was there.
_NOBODY = ("backends failing", "ailed to connect", "rrors resolving", "DNS resolution failed", "name resolution")
# And what it says around that, as of many servers, with the code of a bug.
_ALL_OF_ONE = re.compile(r"^connections to all backends failing; last error: ([A-Z_]+: )?")


def check_request_size(size: int, limit: int) -> None:
    """Raises RequestTooLarge."""
    if size > limit:
        raise errors.RequestTooLarge(
            f"the request has {size} bytes and the limit is {limit}; shorten it, or raise --max-message-bytes of the "
            "server, and grpc.max_send_message_length in `options` of the client",
            metadata={"bytes": str(size), "limit": str(limit)},
        )


class ErrorTranslator:
    """The other end of one transport. Safe to use from many threads."""

    def __init__(self, target: str) -> None:
        """Raises ValueError for what is no target."""
        self.target = checked_target(target)
        self.closed = False
        """By this side."""
        self.owner = OwnerProcess()
        self.was_reachable = False
        """Somebody was there once: if nobody is now, a server has died or is starting again."""

    def decoded(self, method: Method[Any, Res], data: bytes) -> Res:
        """An answer. Raises DataLoss for bytes that are none."""
        self.was_reachable = True
        try:
            return method.decode(data)
        except DecodeError:
            raise errors.DataLoss(f"the server's answer to {method.path} is no such message") from None

    def failure(self, error: Any, cancelled: bool) -> errors.LineclearError:
        """What ended a call: the server's own word, or the one that says what happened on the way.

        `cancelled` says that this side hung up.
        """
        code = error.code().name
        trailers = dict(error.trailing_metadata() or ())
        trailer = trailers.get(grpc_status.TRAILER)
        found = grpc_status.from_trailer(code, error.details() or f"the server gave no reason ({code})", trailer)
        if trailer is None:
            found = self._without_word(code, found, cancelled or self.closed)
        else:
            self.was_reachable = True
        if found.retry_after_seconds is None and _PUSHBACK in trailers:
            found.retry_after_seconds = _pushback_seconds(trailers[_PUSHBACK])
        return found

    def session_failure(self, error: BaseException) -> errors.LineclearError:
        """What ended a session, whatever was raised."""
        if isinstance(error, errors.LineclearError):
            return error
        if isinstance(error, asyncio.CancelledError):
            return errors.Cancelled("the call was cancelled")
        if isinstance(error, grpc.RpcError):  # AioRpcError is one too
            return self.failure(error, cancelled=False)
        return self._lost(f"no answer from {self.target}: the session broke ({type(error).__name__})")

    def misuse(self, error: ValueError) -> Exception:
        """gRPC reports a call on a closed channel as a ValueError, which says nothing to a caller of ours."""
        return RuntimeError("the client is closed") if self.closed else error

    def _without_word(self, code: str, found: errors.LineclearError, cancelled: bool) -> errors.LineclearError:
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
            sentence = f"no answer from {self.target}: {_ALL_OF_ONE.sub('', text)}"
            if not self.was_reachable and any(sign in text for sign in _NOBODY):
                return errors.Unreachable(sentence)
            return self._lost(sentence)
        if isinstance(found, errors.DeadlineExceeded):
            return errors.DeadlineExceeded("the deadline of the call passed before the answer was complete")
        if isinstance(found, errors.Cancelled):
            if cancelled:
                return errors.Cancelled("the call was cancelled")
            # A server that stops ends what comes in late like this. Nobody hung up: whoever asked may ask again.
            return self._lost(f"no answer from {self.target}: it ended the call")
        return found

    def _lost(self, sentence: str) -> errors.ConnectionLost:
        self.was_reachable = True
        return errors.ConnectionLost(sentence)


_PUSHBACK = "grpc-retry-pushback-ms"


def _pushback_seconds(value: str | bytes) -> float:
    """When a server wants the same call again, in gRPC's own word for it; what is no such time means never."""
    try:
        milliseconds = int(value)
    except ValueError:
        return math.inf
    return milliseconds / 1000 if milliseconds >= 0 else math.inf
