"""Read the requests of calls: in time, and a bounded number of unfinished ones for each caller.

gRPC keeps the bytes of a message until the last one is there, from when the handler asks for the message. Before that
it keeps one flow control window (64 KiB). So what a connection can hold depends on how many messages are asked for.

A caller is a proven tenant on a connection. Without tenants all callers of a unix socket, and all behind one proxy
connection, count as one: gRPC gives them one name. So short requests (health, Cancel, figures) have places of their
own, and where a request arrives in moments, an unfinished one gives its place to those that wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import grpc.aio

from lineclear.errors import DeadlineExceeded, MalformedMessage, QueueFull
from lineclear.scheduler.security import identity
from lineclear.scheduler.settings import SchedulerSettings

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

MALFORMED = object()
"""What a deserializer makes of bytes that are no message of its method."""

LONG = frozenset({"Generate", "Submit", "Tokenize", "Detokenize"})
"""Methods whose request holds a prompt or token ids. The requests of all others are short."""

_SHORT_TURN_SECONDS = 0.25
_LONG_TURN_SECONDS = 1.0
_LEAST_OF_A_TURN = 0.1
_POLLS = 3


class _ReadSlots:
    """Requests of one caller that are read at once. Further ones wait, first come first served.

    With `turn_seconds`, a request that is unfinished after that time yields to those that wait: sooner the more wait,
    and not before a tenth of it.
    """

    def __init__(self, count: int, turn_seconds: float) -> None:
        self.num_calls = 0
        self._count = count
        self._turn_seconds = turn_seconds
        self._free = asyncio.Semaphore(count)
        self._num_waiting = 0
        self._num_yielding = 0
        self._reading: dict[asyncio.Timeout, float] = {}  # when each began, oldest first
        self._turns: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def slot(self, timeout_seconds: float) -> AsyncIterator[None]:
        """Wait for a place and hold it. Raises DeadlineExceeded after that time, and QueueFull where others wait."""
        await self._wait()
        limit = asyncio.timeout(timeout_seconds)
        self._reading[limit] = asyncio.get_running_loop().time()
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit in self._reading:
                raise _overdue(timeout_seconds) from None
            raise _displaced(self._count) from None
        finally:
            if self._reading.pop(limit, None) is None:
                self._num_yielding -= 1
            self._free.release()

    async def _wait(self) -> None:
        self._num_waiting += 1
        if self._free.locked() and self._turn_seconds and self._turns is None:
            self._turns = asyncio.ensure_future(self._turn_over())
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1

    async def _turn_over(self) -> None:
        """While requests wait, end the reading of the oldest ones in time."""
        try:
            while self._num_waiting:
                await asyncio.sleep(_LEAST_OF_A_TURN * self._turn_seconds)
                for _ in range(
                    _POLLS
                ):  # after a long turn of the event loop, requests may be complete and not yet seen
                    await asyncio.sleep(0)
                self._end_oldest()
        finally:
            self._turns = None

    def _end_oldest(self) -> None:
        now = asyncio.get_running_loop().time()
        share = max(self._count / (self._count + self._num_waiting), _LEAST_OF_A_TURN)
        for limit, began in list(self._reading.items()):
            if self._num_yielding >= self._num_waiting or now < began + share * self._turn_seconds:
                return
            if limit.expired():
                continue
            del self._reading[limit]
            self._num_yielding += 1
            limit.reschedule(now)


class RequestReader:
    """Bounds on the requests of one listener. On one event loop."""

    def __init__(self, timeout_seconds: float, max_unfinished: int, max_streams: int) -> None:
        self._timeout_seconds = timeout_seconds
        self._max_unfinished = max_unfinished
        self._max_streams = max_streams
        self._streams: Counter[str] = Counter()  # calls with a stream of requests, by peer
        self._places: dict[tuple[str, identity.Identity, bool], _ReadSlots] = {}  # those with a call that is being read

    async def first(self, requests: AsyncIterator[Any], context: Context, *, is_long: bool) -> Any:
        """Return the only request of a call, once it is complete.

        Raises DeadlineExceeded where that takes too long, QueueFull where complete requests wait for an unfinished one,
        and Malformed where no message of the method comes.
        """
        with self._places_of(context, is_long) as places:
            async with places.slot(self._timeout_seconds):
                request = await anext(requests, MALFORMED)
        generator: Any = aiter(requests)
        await generator.aclose()  # gRPC's holds the message, and is held by the call until that is garbage
        return checked(request)

    @contextmanager
    def stream(self, context: Context) -> Iterator[None]:
        """Count a call with a stream of requests. Raises QueueFull where the connection has too many."""
        peer = context.peer()
        # All callers of a unix socket have one name, so what they have open says nothing about any one of them.
        if self._streams[peer] >= self._max_streams and not _is_shared(peer):
            raise QueueFull(
                f"{self._streams[peer]} calls with a stream of requests are open on this connection, the limit "
                f"is {self._max_streams}; open another connection, or have the server raise "
                "--max-sessions-per-connection",
                retry_after_seconds=1.0,
                metadata={"limit": str(self._max_streams)},
            )
        self._streams[peer] += 1
        try:
            yield
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    @contextmanager
    def _places_of(self, context: Context, is_long: bool) -> Iterator[_ReadSlots]:
        peer = context.peer()
        key = peer, identity.caller(context), is_long
        places = self._places.get(key)
        if places is None:
            places = self._places[key] = _ReadSlots(self._max_unfinished, _turn_seconds(peer, is_long))
        places.num_calls += 1
        try:
            yield places
        finally:
            places.num_calls -= 1
            if not places.num_calls:
                del self._places[key]


def _turn_seconds(peer: str, is_long: bool) -> float:
    """How long an unfinished request keeps others waiting; 0: for as long as a request may take.

    A long request over a network takes as long as the network, and a client that sends many sends them side by side.
    """
    if not is_long:
        return _SHORT_TURN_SECONDS
    return _LONG_TURN_SECONDS if _is_shared(peer) else 0.0


def _is_shared(peer: str) -> bool:
    """Whether gRPC gives all callers of the address this name."""
    return peer.startswith("unix:")


def _overdue(timeout_seconds: float) -> DeadlineExceeded:
    limit = f"{timeout_seconds:g}"
    return DeadlineExceeded(
        f"the request was not complete after {limit} s, the server's --request-read-timeout-seconds",
        metadata={"request_read_timeout_seconds": limit},
    )


def _displaced(count: int) -> QueueFull:
    return QueueFull(
        f"the request was not complete while others waited; {count} are read at once"
        " (the server's --max-incomplete-requests-per-connection)",
        retry_after_seconds=1.0,
        metadata={"limit": str(count)},
    )


def request_reader(settings: SchedulerSettings) -> RequestReader:
    """The bounds that the settings ask for."""
    return RequestReader(
        settings.request_read_timeout_seconds,
        settings.max_incomplete_requests_per_connection,
        settings.max_sessions_per_connection,
    )


def checked(request: Any) -> Any:
    """The same request. Raises Malformed where the bytes were none."""
    if request is MALFORMED:
        raise MalformedMessage("the bytes are no message of this method; a string in it may be no UTF-8")
    return request
