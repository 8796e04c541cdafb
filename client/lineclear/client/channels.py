"""Channels as we want them: what a target is called, and the options of every channel."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lineclear.limits import MAX_MESSAGE_BYTES

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_PORT = 50051

Options = Sequence[tuple[str, Any]]
Pairs = Sequence[tuple[str, str | bytes]]


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
        "grpc.max_reconnect_backoff_ms": 5_000,
        # In spite of its name, how long one attempt to connect may take. A busy server accepts late, which is no reason
        # to call it unreachable; but of a replica that has gone nobody ever answers.
        "grpc.min_reconnect_backoff_ms": 5_000,
        # Behind a headless Service every replica gets its share.
        "grpc.service_config": '{"loadBalancingConfig": [{"round_robin": {}}]}',
        # A proxy for the web is hardly ever on the way to an inference server, and http_proxy is often set.
        "grpc.enable_http_proxy": 0,
    }
    return list((chosen | dict(options)).items())
