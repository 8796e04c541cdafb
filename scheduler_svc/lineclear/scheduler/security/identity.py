"""The tenant of a call: for quotas, fair sharing, and the separation of prefix caches."""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

import grpc.aio

from lineclear.scheduler.core.policies import share_of
from lineclear.scheduler.security.memory_file import memory_file

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""A call, as gRPC passes it to a handler."""


class Identity(NamedTuple):
    """The proven tenant of a call. Clients of one tenant are not distinguished."""

    tenant: str = ""
    """Name of the token or client certificate; empty if the listener requires neither."""
    proof: str = "none"
    """"token", "certificate" or "none"."""


class TraceContext(NamedTuple):
    """The span that a call belongs to, as its metadata names it (W3C Trace Context). Empty without a valid one."""

    parent: str = ""
    """The `traceparent`."""
    state: str = ""
    """The `tracestate`, unchecked."""

    @property
    def trace_id(self) -> str:
        """The trace id, 32 hexadecimal digits; empty without one."""
        return self.parent[3:35]


ANONYMOUS, _NO_TRACE = Identity(), TraceContext()
TENANT_KEY = "x-tenant-id"
TRACE_KEYS = ("traceparent", "tracestate")
_MAX_TENANT = 64
_MAX_TRACE_STATE = 512
_LOGGED_TENANT = re.compile(r"[A-Za-z0-9._:@-]{1,64}")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?", re.DOTALL)

# Set by the interceptor in the task of the call, so only that call's handler reads it.
_by_token: ContextVar[Identity | None] = ContextVar("identity", default=None)
_flow: ContextVar[str] = ContextVar("flow", default="")
_trace: ContextVar[TraceContext] = ContextVar("trace", default=_NO_TRACE)
_is_valid: ContextVar[Callable[[], bool]] = ContextVar("is_valid", default=lambda: True)


def remember(tenant: str, is_valid: Callable[[], bool]) -> None:
    """Set the tenant of this task's call. `is_valid` returns whether its token is still accepted."""
    _by_token.set(Identity(tenant, "token"))
    _is_valid.set(is_valid)


def validity() -> Callable[[], bool]:
    """Return a function that checks at a later time whether the token of this task's call is still accepted.

    For Sessions. Always true on listeners without tokens.
    """
    return _is_valid.get()


def certificate_validity(context: Context) -> Callable[[], bool]:
    """Return a function that checks at a later time whether the client certificate has not expired.

    TLS checks it only when the connection is made. Always true on listeners without client certificates.
    """
    ends_at = min((_expiry(pem) for pem in context.auth_context().get("x509_pem_cert", ())), default=math.inf)
    return lambda: _wall_clock() < ends_at


def caller(context: Context) -> Identity:
    """Return the identity of a call. To be called in the call's own task."""
    shown = _by_token.get()
    if shown is not None:
        return shown
    name = _certificate_name(context.auth_context())
    return Identity(name, "certificate") if name else ANONYMOUS


def tenant(proven: Identity, context: Context) -> str:
    """Return the tenant that quotas count a call for: the proven one, else the one in its metadata.

    The metadata is an unproven claim, for example of a gateway about its customers; it grants no access.
    """
    if proven.tenant:
        return proven.tenant
    for key, value in context.invocation_metadata() or ():
        if key == TENANT_KEY and isinstance(value, str):
            return value[:_MAX_TENANT]
    return ""


def tenant_of_request(proven: Identity, named: str, of_call: str) -> str:
    """Return the tenant of one request of a Session: the proven one, else the one that the request names.

    As unproven as the metadata of a call. A request that names none has the tenant of the call.
    """
    return proven.tenant or named[:_MAX_TENANT] or of_call


def set_flow(tenant: str, context: Context) -> None:
    """Count the work of this call and of its later tasks for `tenant`, or for its connection without a tenant.

    Remember the trace of the call, too.
    """
    _flow.set(context.peer())
    set_flow_tenant(tenant)
    found = {key: value for key, value in context.invocation_metadata() or () if key in TRACE_KEYS}
    if found:
        _trace.set(_trace_of(*(found.get(key, "") for key in TRACE_KEYS)))


def set_flow_tenant(tenant: str) -> None:
    """Count the work of this task for `tenant`. No effect without a tenant."""
    if tenant:
        _flow.set(f"tenant:{tenant}")


def flow() -> str:
    """Return the key that FairSemaphore divides work by."""
    return _flow.get()


def trace() -> TraceContext:
    """Return the trace of this task's call."""
    return _trace.get()


def _trace_of(parent: Any, state: Any) -> TraceContext:
    found = _TRACE_PARENT.fullmatch(parent) if isinstance(parent, str) else None
    if not found or not found[1].strip("0") or parent.startswith("ff"):
        return _NO_TRACE
    return TraceContext(parent, state if isinstance(state, str) and len(state) <= _MAX_TRACE_STATE else "")


def logged_tenant(proven: Identity, tenant: str) -> str:
    """Return a tenant for the log: a proven name, or a claim without content; of other claims, the hash `share_of`.

    The operator has chosen a proven name. A claim is text of the client: only the characters of names are logged.
    """
    if not tenant or (proven.tenant == tenant) or _LOGGED_TENANT.fullmatch(tenant):
        return tenant
    return f"#{share_of(tenant)}"


def _wall_clock() -> float:
    return datetime.now(UTC).timestamp()


@lru_cache(maxsize=1024)
def _expiry(pem: bytes) -> float:
    """Return the expiry of a certificate in seconds of the wall clock."""
    with memory_file(pem) as path:
        found = ssl._ssl._test_decode_cert(path)  # type: ignore[attr-defined]  # ssl has no public parser
    return ssl.cert_time_to_seconds(found["notAfter"])


def _certificate_name(auth: Any) -> str:
    """Return the first alternative name of the verified client certificate, else its common name."""
    for field in ("x509_subject_alternative_name", "x509_common_name"):
        for value in auth.get(field, ()):
            if value:
                return str(value.decode("utf-8", "replace"))
    return ""


def cache_salt(identity: Identity, narrower: str = "") -> bytes:
    """Return the salt that separates one tenant's cached prefixes from those of all others.

    Computed from the proven identity. `narrower` comes from the client: it divides the tenant's cache further, and
    never reaches another tenant's. The core adds a secret of the process, so that keys cannot be computed in advance.
    """
    if identity == ANONYMOUS and not narrower:
        return b""
    digest = sha256()
    for part in (identity.proof, identity.tenant, narrower):
        encoded = part.encode("utf-8", "replace")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)  # length prefixes make the parts unambiguous
    return digest.digest()
