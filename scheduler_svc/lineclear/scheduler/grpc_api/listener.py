"""How a gRPC server listens: its options, and binding an address without taking it from somebody.

Decides the transport's limits. Which services are offered where is the server's.
"""

from __future__ import annotations

import grpc
import grpc.aio

from lineclear.api_limits import MAX_MESSAGE_BYTES
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.addresses import check_bindable, parse_address
from lineclear.scheduler.settings import SchedulerSettings

_MAX_METADATA_BYTES = 16 * 1024
_IDLE_CONNECTION_MS = 300_000
_MAX_PROBE_BYTES = 4096
_MAX_PROBE_STREAMS = 128
_PENDING_CALLS = 1000  # gRPC's own figure
_ENDED_STREAMS = 1024
_HANDSHAKE_MS = 20_000
_MAX_PING_STRIKES = 30
MIN_PING_INTERVAL_MS = 5_000
"""A client that pings more often than this, without data in between, is told to stop after some pings."""

Options = list[tuple[str, int]]


def data_options(settings: SchedulerSettings) -> Options:
    """For listeners that take requests."""
    # No maximum_concurrent_rpcs: it would refuse health checks as well. Admission is the service's.
    return [
        *_common(settings),
        # Twice the limit: a request between the two is refused with a sentence, and in a Session fails alone.
        ("grpc.max_receive_message_length", 2 * settings.max_request_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", settings.max_streams),
        # Calls that no handler has taken yet. gRPC ends some of them with a bare CANCELLED beyond the first figure, and
        # all beyond the second: one connection that opens all its streams at once must not come so far.
        ("grpc.server.max_pending_requests", max(_PENDING_CALLS, settings.max_streams)),
        ("grpc.server.max_pending_requests_hard_limit", 3 * max(_PENDING_CALLS, settings.max_streams)),
        # gRPC refuses new streams, some at random, while streams that have ended are still being taken apart. Its own
        # figure is so small that a client that lets calls wait for a stream would see half of them refused.
        ("grpc.http2.max_deallocating_streams", max(_ENDED_STREAMS, 2 * settings.max_streams)),
        # Bandwidth probing grows the windows, and with them what hides in the transport for a reader that stopped.
        ("grpc.http2.bdp_probe", 0),
    ]


def probe_options(settings: SchedulerSettings) -> Options:
    """For the listener with health alone: small in everything, since anybody in the cluster may reach it."""
    return [
        *_common(settings),
        ("grpc.max_receive_message_length", _MAX_PROBE_BYTES),
        ("grpc.max_concurrent_streams", _MAX_PROBE_STREAMS),
    ]


def _common(settings: SchedulerSettings) -> Options:
    # gRPC ignores a name that it does not know, without a word: tests/service/test_transport.py looks them up.
    options = [
        ("grpc.so_reuseport", 0),  # on by default: a second server would silently share the port
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_MS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # The default is two hours, in which a caller that vanished holds its blocks.
        ("grpc.keepalive_time_ms", _milliseconds(settings.keepalive_time_seconds)),
        # Both: gRPC waits for the answer to a ping as long as the second says, which is 60 s where it is left out.
        ("grpc.keepalive_timeout_ms", _milliseconds(settings.keepalive_timeout_seconds)),
        ("grpc.http2.ping_timeout_ms", _milliseconds(settings.keepalive_timeout_seconds)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients may ping every 10 s. One that pings all the time gets GOAWAY with too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", _MAX_PING_STRIKES),
    ]
    if settings.max_connection_age_seconds:
        # No limit for the calls of such a connection: those have deadlines, and Sessions end by themselves.
        options.append(("grpc.max_connection_age_ms", _milliseconds(settings.max_connection_age_seconds)))
    return options


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind and return the address as clients write it; encrypted if it is host:port and there are `credentials`.

    Raises ConfigurationError.
    """
    parsed = parse_address(address)
    check_bindable(address)  # gRPC would take a socket's path from who lives there, and writes of a port in use itself
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
