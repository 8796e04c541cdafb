"""The gRPC listeners: which services are offered where, behind which doors, and what health says.

Decides nothing about requests; those are the service's. Three listeners at most: data; admin, for operators; and one
with health alone, for probes that come over the pod's network and can show neither token nor certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
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
from lineclear.scheduler.grpc_api.admin_service import AdminService
from lineclear.scheduler.grpc_api.error_interceptor import ErrorInterceptor, abort
from lineclear.scheduler.grpc_api.health_service import HealthService
from lineclear.scheduler.grpc_api.inference_service import InferenceService
from lineclear.scheduler.grpc_api.listener import bind, data_options, probe_options
from lineclear.scheduler.grpc_api.request_reader import request_reader
from lineclear.scheduler.grpc_api.token_interceptor import AuthenticationInterceptor
from lineclear.scheduler.security.reloading_file import ReloadingFile
from lineclear.scheduler.security.tls import ServerCertificates
from lineclear.scheduler.security.token_file import read_tokens
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import admin_pb2_grpc, inference_pb2_grpc

log = structlog.get_logger()

READY = ("readiness", service_module.NAME)
"""Serving while a worker is joined and the server is not leaving."""
LIVE = ("", "liveness")
"""Serving while the process is able to answer and its engine turns, also while it is leaving.

The empty name is what a kubelet's gRPC probe asks for by default, so it must not depend on the worker.
"""
WORKER = "worker"
"""Serving unless a worker hangs: it was put out of its epoch, and its process is still there. For the liveness probe of
a worker in a container of its own, in which nobody could tell."""

CHANNELZ = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name
NAMES = (service_module.NAME, admin_module.NAME)
"""Our services."""
ADMIN_ONLY = frozenset({f"/{service_module.NAME}/GetStats"})
"""Answered on the admin address where there is one. Those of the admin service are answered nowhere else."""
EVERYWHERE = frozenset({f"/{service_module.NAME}/GetModel"})
"""Answered on both."""

_ANNOUNCE_SECONDS = 3600.0
_HOLD_SECONDS, _MAX_HOLD_SECONDS = 0.05, 0.5


class Server:
    """Listens from `start` to `stop`. On one event loop, which must be running when it is made."""

    def __init__(self, settings: SchedulerSettings, service: InferenceService, admin: AdminService) -> None:
        """Binds the addresses. Raises ConfigurationError where that is not possible."""
        self.health = HealthService((*READY, *LIVE, WORKER))
        self._errors: list[ErrorInterceptor] = []
        self._servers: list[grpc.aio.Server] = []
        if not is_local(settings.listen) and (lack := settings.lacks()):
            log.warning("listening_insecurely", address=settings.listen, there_is=lack)
        # All of the inference service is offered where one may listen; where operators have a door of their own, it is
        # divided.
        withheld = admin_module.METHODS | ADMIN_ONLY if settings.admin_listen else admin_module.METHODS
        offered = admin_module.METHODS | ADMIN_ONLY | EVERYWHERE
        self._certificates = ServerCertificates(settings) if settings.tls_cert_file else None
        credentials = self._certificates.credentials if self._certificates else None
        if self._certificates is not None:
            service.certificate = self._certificates
        self._announcing: asyncio.Task[None] | None = None
        data = self._offer(settings, service, settings.token_file, lambda method: method not in withheld)
        self.address = bind(data, settings.listen, credentials)
        self.admin_address = self.health_address = ""
        if settings.admin_listen:
            door = self._offer(settings, service, settings.admin_token_file, lambda method: method in offered)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, door)
            if settings.channelz:
                add_channelz_servicer(door)
            self.admin_address = bind(door, settings.admin_listen, credentials)
        if settings.reflection and settings.admin_listen:
            reflection_module.add(door, *NAMES, health_module.SERVICE, *(CHANNELZ,) * settings.channelz)
        elif settings.reflection:
            reflection_module.add(data, service_module.NAME, health_module.SERVICE)
        if settings.health_listen:
            guard = self._guard(settings, service.count_rejected)
            probes = grpc.aio.server(interceptors=(guard,), options=probe_options(settings))
            self.health.add_to(probes)
            self.health_address = bind(probes, settings.health_listen)
            self._servers.append(probes)

    def _offer(
        self, settings: SchedulerSettings, service: InferenceService, token_file: str, has: Callable[[str], bool]
    ) -> grpc.aio.Server:
        """A server with health and those methods of the service that it `has`, behind tokens where there is a file."""
        count = service.count_rejected
        interceptors: list[grpc.aio.ServerInterceptor] = [
            MethodFilterInterceptor(has, count),
            self._guard(settings, count),
        ]
        if token_file:
            path = Path(token_file)
            # First of all: what a caller without a token may not do, it may not ask about.
            interceptors.insert(
                0, AuthenticationInterceptor(ReloadingFile([path], lambda: read_tokens(path)), service.count_rejected)
            )
        server = grpc.aio.server(interceptors=interceptors, options=data_options(settings))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
        self.health.add_to(server)
        self._servers.append(server)
        return server

    def _guard(self, settings: SchedulerSettings, on_error: Callable[[str], None]) -> ErrorInterceptor:
        """One for each listener: it remembers handlers, and those of one listener are not offered at another."""
        services = (*NAMES, health_module.SERVICE, CHANNELZ, *reflection_module.SERVICES)
        guard = ErrorInterceptor(*services, reading=request_reader(settings), on_error=on_error)
        self._errors.append(guard)
        return guard

    async def start(self) -> None:
        """Take calls."""
        for server in self._servers:
            await server.start()
        if self._certificates is not None:
            self._announcing = asyncio.ensure_future(_announce(self._certificates))
        self.set_live(True)
        self.health.set((WORKER,), True)

    def set_worker(self, worker: WorkerStatus) -> None:
        """Update readiness and the worker's health from the engine's published status."""
        was_serving = self.health.is_serving(service_module.NAME)
        self.health.set(READY, worker.hello is not None)
        self.health.set((WORKER,), not worker.is_hung)
        if self.health.is_serving(service_module.NAME) and not was_serving:
            log.info("serving", address=self.address)

    def set_live(self, live: bool) -> None:
        """Say whether the process does its work."""
        self.health.set(LIVE, live)

    def leave(self) -> None:
        """Requests are not welcome any more. They are still answered, so that each caller is told why."""
        self.health.close(READY)

    async def stop(self, grace_seconds: float) -> None:
        """Take no more calls, and after `grace_seconds` cut those that are left.

        Streams of Generate are the service's to end before; all they may need is to send their status. Watchers of
        health are let go here.
        """
        if self._announcing is not None:
            self._announcing.cancel()
        self.health.close()
        for guard in self._errors:
            guard.is_stopping = True
        if grace_seconds > 0:
            await self._hold()
        stops = [asyncio.ensure_future(server.stop(grace_seconds)) for server in self._servers]
        await asyncio.sleep(0)  # each has begun: whoever comes now finds a closed door
        for guard in self._errors:
            guard.resume()
        await asyncio.gather(*stops)

    async def _hold(self) -> None:
        """Keep those who come waiting until nobody comes for a moment.

        gRPC drops a call that comes in the moment in which a listener closes, and its caller hears a bare CANCELLED.
        Who has no answer yet sends no next call: all are told why not here once the door is closed.
        """
        for guard in self._errors:
            guard.pause()
        before = -1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_HOLD_SECONDS):
                while before != (now := sum(guard.num_came for guard in self._errors)):
                    before = now
                    await asyncio.sleep(_HOLD_SECONDS)


async def _announce(certificates: ServerCertificates) -> None:
    while True:
        certificates.announce_expiry(datetime.now(UTC))
        await asyncio.sleep(_ANNOUNCE_SECONDS)


# --- what is offered where -------------------------------------------------------------------------------------------


_OURS = tuple(f"/{name}/" for name in NAMES)


class MethodFilterInterceptor(grpc.aio.ServerInterceptor):
    """Answers UNIMPLEMENTED to methods of our services that this listener does not have."""

    def __init__(self, has: Callable[[str], bool], on_error: Callable[[str], None]) -> None:
        self._has = has
        self._elsewhere = _wrong_listener(on_error)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the call's method, or the one that says it is elsewhere."""
        method = str(handler_call_details.method)
        if method.startswith(_OURS) and not self._has(method):
            return self._elsewhere
        return await continuation(handler_call_details)


def _wrong_listener(on_error: Callable[[str], None]) -> Any:
    """A handler that refuses whatever is asked."""

    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        on_error(Unsupported.reason)
        sentence = "not at this address: operators' methods are at --admin-listen, the others at --listen"
        await abort(context, Unsupported(sentence))

    return grpc.stream_stream_rpc_method_handler(refuse)
