"""grpc.health.v1: liveness and readiness.

The servicer of grpcio-health-checking loses a watcher when another one leaves, and a watcher that does not read delays
status changes for all. It also has no List.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from lineclear.errors import QueueFull
from lineclear.scheduler.engine.engine_stats import WorkerStatus
from lineclear.scheduler.grpc_api.inference_service import NAME
from lineclear.scheduler.security.identity import Context

SERVICE = health.SERVICE_NAME
READY = ("readiness", NAME)
"""Health names that are serving while a worker is joined and the server does not drain."""
LIVE = ("", "liveness")
"""Health names that are serving while the event loop and the engine run, also during a drain.

The empty name is the default of a kubelet's gRPC probe, so it must not depend on the worker.
"""
WORKER = "worker"
"""Health name that is NOT_SERVING while a worker hangs: its epoch has ended, and its process still runs.

For the liveness probe of a worker in its own container.
"""
MAX_WATCHERS = 1024
"""At each address. Watch needs no token, so clients of one address must not use up the limit of another."""
MAX_WATCHERS_PER_CONNECTION = 64

Status = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Serving status by name. On one event loop."""

    def __init__(self, names: Iterable[str]) -> None:
        self._serving = dict.fromkeys(names, False)
        self._changed = asyncio.Event()  # set and replaced at every change
        self._closed: set[str] = set()
        self._is_closed = False

    def set(self, names: Iterable[str], serving: bool) -> None:
        """Update the status of names, and notify watchers. Raises KeyError for an unknown name.

        Closed names stay closed: a worker that joins does not make a draining server ready.
        """
        for name in names:
            if self._serving[name] != serving and name not in self._closed:
                self._serving[name] = serving
                self._wake()

    def close(self, names: Iterable[str] | None = None) -> None:
        """Set these names (default: all) to not serving for good, and end their watches."""
        closing = set(self._serving if names is None else names)
        self._closed |= closing
        self._serving |= dict.fromkeys(closing, False)
        self._is_closed = self._closed >= self._serving.keys()
        self._wake()

    def is_serving(self, name: str) -> bool:
        return self._serving[name]

    def set_live(self, live: bool) -> None:
        self.set(LIVE, live)

    def set_worker(self, worker: WorkerStatus) -> bool:
        """Update readiness and the worker's health from the engine's published status; return whether it became ready.

        The server is ready while a worker is joined.
        """
        was_ready = self._serving[NAME]
        self.set(READY, worker.hello is not None)
        self.set((WORKER,), not worker.is_unhealthy)
        return self._serving[NAME] and not was_ready

    def set_draining(self) -> None:
        """Report not ready. New requests are still answered, with the reason for their rejection."""
        self.close(READY)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, name: str) -> Any:
        if name not in self._serving:
            return Status.SERVICE_UNKNOWN
        return Status.SERVING if self._serving[name] else Status.NOT_SERVING

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer Check, Watch and List."""
        listing = grpc.unary_unary_rpc_method_handler(self._list, request_deserializer=bytes, response_serializer=bytes)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"List": listing}),))
        health_pb2_grpc.add_HealthServicer_to_server(_ListenerHealth(self), server)

    async def _list(self, request: bytes, context: Context) -> bytes:
        """Return the status of every name, as a serialized HealthListResponse."""
        return b"".join(_field(1, _field(1, name.encode()) + _field(2, self._response(name))) for name in self._serving)

    def _response(self, name: str) -> bytes:
        return bytes(Status(status=self._status(name)).SerializeToString())

    async def Check(self, request: Any, context: Context) -> Any:
        """Return the status of a name; NOT_FOUND for an unknown one."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no service of this name")
        return Status(status=self._status(request.service))

    async def Watch(self, request: Any, context: Context) -> None:
        """Send the status now and after every change, until the client hangs up or the name is closed."""
        last = None
        while True:
            # Read before the write: changes during the write are sent in the next iteration.
            changed = self._changed
            is_last = self._is_closed or request.service in self._closed
            status = self._status(request.service)
            if status != last:
                await context.write(Status(status=status))
                last = status
            if is_last:
                return  # with status OK
            if changed is self._changed:
                await changed.wait()


class _ListenerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The shared health status on one listener, which limits its number of watchers."""

    def __init__(self, health: HealthService) -> None:
        self.Check = health.Check
        self._health = health
        self._by_connection: Counter[str] = Counter()

    async def Watch(self, request: Any, context: Context) -> None:
        """See HealthService.Watch. Raises QueueFull if there are too many watchers."""
        with self._counted(context.peer()):
            await self._health.Watch(request, context)

    @contextmanager
    def _counted(self, connection: str) -> Iterator[None]:
        total, here = self._by_connection.total(), self._by_connection[connection]
        # All connections of a Unix socket share one peer name, so only their total is limited.
        is_full = here >= MAX_WATCHERS_PER_CONNECTION and not connection.startswith("unix:")
        if is_full or total >= MAX_WATCHERS:
            raise QueueFull(
                f"health watchers: {total} at this address, {here} on this connection; the limits are "
                f"{MAX_WATCHERS} and {MAX_WATCHERS_PER_CONNECTION}"
            )
        self._by_connection[connection] += 1
        try:
            yield
        finally:
            self._by_connection[connection] -= 1
            if not self._by_connection[connection]:
                del self._by_connection[connection]


def _field(number: int, value: bytes) -> bytes:
    """Encode a length-delimited field. The installed grpcio-health-checking has no HealthListResponse message."""
    assert len(value) < 128, "the length is one byte"
    return bytes((number << 3 | 2, len(value))) + value
