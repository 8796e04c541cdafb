"""Targets and options of gRPC channels."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from lineclear.api_limits import MAX_MESSAGE_BYTES
from lineclear.extras import installed_version

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_PORT = 50051

KEEPALIVE_TIME_SECONDS = 30.0
"""Idle time after which a connection is pinged."""
KEEPALIVE_TIMEOUT_SECONDS = 10.0
"""Time without an answer to a ping after which the connection is lost. Its answers are then resumed."""

Options = Sequence[tuple[str, Any]]
Pairs = Sequence[tuple[str, str | bytes]]


def default_target() -> str:
    """Return the value of LINECLEAR_TARGET, or the default target."""
    return os.environ.get("LINECLEAR_TARGET") or DEFAULT_TARGET


def checked_target(target: str) -> str:
    """Return `target` in gRPC's form. A host without a port gets the default port. Raises ValueError."""
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
    for port in _ports(target):
        if not 1 <= int(port) <= 65535:  # gRPC takes it modulo 65536
            raise ValueError(f"the port of the target is {port}; ports are from 1 to 65535")
    return target


def _ports(target: str) -> list[str]:
    """Return the ports in a target: of host:port, or of each address after a scheme."""
    addresses = target.rpartition("/")[2].split(",")
    return [found[1] for address in addresses if (found := _WITH_PORT.fullmatch(address))]


# scheme:host:port, host:port, [IPv6]:port
_WITH_PORT = re.compile(r"(?:[a-z0-9]+:)?(?:\[[^\]]*\]|[^:\[\]]+):([0-9]{1,20})")


def channel_options(options: Options = ()) -> list[tuple[str, Any]]:
    """Return the options of every channel, overridden by those of the caller."""
    chosen: dict[str, Any] = {
        "grpc.primary_user_agent": f"lineclear-python/{installed_version()}",
        "grpc.keepalive_time_ms": round(KEEPALIVE_TIME_SECONDS * 1000),
        "grpc.keepalive_timeout_ms": round(KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # gRPC waits this long for the answer to a ping: 60 s by default, whatever the option above says.
        "grpc.http2.ping_timeout_ms": round(KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # A queued request is a call without data: its keepalives must not be limited.
        "grpc.http2.max_pings_without_data": 0,
        # The limits of a server. A larger request fails here and is not sent.
        "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
        "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
        # Reconnecting must not be slower than the pauses between attempts.
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.max_reconnect_backoff_ms": 5_000,
        # Despite its name, the timeout of one attempt to connect. A busy server accepts late; a stopped replica never.
        "grpc.min_reconnect_backoff_ms": 5_000,
        # Balances calls among the replicas of a headless Service.
        "grpc.service_config": '{"loadBalancingConfig": [{"round_robin": {}}]}',
        # http_proxy is often set, but the proxy hardly ever leads to an inference server.
        "grpc.enable_http_proxy": 0,
    }
    return list((chosen | dict(options)).items())
