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
from lineclear.process.logging_setup import should_log
from lineclear.scheduler.grpc_api.error_interceptor import abort
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.reloading_file import ReloadingFile
from lineclear.scheduler.security.token_file import TokenTable

log = structlog.get_logger()

OPEN_METHODS = frozenset({f"/{health.SERVICE_NAME}/Check", f"/{health.SERVICE_NAME}/Watch"})
"""Probes carry no token, and learn nothing but whether we serve."""

_SCHEME = "bearer "
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Token:
    """A token that a call has shown. Compared again only when the file has changed."""

    def __init__(self, tokens: ReloadingFile[TokenTable], seen: TokenTable, token: str, name: str) -> None:
        self._tokens = tokens
        self._seen = seen
        self._token = token
        self._name = name

    def is_valid(self) -> bool:
        """Whether the token still has the name that it had."""
        current = self._tokens.current()
        if current is not self._seen and current.name_of(self._token) == self._name:
            self._seen = current
        return current is self._seen


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to every call that shows no valid token; the others carry their identity."""

    def __init__(self, tokens: ReloadingFile[TokenTable], on_error: Callable[[str], None]) -> None:
        self.num_refused = 0
        self._tokens = tokens
        self._no_token = _refusing(
            "this server asks for a token; send metadata `authorization: Bearer TOKEN`", on_error
        )
        self._bad_token = _refusing("the token is not valid here, or not any more", on_error)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler of the call's method, or the one that refuses."""
        if str(handler_call_details.method) in OPEN_METHODS:
            return await continuation(handler_call_details)
        token = _token(handler_call_details)
        tokens = self._tokens.current()
        name = None if token is None else tokens.name_of(token)
        if token is None or name is None:
            self._count_refused(token is None)
            return self._no_token if token is None else self._bad_token
        identity.remember(name, _Token(self._tokens, tokens, token, name).is_valid)
        return await continuation(handler_call_details)

    def _count_refused(self, is_missing: bool) -> None:
        self.num_refused += 1
        count = self.num_refused
        if should_log(count):
            log.warning("calls_unauthenticated", num_refused=count, problem="missing" if is_missing else "unknown")


def _token(details: grpc.HandlerCallDetails) -> str | None:
    """The token the call shows. Two of them are none: it would not be clear who is calling."""
    values = [value for key, value in details.invocation_metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].lower().startswith(_SCHEME):
        return None
    return values[0][len(_SCHEME) :].strip()


def _refusing(sentence: str, on_error: Callable[[str], None]) -> Handler:
    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        on_error(Unauthenticated.reason)
        await abort(context, Unauthenticated(sentence))

    # Of this kind nothing is read before it is called, and a caller of any other kind understands the status.
    handler: Handler = grpc.stream_stream_rpc_method_handler(refuse)
    return handler
