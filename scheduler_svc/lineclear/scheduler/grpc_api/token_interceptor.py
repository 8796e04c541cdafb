"""Require a valid bearer token for every call of a listener, except health checks.

Tokens are checked before the message is read and before the method is looked up. So a client without a token learns no
method names, and new methods are protected by default.
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
from lineclear.scheduler.grpc_api.error_interceptor import rejecting_handler
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.reloading_file import ReloadingFile
from lineclear.scheduler.security.token_file import TokenTable

log = structlog.get_logger()

OPEN_METHODS = frozenset({f"/{health.SERVICE_NAME}/Check", f"/{health.SERVICE_NAME}/Watch"})
"""Probes have no token, and learn only the serving status."""

_SCHEME = "bearer "
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Token:
    """The token of one call. Compared again only after the file has changed."""

    def __init__(self, tokens: ReloadingFile[TokenTable], seen: TokenTable, token: str, name: str) -> None:
        self._tokens = tokens
        self._seen = seen
        self._token = token
        self._name = name

    def is_valid(self) -> bool:
        """Whether the token still belongs to the same tenant."""
        current = self._tokens.current()
        if current is not self._seen and current.name_of(self._token) == self._name:
            self._seen = current
        return current is self._seen


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED to calls without a valid token, and sets the identity of the others."""

    def __init__(self, tokens: ReloadingFile[TokenTable], on_error: Callable[[str], None]) -> None:
        self.num_rejected = 0
        self._tokens = tokens
        missing = "a token is required; send metadata `authorization: Bearer TOKEN`"
        self._no_token = rejecting_handler(Unauthenticated(missing), on_error)
        self._bad_token = rejecting_handler(Unauthenticated("the token is unknown or revoked"), on_error)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the handler of the method, or the handler that rejects the call."""
        if str(handler_call_details.method) in OPEN_METHODS:
            return await continuation(handler_call_details)
        token = _token(handler_call_details)
        tokens = self._tokens.current()
        name = None if token is None else tokens.name_of(token)
        if token is None or name is None:
            self._count_rejected(token is None)
            return self._no_token if token is None else self._bad_token
        identity.remember(name, _Token(self._tokens, tokens, token, name).is_valid)
        return await continuation(handler_call_details)

    def _count_rejected(self, is_missing: bool) -> None:
        self.num_rejected += 1
        count = self.num_rejected
        if should_log(count):
            log.warning("auth_failures", num_rejected=count, problem="missing" if is_missing else "unknown")


def _token(details: grpc.HandlerCallDetails) -> str | None:
    """Return the token of a call. Two tokens count as none, because the tenant would be ambiguous."""
    values = [value for key, value in details.invocation_metadata or () if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].lower().startswith(_SCHEME):
        return None
    return values[0][len(_SCHEME) :].strip()
