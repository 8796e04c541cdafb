"""Options of the gRPC listeners, and binding of their addresses."""

from __future__ import annotations

import grpc
import grpc.aio

from lineclear.api_limits import MAX_MESSAGE_BYTES
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.addresses import check_bindable, parse_address
from lineclear.scheduler.settings import SchedulerSettings

_MAX_METADATA_BYTES = 16 * 1024
_IDLE_CONNECTION_MS = 300_000
_MAX_CONNECTIONS = 4096  # of each address; each takes a file descriptor and some 30 KiB
_MAX_PROBE_BYTES = 4096
_MAX_PROBE_STREAMS = 128
_PENDING_CALLS = 1000  # gRPC's own figure
_ENDED_STREAMS = 1024
_HANDSHAKE_MS = 20_000
_MAX_PING_STRIKES = 30
MIN_PING_INTERVAL_MS = 5_000
"""A client that pings more often without data in between gets GOAWAY after some pings."""

Options = list[tuple[str, int]]


def data_options(settings: SchedulerSettings) -> Options:
    """Return the options of listeners for requests."""
    # No maximum_concurrent_rpcs: it would reject health checks too.
    return [
        *_common(settings),
        # Twice the limit: a request between the two gets a clear error, and in a Session fails alone.
        ("grpc.max_receive_message_length", 2 * settings.max_request_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", settings.max_streams),
        # Calls without a handler yet. gRPC ends some of them with a bare CANCELLED above the first limit, and all above
        # the second. One connection that opens all its streams at once must stay below.
        ("grpc.server.max_pending_requests", max(_PENDING_CALLS, settings.max_streams)),
        ("grpc.server.max_pending_requests_hard_limit", 3 * max(_PENDING_CALLS, settings.max_streams)),
        # gRPC rejects new streams, some at random, while too many ended streams are being deallocated. Its default
        # rejects half of the calls of a client that queues calls for a stream.
        ("grpc.http2.max_deallocating_streams", max(_ENDED_STREAMS, 2 * settings.max_streams)),
        # Bandwidth probing grows the windows, and with them the bytes buffered for a reader that has stopped.
        ("grpc.http2.bdp_probe", 0),
    ]


def probe_options(settings: SchedulerSettings) -> Options:
    """Return the options of the health listener: small limits, because every pod can reach it."""
    return [
        *_common(settings),
        ("grpc.max_receive_message_length", _MAX_PROBE_BYTES),
        ("grpc.max_concurrent_streams", _MAX_PROBE_STREAMS),
    ]


def _common(settings: SchedulerSettings) -> Options:
    # gRPC silently ignores unknown names; tests/grpc_api/test_transport.py checks them.
    options = [
        ("grpc.so_reuseport", 0),  # on by default: a second server would silently share the port
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", _MAX_CONNECTIONS),
        ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_MS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        # The default is two hours, during which a vanished client would keep its blocks.
        ("grpc.keepalive_time_ms", _milliseconds(settings.keepalive_time_seconds)),
        # Both: the second is the time to wait for a ping's answer, by default 60 s.
        ("grpc.keepalive_timeout_ms", _milliseconds(settings.keepalive_timeout_seconds)),
        ("grpc.http2.ping_timeout_ms", _milliseconds(settings.keepalive_timeout_seconds)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Clients may ping every 10 s. A client that pings all the time gets GOAWAY with too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", _MAX_PING_STRIKES),
    ]
    if settings.max_connection_age_seconds:
        # No grace limit: calls have deadlines, and Sessions drain at this age.
        options.append(("grpc.max_connection_age_ms", _milliseconds(settings.max_connection_age_seconds)))
    return options


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Bind an address and return it as clients write it. host:port is encrypted if `credentials` are given.

    Raises ConfigurationError.
    """
    parsed = parse_address(address)
    check_bindable(address)  # gRPC would take over the socket of a running server
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
