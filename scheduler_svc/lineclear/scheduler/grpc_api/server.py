"""The gRPC listeners: data, admin, and health alone. Each offers its set of methods.

The health listener serves probes over the pod network, which have neither token nor certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog
from grpc_channelz.v1 import channelz_pb2
from grpc_channelz.v1.channelz import add_channelz_servicer

from lineclear.api_limits import MAX_MESSAGE_BYTES
from lineclear.errors import Unsupported
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.addresses import check_bindable, is_local, parse_address
from lineclear.scheduler.engine.engine_stats import WorkerStatus
from lineclear.scheduler.grpc_api import admin_service as admin_module
from lineclear.scheduler.grpc_api import health_service as health_module
from lineclear.scheduler.grpc_api import inference_service as service_module
from lineclear.scheduler.grpc_api import reflection as reflection_module
from lineclear.scheduler.grpc_api.admin_service import AdminService, OperationsApi
from lineclear.scheduler.grpc_api.error_interceptor import ErrorInterceptor, rejecting_handler
from lineclear.scheduler.grpc_api.health_service import LIVE, READY, WORKER, HealthService
from lineclear.scheduler.grpc_api.inference_service import InferenceService
from lineclear.scheduler.grpc_api.request_reader import RequestReader
from lineclear.scheduler.grpc_api.token_interceptor import AuthenticationInterceptor
from lineclear.scheduler.requests.request_manager import RequestManager
from lineclear.scheduler.security.reloading_file import ReloadingFile
from lineclear.scheduler.security.tls import ServerCertificates
from lineclear.scheduler.security.token_file import read_tokens
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import admin_pb2_grpc, inference_pb2_grpc

log = structlog.get_logger()

CHANNELZ = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name
NAMES = (service_module.NAME, admin_module.NAME)
"""The lineclear services."""
ADMIN_ONLY = frozenset({f"/{service_module.NAME}/GetStats"})
"""Methods served on the admin address instead, if it is set. AdminService is served only there."""
EVERYWHERE = frozenset({f"/{service_module.NAME}/GetModel"})
"""Methods served on both addresses."""

_EXPIRY_CHECK_SECONDS = 3600.0
_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.05, 0.5


class Server:
    """The listeners, from `start` to `stop`. Created on the running event loop."""

    def __init__(self, manager: RequestManager, operations: OperationsApi) -> None:
        """Bind the addresses. Raises ConfigurationError."""
        self.health = HealthService((*READY, *LIVE, WORKER))
        self._settings = settings = manager.services.settings
        self._count_error = manager.requests.count_error
        self._errors: list[ErrorInterceptor] = []
        self._servers: list[grpc.aio.Server] = []
        if not is_local(settings.listen) and (lack := settings.lacks()):
            log.warning("insecure_listener", address=settings.listen, there_is=lack)
        self.certificates = ServerCertificates(settings) if settings.tls_cert_file else None
        self._expiry_task: asyncio.Task[None] | None = None
        service = InferenceService(manager)
        # With an admin address, statistics are offered there and not on the data address. A demo has both.
        is_split = settings.admin_listen and not settings.demo
        withheld = admin_module.METHODS | ADMIN_ONLY if is_split else admin_module.METHODS
        public = (service_module.NAME, health_module.SERVICE)
        data = self._offer(service, settings.token_file, lambda method: method not in withheld, public)
        self.address = bind(data, settings.listen, self.certificates)
        self.admin_address = self.health_address = self.gateway_address = ""
        if settings.admin_listen:
            offered = admin_module.METHODS | ADMIN_ONLY | EVERYWHERE
            names = (*NAMES, health_module.SERVICE, *(CHANNELZ,) * settings.channelz)
            admin = self._offer(service, settings.admin_token_file, lambda method: method in offered, names)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(manager, operations), admin)
            if settings.channelz:
                add_channelz_servicer(admin)
            self.admin_address = bind(admin, settings.admin_listen, self.certificates)
        if gateway_listen := settings.gateway_listen or (_ANY_LOCAL_PORT if settings.gateway else ""):
            self.gateway_address = bind(self._offer_to_gateways(manager, service), gateway_listen, self.certificates)
        if settings.health_listen:
            probes = grpc.aio.server(interceptors=(self._guard(),), options=probe_options(settings))
            self.health.add_to(probes)
            self.health_address = bind(probes, settings.health_listen)
            self._servers.append(probes)

    def _offer(
        self, service: InferenceService, token_file: str, has: Callable[[str], bool], names: Sequence[str]
    ) -> grpc.aio.Server:
        """Create a server with health and the lineclear methods for which `has` is true, with tokens if given.

        Reflection describes the services `names`.
        """
        server = self._create(token_file, MethodFilterInterceptor(has, self._count_error))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
        if self._settings.reflection:
            reflection_module.add(server, names, lambda method: has(method) or not method.startswith(_PREFIXES))
        return server

    def _offer_to_gateways(self, manager: RequestManager, service: InferenceService) -> grpc.aio.Server:
        """Create a server with health and VllmEngine."""
        from lineclear.scheduler.grpc_api.gateway import gateway_service  # the package of an extra

        server = self._create(self._settings.token_file, guarding=(gateway_service.NAME,))
        gateway_service.add_to(server, gateway_service.GatewayService(manager, service))
        return server

    def _create(
        self, token_file: str, *interceptors: grpc.aio.ServerInterceptor, guarding: Sequence[str] = NAMES
    ) -> grpc.aio.Server:
        """Create a server for requests that has health, and tokens if given."""
        guard = self._guard(*guarding)
        first: list[grpc.aio.ServerInterceptor] = []
        if token_file:
            path = Path(token_file)
            tokens = ReloadingFile([path], lambda: read_tokens(path))
            # First: a client without a token must not learn which methods exist.
            first = [AuthenticationInterceptor(tokens, self._count_error)]
        server = grpc.aio.server(interceptors=[*first, *interceptors, guard], options=data_options(self._settings))
        self.health.add_to(server)
        self._servers.append(server)
        return server

    def _guard(self, *services: str) -> ErrorInterceptor:
        """Create the error interceptor of one listener. It caches handlers, so listeners cannot share one."""
        guarded = (*services, health_module.SERVICE, CHANNELZ, *reflection_module.SERVICES)
        guard = ErrorInterceptor(*guarded, reading=RequestReader(self._settings), on_error=self._count_error)
        self._errors.append(guard)
        return guard

    async def start(self) -> None:
        for server in self._servers:
            await server.start()
        if self.certificates is not None:
            self._expiry_task = asyncio.ensure_future(_log_expiry(self.certificates))
        self.health.set((*LIVE, WORKER), True)

    def set_worker(self, worker: WorkerStatus) -> None:
        """Update readiness and the worker's health from the engine's published status."""
        if self.health.set_worker(worker):
            log.info("serving", address=self.address)

    async def stop(self, grace_seconds: float) -> None:
        """Reject new calls, and cancel the running ones after `grace_seconds`.

        The service must have ended its streams; here they send their status. Health watchers end too.
        """
        if self._expiry_task is not None:
            self._expiry_task.cancel()
        self.health.close()
        for guard in self._errors:
            guard.is_stopping = True
        if grace_seconds > 0:
            await self._pause_new_calls()
        stops = [asyncio.ensure_future(server.stop(grace_seconds)) for server in self._servers]
        await asyncio.sleep(0)  # each stop has started: new connections are refused
        for guard in self._errors:
            guard.resume()
        await asyncio.gather(*stops)

    async def _pause_new_calls(self) -> None:
        """Hold new calls until none arrives for a moment.

        gRPC ends a call that arrives while a listener closes with a bare CANCELLED. Clients with a held call send no
        further one; after the listeners have closed, each held call gets the reason for its rejection.
        """
        for guard in self._errors:
            guard.pause()
        before = -1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_PAUSE_SECONDS):
                while before != (now := sum(guard.num_calls for guard in self._errors)):
                    before = now
                    await asyncio.sleep(_PAUSE_SECONDS)


async def _log_expiry(certificates: ServerCertificates) -> None:
    while True:
        certificates.log_expiry(datetime.now(UTC))
        await asyncio.sleep(_EXPIRY_CHECK_SECONDS)


# --- methods of a listener -------------------------------------------------------------------------------------------


_ANY_LOCAL_PORT = "127.0.0.1:0"
_PREFIXES = tuple(f"/{name}/" for name in NAMES)


class MethodFilterInterceptor(grpc.aio.ServerInterceptor):
    """Answers UNIMPLEMENTED to lineclear methods that this listener does not offer."""

    def __init__(self, has: Callable[[str], bool], on_error: Callable[[str], None]) -> None:
        self._has = has
        message = "not offered at this address: admin methods are at --admin-listen, the others at --listen"
        self._rejecting_handler = rejecting_handler(Unsupported(message), on_error)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = str(handler_call_details.method)
        if method.startswith(_PREFIXES) and not self._has(method):
            return self._rejecting_handler
        return await continuation(handler_call_details)


# --- options and addresses of the listeners --------------------------------------------------------------------------

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


def bind(server: grpc.aio.Server, address: str, certificates: ServerCertificates | None = None) -> str:
    """Bind an address and return it as clients write it. host:port is encrypted if `certificates` are given.

    Raises ConfigurationError.
    """
    parsed = parse_address(address)
    check_bindable(address)  # gRPC would take over the socket of a running server
    try:
        if certificates is None or isinstance(parsed, str):
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, certificates.credentials())
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigurationError(f"cannot listen on {address}")
    return address if isinstance(parsed, str) else f"{parsed[0]}:{port}"
