"""Who is calling: the tenant that a call is accounted to, and what of the prefix cache that tenant may see.

Decides nothing about whether a call is let in; that is `authentication`'s. A handler asks `caller(context)`.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any

import grpc.aio

from lineclear.scheduler.security.memory_file import memory_file


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller as far as it is proven. Callers of one tenant are not told apart."""

    tenant: str = ""
    """The name of a token or of a client certificate; empty where the listener asks for neither."""
    proof: str = "none"
    """"token", "certificate" or "none"."""


ANONYMOUS = Identity()
TENANT_KEY = "x-tenant-id"
_MAX_TENANT = 64

# Set by the interceptor in the task of the call, so it is seen by that call's handler and by no other.
_by_token: ContextVar[Identity | None] = ContextVar("identity", default=None)
_flow: ContextVar[str] = ContextVar("flow", default="")
_is_valid: ContextVar[Callable[[], bool]] = ContextVar("is_valid", default=lambda: True)


def remember(tenant: str, is_valid: Callable[[], bool]) -> None:
    """The call of this task showed the token of `tenant`. `is_valid` says whether that token is still accepted."""
    _by_token.set(Identity(tenant, "token"))
    _is_valid.set(is_valid)


def validity() -> Callable[[], bool]:
    """Return what says, at any later time, whether the token of this task's call is still accepted.

    For calls that go on taking orders. Always true where no token is asked for.
    """
    return _is_valid.get()


def certificate_validity(context: grpc.aio.ServicerContext[Any, Any]) -> Callable[[], bool]:
    """Return what says, at any later time, whether the caller's certificate is still in its time.

    TLS has checked it once, when the connection was made. Always true where no certificate is asked for.
    """
    ends_at = min((_expiry(pem) for pem in context.auth_context().get("x509_pem_cert", ())), default=math.inf)
    return lambda: _wall_clock() < ends_at


def caller(context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
    """Who makes this call. To be asked in the handler, in the call's own task."""
    shown = _by_token.get()
    if shown is not None:
        return shown
    name = _certificate_name(context.auth_context())
    return Identity(name, "certificate") if name else ANONYMOUS


def tenant(proven: Identity, context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Whose share of the queue a call takes: the proven tenant, or where nothing is proven, whom the call names.

    The second is a claim among callers who trust each other, a gateway's for its customers; it opens nothing.
    """
    if proven.tenant:
        return proven.tenant
    for key, value in context.invocation_metadata() or ():
        if key == TENANT_KEY and isinstance(value, str):
            return value[:_MAX_TENANT]
    return ""


def set_flow(tenant: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Have the work of this call, and of tasks it begins from now on, counted for `tenant`; for its connection where
    that has no name."""
    _flow.set(f"tenant:{tenant}" if tenant else context.peer())


def flow() -> str:
    """What the work of this task's call is counted for, where work is divided fairly."""
    return _flow.get()


def share(tenant: str) -> str:
    """What stands for a tenant where only equality counts: recordings hold it, and no name."""
    return blake2b(tenant.encode("utf-8", "replace"), digest_size=8).hexdigest() if tenant else ""


def _wall_clock() -> float:
    return datetime.now(UTC).timestamp()


@lru_cache(maxsize=1024)
def _expiry(pem: bytes) -> float:
    """When a certificate expires, in seconds of the wall clock."""
    with memory_file(pem) as path:
        found = ssl._ssl._test_decode_cert(path)  # type: ignore[attr-defined]  # OpenSSL reads it; ssl has no other way
    return ssl.cert_time_to_seconds(found["notAfter"])


def _certificate_name(auth: Any) -> str:
    """The first alternative name of the caller's certificate, else its common name. The TLS layer checked it."""
    for field in ("x509_subject_alternative_name", "x509_common_name"):
        for value in auth.get(field, ()):
            if value:
                return str(value.decode("utf-8", "replace"))
    return ""


def cache_salt(identity: Identity, narrower: str = "") -> bytes:
    """What tells apart the cached prefixes of one caller from those of all others.

    Made here from what was proven. `narrower` is the caller's own word: it can split the tenant's share further and
    never leads out of it. Keyed with a secret of the process by the core (see blocks.root_key), so that nobody can
    compute a key in advance.
    """
    if identity == ANONYMOUS and not narrower:
        return b""
    digest = sha256()
    for part in (identity.proof, identity.tenant, narrower):
        encoded = part.encode("utf-8", "replace")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)  # the lengths keep the parts apart
    return digest.digest()
