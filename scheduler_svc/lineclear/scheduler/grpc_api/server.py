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

from lineclear.errors import Unsupported
from lineclear.scheduler.addresses import is_local
from lineclear.scheduler.engine.engine_stats import WorkerStatus
from lineclear.scheduler.grpc_api import admin_service as admin_module
from lineclear.scheduler.grpc_api import health_service as health_module
from lineclear.scheduler.grpc_api import inference_service as service_module
from lineclear.scheduler.grpc_api import reflection as reflection_module
from lineclear.scheduler.grpc_api.admin_service import AdminService, OperationsApi
from lineclear.scheduler.grpc_api.error_interceptor import ErrorInterceptor, rejecting_handler
from lineclear.scheduler.grpc_api.health_service import HealthService
from lineclear.scheduler.grpc_api.inference_service import InferenceService
from lineclear.scheduler.grpc_api.listener import bind, data_options, probe_options
from lineclear.scheduler.grpc_api.request_reader import RequestReader
from lineclear.scheduler.grpc_api.token_interceptor import AuthenticationInterceptor
from lineclear.scheduler.requests.request_manager import RequestManager
from lineclear.scheduler.security.reloading_file import ReloadingFile
from lineclear.scheduler.security.tls import ServerCertificates
from lineclear.scheduler.security.token_file import read_tokens
from lineclear.v1 import admin_pb2_grpc, inference_pb2_grpc

log = structlog.get_logger()

READY = ("readiness", service_module.NAME)
"""Health names that are serving while a worker is joined and the server does not drain."""
LIVE = ("", "liveness")
"""Health names that are serving while the event loop and the engine run, also during a drain.

The empty name is the default of a kubelet's gRPC probe, so it must not depend on the worker.
"""
WORKER = "worker"
"""Health name that is NOT_SERVING while a worker hangs: its epoch has ended, and its process still runs.

For the liveness probe of a worker in its own container.
"""

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
        credentials = self.certificates.credentials if self.certificates else None
        self._expiry_task: asyncio.Task[None] | None = None
        service = InferenceService(manager)
        # With an admin address, statistics are offered there and not on the data address.
        withheld = admin_module.METHODS | ADMIN_ONLY if settings.admin_listen else admin_module.METHODS
        public = (service_module.NAME, health_module.SERVICE)
        data = self._offer(service, settings.token_file, lambda method: method not in withheld, public)
        self.address = bind(data, settings.listen, credentials)
        self.admin_address = self.health_address = ""
        if settings.admin_listen:
            offered = admin_module.METHODS | ADMIN_ONLY | EVERYWHERE
            names = (*NAMES, health_module.SERVICE, *(CHANNELZ,) * settings.channelz)
            admin = self._offer(service, settings.admin_token_file, lambda method: method in offered, names)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(manager, operations), admin)
            if settings.channelz:
                add_channelz_servicer(admin)
            self.admin_address = bind(admin, settings.admin_listen, credentials)
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
        interceptors: list[grpc.aio.ServerInterceptor] = [
            MethodFilterInterceptor(has, self._count_error),
            self._guard(),
        ]
        if token_file:
            path = Path(token_file)
            tokens = ReloadingFile([path], lambda: read_tokens(path))
            # First: a client without a token must not learn which methods exist.
            interceptors.insert(0, AuthenticationInterceptor(tokens, self._count_error))
        server = grpc.aio.server(interceptors=interceptors, options=data_options(self._settings))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
        self.health.add_to(server)
        if self._settings.reflection:
            reflection_module.add(server, names, lambda method: has(method) or not method.startswith(_PREFIXES))
        self._servers.append(server)
        return server

    def _guard(self) -> ErrorInterceptor:
        """Create the error interceptor of one listener. It caches handlers, so listeners cannot share one."""
        services = (*NAMES, health_module.SERVICE, CHANNELZ, *reflection_module.SERVICES)
        guard = ErrorInterceptor(*services, reading=RequestReader(self._settings), on_error=self._count_error)
        self._errors.append(guard)
        return guard

    async def start(self) -> None:
        """Start accepting calls."""
        for server in self._servers:
            await server.start()
        if self.certificates is not None:
            self._expiry_task = asyncio.ensure_future(_log_expiry(self.certificates))
        self.set_live(True)
        self.health.set((WORKER,), True)

    def set_worker(self, worker: WorkerStatus) -> None:
        """Update readiness and the worker's health from the engine's published status."""
        was_serving = self.health.is_serving(service_module.NAME)
        self.health.set(READY, worker.hello is not None)
        self.health.set((WORKER,), not worker.is_unhealthy)
        if self.health.is_serving(service_module.NAME) and not was_serving:
            log.info("serving", address=self.address)

    def set_live(self, live: bool) -> None:
        """Update liveness."""
        self.health.set(LIVE, live)

    def set_draining(self) -> None:
        """Report not ready. New requests are still answered, with the reason for their rejection."""
        self.health.close(READY)

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
        """Return the handler of the method, or the handler that rejects it."""
        method = str(handler_call_details.method)
        if method.startswith(_PREFIXES) and not self._has(method):
            return self._rejecting_handler
        return await continuation(handler_call_details)
