"""Read the requests of calls: within a time limit, and a bounded number of incomplete ones for each client.

gRPC keeps the bytes of a message until it is complete, from the moment at which a handler asks for it. Before that it
keeps one flow control window (64 KiB). So the memory of a connection depends on the number of messages being read.

A client is a proven tenant on a connection. gRPC gives all clients of a Unix socket one name, and all clients behind a
proxy share a connection. So short requests (health, Cancel, statistics) have slots apart from long ones, and on a Unix
socket an incomplete request yields its slot to waiting ones.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from lineclear.errors import DeadlineExceeded, MalformedMessage, QueueFull
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import Context
from lineclear.scheduler.settings import SchedulerSettings

MALFORMED = object()
"""Result of a deserializer for bytes that it cannot parse."""

LONG = frozenset({"Generate", "Submit", "Score", "Embed", "Tokenize", "Detokenize"})
"""Methods whose request contains a prompt or token ids. All other requests are short."""

READ_TIMEOUT_SECONDS = 20.0  # the largest request of the default settings, 1 MiB, at 0.5 Mbit/s
MAX_INCOMPLETE = 16  # long requests of a client that are read at once: with max_message_bytes its memory, 32 MiB
_SHORT_SLICE_SECONDS = 0.25
_LONG_SLICE_SECONDS = 1.0
_MIN_SLICE = 0.1
_POLLS = 3


class _ReadSlots:
    """Slots for the requests of one client that are read at the same time. Further requests wait in order.

    With `slice_seconds`, a request that is incomplete after that time yields to waiting ones. The slice shrinks with
    their number, down to a tenth.
    """

    def __init__(self, count: int, slice_seconds: float) -> None:
        self.num_calls = 0
        self._count = count
        self._slice_seconds = slice_seconds
        self._free = asyncio.Semaphore(count)
        self._num_waiting = 0
        self._num_yielding = 0
        self._reading: dict[asyncio.Timeout, float] = {}  # start times, oldest first
        self._yielder: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def slot(self, timeout_seconds: float) -> AsyncIterator[None]:
        """Wait for a slot and hold it. Raises DeadlineExceeded after the timeout, QueueFull after yielding."""
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
        if self._free.locked() and self._slice_seconds and self._yielder is None:
            self._yielder = asyncio.ensure_future(self._yield_slots())
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1

    async def _yield_slots(self) -> None:
        """While requests wait, end the oldest reads whose slice is over."""
        try:
            while self._num_waiting:
                await asyncio.sleep(_MIN_SLICE * self._slice_seconds)
                # After a long loop iteration, requests may be complete but not yet processed.
                for _ in range(_POLLS):
                    await asyncio.sleep(0)
                self._end_oldest()
        finally:
            self._yielder = None

    def _end_oldest(self) -> None:
        now = asyncio.get_running_loop().time()
        share = max(self._count / (self._count + self._num_waiting), _MIN_SLICE)
        for limit, started_at in list(self._reading.items()):
            if self._num_yielding >= self._num_waiting or now < started_at + share * self._slice_seconds:
                return
            if limit.expired():
                continue
            del self._reading[limit]
            self._num_yielding += 1
            limit.reschedule(now)


class RequestReader:
    """Limits on reading the requests of one listener. On one event loop."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._max_streams = settings.max_sessions_per_connection
        self._streams: Counter[str] = Counter()  # open request streams, by peer
        self._slots: dict[tuple[str, identity.Identity, bool], _ReadSlots] = {}

    async def first(self, requests: AsyncIterator[Any], context: Context, *, is_long: bool) -> Any:
        """Return the only request of a call, once it is complete.

        Raises DeadlineExceeded if that takes too long, QueueFull if other requests wait for an incomplete one, and
        MalformedMessage for bytes that are not a message of the method.
        """
        with self._slots_of(context, is_long) as slots:
            async with slots.slot(READ_TIMEOUT_SECONDS):
                request = await anext(requests, MALFORMED)
        generator: Any = aiter(requests)
        await generator.aclose()  # gRPC's iterator holds the message until the call is garbage
        return checked(request)

    @contextmanager
    def stream(self, context: Context) -> Iterator[None]:
        """Count a call with a request stream. Raises QueueFull if the connection has too many."""
        peer = context.peer()
        # All clients of a Unix socket share one peer name, so a limit would mix them.
        if self._streams[peer] >= self._max_streams and not _is_shared(peer):
            raise QueueFull(
                f"{self._streams[peer]} calls with a request stream are open on this connection, the limit "
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
    def _slots_of(self, context: Context, is_long: bool) -> Iterator[_ReadSlots]:
        peer = context.peer()
        key = peer, identity.caller(context), is_long
        slots = self._slots.get(key)
        if slots is None:
            slots = self._slots[key] = _ReadSlots(MAX_INCOMPLETE, _slice_seconds(peer, is_long))
        slots.num_calls += 1
        try:
            yield slots
        finally:
            slots.num_calls -= 1
            if not slots.num_calls:
                del self._slots[key]


def _slice_seconds(peer: str, is_long: bool) -> float:
    """Return the time after which an incomplete request yields; 0 means never.

    A long request over a network takes as long as the network, and parallel requests of one client share it.
    """
    if not is_long:
        return _SHORT_SLICE_SECONDS
    return _LONG_SLICE_SECONDS if _is_shared(peer) else 0.0


def _is_shared(peer: str) -> bool:
    """Whether all clients of the address have this peer name."""
    return peer.startswith("unix:")


def _overdue(timeout_seconds: float) -> DeadlineExceeded:
    limit = f"{timeout_seconds:g}"
    return DeadlineExceeded(
        f"the request was not complete after {limit} s", metadata={"request_read_timeout_seconds": limit}
    )


def _displaced(count: int) -> QueueFull:
    return QueueFull(
        f"the request was incomplete while others waited; {count} requests are read at once",
        retry_after_seconds=1.0,
        metadata={"limit": str(count)},
    )


def checked(request: Any) -> Any:
    """Return a parsed request. Raises MalformedMessage for bytes that could not be parsed."""
    if request is MALFORMED:
        raise MalformedMessage("cannot parse the request message (invalid protobuf or UTF-8)")
    return request
