"""The gRPC listeners: which services are offered where, with which limits, and what health says.

Decides nothing about requests; those are the service's. Two listeners at most: the data one, and one with health alone
for probes that come over the pod's network.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from lineclear.scheduler import health as health_module
from lineclear.scheduler import service as service_module
from lineclear.scheduler.health import Health
from lineclear.scheduler.interceptor import ErrorInterceptor
from lineclear.scheduler.service import InferenceService
from lineclear.scheduler.settings import ConfigurationError, SchedulerSettings, is_local, parse_address
from lineclear.v1 import inference_pb2_grpc

log = structlog.get_logger()

READY = ("", "readiness", service_module.NAME)
"""Serving while a worker is joined and the server is not leaving."""
LIVE = "liveness"
"""Serving while the process is able to answer."""

_MAX_METADATA_BYTES = 16 * 1024
_IDLE_CONNECTION_MS = 300_000
_REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class Server:
    """Listens from `start` to `stop`. On one event loop, which must be running when it is made."""

    def __init__(self, settings: SchedulerSettings, service: InferenceService) -> None:
        """Binds the addresses. Raises ConfigurationError where that is not possible."""
        self.health = Health((*READY, LIVE))
        self._interceptor = ErrorInterceptor(service_module.NAME, health_module.SERVICE)
        self._server = grpc.aio.server(interceptors=(self._interceptor,), options=_options(settings))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        if settings.reflection:
            _add_reflection(self._server)
        if not is_local(settings.listen):
            log.warning("listening_unencrypted", address=settings.listen, hint="anyone who can reach it may use it")
        self.address = _bind(self._server, settings.listen)
        self.health_address = ""
        self._health_server: grpc.aio.Server | None = None
        if settings.health_listen:
            options = [*_COMMON, ("grpc.max_receive_message_length", 4096)]
            self._health_server = grpc.aio.server(interceptors=(self._interceptor,), options=options)
            health_pb2_grpc.add_HealthServicer_to_server(self.health, self._health_server)
            self.health_address = _bind(self._health_server, settings.health_listen)

    async def start(self) -> None:
        """Take calls."""
        await self._server.start()
        if self._health_server is not None:
            await self._health_server.start()
        self.health.set((LIVE,), True)

    def set_ready(self, ready: bool) -> None:
        """Say whether requests are welcome."""
        self.health.set(READY, ready)

    async def stop(self, grace_seconds: float) -> None:
        """Take no more calls, and after `grace_seconds` cut those that are left.

        Streams of Generate are the service's to end before; all they may need is to send their status. Watchers of
        health are let go here.
        """
        self.health.close()
        self._interceptor.is_stopping = True
        servers = [self._server] if self._health_server is None else [self._server, self._health_server]
        await asyncio.gather(*(server.stop(grace_seconds) for server in servers))


# --- options ---------------------------------------------------------------------------------------------------------

_COMMON: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # on by default: a second server would silently share the port
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA_BYTES),
]


def _options(settings: SchedulerSettings) -> list[tuple[str, int]]:
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
        # Clients that ping as often as we do must not be told off for it.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_MS),
        # Bandwidth probing grows the windows, and with them what hides in the transport for a reader that stopped.
        ("grpc.http2.bdp_probe", 0),
    ]


# --- binding ---------------------------------------------------------------------------------------------------------


def _bind(server: grpc.aio.Server, address: str) -> str:
    """Bind and return the address as clients write it. Raises ConfigurationError."""
    parsed = parse_address(address)
    if isinstance(parsed, str):
        _remove_dead_socket(Path(parsed))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigurationError(f"cannot listen on {address}: in use, or not an address of this machine")
    return address if isinstance(parsed, str) else f"{parsed[0]}:{port}"


def _remove_dead_socket(path: Path) -> None:
    """gRPC would take a path away from a server that lives there; so look first, and remove what a dead one left."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"cannot listen on unix:{path}: {error.strerror}") from None
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigurationError(f"cannot listen on unix:{path}: something else is there; remove it, or choose another")
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(str(path))
        raise ConfigurationError(f"cannot listen on unix:{path}: another server does")
    path.unlink(missing_ok=True)


# --- reflection ------------------------------------------------------------------------------------------------------


def _add_reflection(server: grpc.aio.Server) -> None:
    servicer = reflection.aio.ReflectionServicer((service_module.NAME, health_module.SERVICE, *_REFLECTION))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=_reflection_request,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    # The library mounts v1alpha only; v1 is the same on the wire, and the one newer clients ask for first.
    handlers = (grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in _REFLECTION)
    server.add_generic_rpc_handlers(tuple(handlers))


def _reflection_request(data: bytes) -> reflection_pb2.ServerReflectionRequest:
    """A request, or an empty one (answered with an error) where gRPC would send the text of an exception."""
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(data)
    except DecodeError:
        return reflection_pb2.ServerReflectionRequest()
