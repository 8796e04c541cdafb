"""Who is let in: every call of a listener with tokens shows a valid one, except a health check.

Decides before the message is read and before the method is looked up, so a caller without a token learns not even
which methods there are, and a method that somebody adds tomorrow is closed until somebody opens it here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health

from lineclear.errors import Unauthenticated
from lineclear.scheduler.access import identity
from lineclear.scheduler.access.interceptor import abort
from lineclear.scheduler.access.tokens import Tokens
from lineclear.scheduler.access.watched import Watched

log = structlog.get_logger()

OPEN_METHODS = frozenset({f"/{health.SERVICE_NAME}/Check", f"/{health.SERVICE_NAME}/Watch"})
"""Probes carry no token, and learn nothing but whether we serve."""

_SCHEME = "bearer "
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to every call that shows no valid token; the others carry their identity."""

    def __init__(self, tokens: Watched[Tokens]) -> None:
        self.num_refused = 0
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of the call's method, or the one that refuses."""
        if str(handler_call_details.method) in OPEN_METHODS:
            return await continuation(handler_call_details)
        token = _token(handler_call_details)
        name = None if token is None else self._tokens.current().name_of(token)
        if name is None:
            self._count_refused(token is None)
            return _NO_TOKEN if token is None else _BAD_TOKEN
        identity.remember(name)
        return await continuation(handler_call_details)

    def _count_refused(self, is_missing: bool) -> None:
        self.num_refused += 1
        count = self.num_refused
        if count & (count - 1) == 0:  # 1, 2, 4, 8 ...: who guesses cannot fill the log
            log.warning("calls_unauthenticated", num_refused=count, problem="missing" if is_missing else "unknown")


def _token(details: grpc.HandlerCallDetails) -> str | None:
    """The token the call shows. Two of them are none: it would not be clear who is calling."""
    values = [value for key, value in details.invocation_metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].lower().startswith(_SCHEME):
        return None
    return values[0][len(_SCHEME) :].strip()


def _refusing(sentence: str) -> Handler:
    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, Unauthenticated(sentence))

    # Of this kind nothing is read before it is called, and a caller of any other kind understands the status.
    handler: Handler = grpc.stream_stream_rpc_method_handler(refuse)
    return handler


_NO_TOKEN = _refusing("this server asks for a token; send metadata `authorization: Bearer TOKEN`")
_BAD_TOKEN = _refusing("the token is not valid here, or not any more")
