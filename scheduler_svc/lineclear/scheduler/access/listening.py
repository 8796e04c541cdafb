"""How a gRPC server listens: its options, and binding an address without taking it from somebody.

Decides the transport's limits. Which services are offered where is the server's.
"""

from __future__ import annotations

import grpc
import grpc.aio

from lineclear.scheduler.access.vacancy import require_vacant
from lineclear.scheduler.addresses import parse_address
from lineclear.scheduler.settings import ConfigurationError, SchedulerSettings

_MAX_METADATA_BYTES = 16 * 1024
_IDLE_CONNECTION_MS = 300_000
_MAX_PROBE_BYTES = 4096
_MAX_PROBE_STREAMS = 128
_MAX_PING_STRIKES = 30

Options = list[tuple[str, int]]


def data_options(settings: SchedulerSettings) -> Options:
    """For listeners that take requests."""
    # No maximum_concurrent_rpcs: it would refuse health checks as well. Admission is the service's.
    return [
        *_COMMON,
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_concurrent_streams", settings.max_streams_per_connection),
        # The default is two hours, in which a caller that vanished holds its blocks.
        ("grpc.keepalive_time_ms", round(settings.keepalive_time_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", round(settings.keepalive_timeout_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Bandwidth probing grows the windows, and with them what hides in the transport for a reader that stopped.
        ("grpc.http2.bdp_probe", 0),
    ]


def probe_options() -> Options:
    """For the listener with health alone: small in everything, since anybody in the cluster may reach it."""
    return [
        *_COMMON,
        ("grpc.max_receive_message_length", _MAX_PROBE_BYTES),
        ("grpc.max_concurrent_streams", _MAX_PROBE_STREAMS),
    ]


_COMMON: Options = [
    ("grpc.so_reuseport", 0),  # on by default: a second server would silently share the port
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
    ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_MS),
    # Clients that ping as often as we do must not be told off for it; those that only ping are, and leave.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", _MAX_PING_STRIKES),
]


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind and return the address as clients write it; encrypted if it is host:port and there are `credentials`.

    Raises ConfigurationError.
    """
    parsed = parse_address(address)
    require_vacant(address)  # gRPC would take a socket's path from who lives there, and writes of a port in use itself
    try:
        if credentials is None or isinstance(parsed, str):
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigurationError(f"cannot listen on {address}")
    return address if isinstance(parsed, str) else f"{parsed[0]}:{port}"
