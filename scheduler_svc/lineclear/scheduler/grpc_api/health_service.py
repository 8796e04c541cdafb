"""grpc.health.v1: whether the process lives and whether it takes requests.

The servicer of grpcio-health-checking loses a watcher when another one leaves, and lets a watcher that does not read
hold up a change of status; hence this one. It also has no List. Decides nothing: it is told.
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

SERVICE = health.SERVICE_NAME
MAX_WATCHERS = 1024
"""At each address. Watching needs no token, so callers at one address must not use up the places of another."""
MAX_WATCHERS_PER_CONNECTION = 64

Status = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Names and whether each is serving. On one event loop."""

    def __init__(self, names: Iterable[str]) -> None:
        self._serving = dict.fromkeys(names, False)
        self._changed = asyncio.Event()  # replaced at every change: whoever waits holds the old one
        self._closed: set[str] = set()
        self._is_closed = False

    def set(self, names: Iterable[str], serving: bool) -> None:
        """Tell everybody who watches. Raises KeyError for a name that was not given at the start.

        For what was closed this changes nothing: a worker that joins does not bring a leaving server back.
        """
        for name in names:
            if self._serving[name] != serving and name not in self._closed:
                self._serving[name] = serving
                self._wake()

    def close(self, names: Iterable[str] | None = None) -> None:
        """These names, or all, are not serving any more; everybody who watches one is told so and let go."""
        closing = set(self._serving if names is None else names)
        self._closed |= closing
        self._serving |= dict.fromkeys(closing, False)
        self._is_closed = self._closed >= self._serving.keys()
        self._wake()

    def is_serving(self, name: str) -> bool:
        """What a check of this name would say."""
        return self._serving[name]

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

    async def _list(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        """Return the status of every name, as a serialized HealthListResponse."""
        return b"".join(_field(1, _field(1, name.encode()) + _field(2, self._response(name))) for name in self._serving)

    def _response(self, name: str) -> bytes:
        return bytes(Status(status=self._status(name)).SerializeToString())

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """The status of a name; NOT_FOUND for one that we do not have."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no service of this name")
        return Status(status=self._status(request.service))

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The status now and after every change, until the caller or the server leaves."""
        last = None
        while True:
            # Taken together, before the write: whatever changes while that takes is another turn's.
            changed = self._changed
            is_last = self._is_closed or request.service in self._closed
            status = self._status(request.service)
            if status != last:
                await context.write(Status(status=status))
                last = status
            if is_last:
                return  # with OK: the last word is the status above, not an error on top of it
            if changed is self._changed:
                await changed.wait()


class _ListenerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health as one listener offers it: the same for all, with a bounded number of watchers of its own."""

    def __init__(self, health: HealthService) -> None:
        self._health = health
        self._by_connection: Counter[str] = Counter()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """As Health.Check."""
        return await self._health.Check(request, context)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """As Health.Watch. Raises QueueFull where there are too many."""
        with self._counted(context.peer()):
            await self._health.Watch(request, context)

    @contextmanager
    def _counted(self, connection: str) -> Iterator[None]:
        total, here = self._by_connection.total(), self._by_connection[connection]
        # gRPC gives all connections of a unix socket one name, so only their total can be bounded.
        is_full = here >= MAX_WATCHERS_PER_CONNECTION and not connection.startswith("unix:")
        if is_full or total >= MAX_WATCHERS:
            raise QueueFull(
                f"there are {total} watchers of health at this address and {here} on this connection; the limits are "
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
    """A length-delimited protobuf field. The installed grpcio-health-checking has no message HealthListResponse."""
    assert len(value) < 128, "the length is one byte"
    return bytes((number << 3 | 2, len(value))) + value
