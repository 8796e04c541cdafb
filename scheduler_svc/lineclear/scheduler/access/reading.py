"""Read the requests of calls: in time, and a bounded number of unfinished ones for each connection.

gRPC keeps the bytes of a message until the last one is there, from when the handler asks for the message. Before that
it keeps one flow control window (64 KiB). So what a connection can hold depends on how many messages are asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc.aio

from lineclear.errors import DeadlineExceeded, Malformed, QueueFull
from lineclear.scheduler.settings import SchedulerSettings

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MALFORMED = object()
"""What a deserializer makes of bytes that are no message of its method."""


class _Connection:
    def __init__(self, max_unfinished: int) -> None:
        self.places = asyncio.Semaphore(max_unfinished)
        self.num_calls = 0
        self.num_streams = 0


class Reading:
    """Bounds on the requests of one listener. On one event loop."""

    def __init__(self, timeout_seconds: float, max_unfinished: int, max_streams: int) -> None:
        self._timeout_seconds = timeout_seconds
        self._max_unfinished = max_unfinished
        self._max_streams = max_streams
        self._connections: dict[str, _Connection] = {}  # those with a call that is being read; by peer

    async def first(self, requests: AsyncIterator[Any], context: Context) -> Any:
        """Return the only request of a call, once it is complete.

        Raises DeadlineExceeded where that takes too long, and Malformed where no message of the method comes.
        """
        with self._connection(context) as connection:
            try:
                async with connection.places, asyncio.timeout(self._timeout_seconds):
                    request = await anext(requests, MALFORMED)
            except TimeoutError:
                limit = f"{self._timeout_seconds:g}"
                raise DeadlineExceeded(
                    f"the request was not complete after {limit} s; see request_timeout_seconds",
                    metadata={"request_timeout_seconds": limit},
                ) from None
        generator: Any = aiter(requests)
        await generator.aclose()  # gRPC's holds the message, and is held by the call until that is garbage
        return checked(request)

    @contextmanager
    def stream(self, context: Context) -> Iterator[None]:
        """Count a call with a stream of requests. Raises QueueFull where the connection has too many."""
        with self._connection(context) as connection:
            # All callers of a unix socket have one name, so what they have open says nothing about any one of them.
            if connection.num_streams >= self._max_streams and not context.peer().startswith("unix:"):
                raise QueueFull(
                    f"{connection.num_streams} calls with a stream of requests are open on this connection, the limit "
                    f"is {self._max_streams}; open another connection, or raise max_sessions_per_connection",
                    retry_after_seconds=1.0,
                    metadata={"limit": str(self._max_streams)},
                )
            connection.num_streams += 1
            try:
                yield
            finally:
                connection.num_streams -= 1

    @contextmanager
    def _connection(self, context: Context) -> Iterator[_Connection]:
        """The connection of a call. All those of a unix socket count as one, because gRPC gives them one name."""
        peer = context.peer()
        connection = self._connections.get(peer)
        if connection is None:
            connection = self._connections[peer] = _Connection(self._max_unfinished)
        connection.num_calls += 1
        try:
            yield connection
        finally:
            connection.num_calls -= 1
            if not connection.num_calls:
                del self._connections[peer]


def reading_of(settings: SchedulerSettings) -> Reading:
    """The bounds that the settings ask for."""
    return Reading(
        settings.request_timeout_seconds,
        settings.max_unfinished_per_connection,
        settings.max_sessions_per_connection,
    )


def checked(request: Any) -> Any:
    """The same request. Raises Malformed where the bytes were none."""
    if request is MALFORMED:
        raise Malformed("the bytes are no message of this method; a string in it may be no UTF-8")
    return request
