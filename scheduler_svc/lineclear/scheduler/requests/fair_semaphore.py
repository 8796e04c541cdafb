"""Turns at work that is shared by all callers, divided fairly: start-time fair queueing (Goyal, Vin and Cheng 1996).

A flow is a tenant, or a connection where nothing is proven. A flow that asks for much waits behind its own requests,
not in front of the others'; one flow never holds all the places where there are several; and where too much waits, the
flow with most of it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator

from lineclear.errors import QueueFull


class _Waiter:
    __slots__ = ("flow", "future")

    def __init__(self, flow: str) -> None:
        self.flow = flow
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class FairSemaphore:
    """Lets `places` in at a time; at most `max_waiting` wait. On one event loop."""

    def __init__(self, places: int, max_waiting: int, what: str) -> None:
        """`what` says in an error what there is too much of, as in "texts are being tokenized"."""
        self._places = places
        self._max_waiting = max_waiting
        self._limit = places + max_waiting
        self._what = what
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, _Waiter]] = []  # by start tag; some may have given up
        self._waiting: dict[str, list[_Waiter]] = {}  # by flow, oldest first
        self._num_waiting = 0
        self._inside: Counter[str] = Counter()
        self._clock = 0.0  # start tag of the last one that was let in
        self._finish: dict[str, float] = {}  # of each flow, the finish tag of its last request

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._num_waiting

    @property
    def num_inside(self) -> int:
        """Places that are taken."""
        return self._inside.total()

    @contextlib.asynccontextmanager
    async def slot(self, flow: str, cost: float) -> AsyncIterator[None]:
        """Wait for a place, and hold it. `cost` is how much work it is, in a unit of the gate's own.

        Raises QueueFull where too much waits, now or later.
        """
        await self.acquire(flow, cost)
        try:
            yield
        finally:
            self.release(flow)

    async def acquire(self, flow: str, cost: float) -> None:
        """The same without the context: `leave` must follow."""
        start = max(self._clock, self._finish.get(flow, 0.0))
        if self._may_acquire(flow) and not self._num_waiting:
            self._finish[flow] = start + cost
            self._admit(flow, start)
            return
        if self._num_waiting >= self._max_waiting:
            self._evict(flow)
        self._finish[flow] = start + cost
        waiter = _Waiter(flow)
        heapq.heappush(self._queue, (start, next(self._numbers), waiter))
        self._waiting.setdefault(flow, []).append(waiter)
        self._num_waiting += 1
        self._grant()
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self.release(flow)  # it was let in and cancelled in the same moment
            else:
                self._forget(waiter)
            raise

    def release(self, flow: str) -> None:
        """Give a place back."""
        self._inside[flow] -= 1
        if not self._inside[flow]:
            del self._inside[flow]
        self._grant()
        if not self._num_waiting and not self._inside:
            self._finish.clear()
            self._queue.clear()
            self._clock = 0.0

    def _may_acquire(self, flow: str) -> bool:
        return self._inside.total() < self._places and self._inside[flow] < max(1, self._places - 1)

    def _admit(self, flow: str, start: float) -> None:
        self._inside[flow] += 1
        self._clock = max(self._clock, start)

    def _grant(self) -> None:
        """Let in those that may enter, by start tag."""
        passed = []
        while self._queue and self._inside.total() < self._places:
            entry = heapq.heappop(self._queue)
            start, _, waiter = entry
            if waiter.future.done():
                continue
            if not self._may_acquire(waiter.flow):
                passed.append(entry)
                continue
            self._forget(waiter)
            self._admit(waiter.flow, start)
            waiter.future.set_result(None)
        for entry in passed:
            heapq.heappush(self._queue, entry)

    def _forget(self, waiter: _Waiter) -> None:
        mine = self._waiting.get(waiter.flow, [])
        if waiter in mine:
            mine.remove(waiter)
            self._num_waiting -= 1
            if not mine:
                del self._waiting[waiter.flow]

    def _evict(self, flow: str) -> None:
        """Refuse the newest request of the flow that has most of them waiting; `flow` itself where that is it."""
        largest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=flow)
        if len(self._waiting.get(largest, ())) <= len(self._waiting.get(flow, ())) + 1:
            raise self._full()
        victim = self._waiting[largest][-1]
        self._forget(victim)
        victim.future.set_exception(self._full())

    def _full(self) -> QueueFull:
        return QueueFull(
            f"{self._limit} {self._what}, which is the limit; retry later",
            retry_after_seconds=1.0,
            metadata={"limit": str(self._limit)},
        )
