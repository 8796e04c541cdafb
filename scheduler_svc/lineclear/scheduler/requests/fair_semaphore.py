"""A semaphore that divides work fairly between flows: start-time fair queueing (Goyal, Vin and Cheng 1996).

A flow is a tenant, or a connection without a tenant. Requests of a busy flow delay that flow and no other. With two
slots or more, a flow cannot hold all of them. If too many requests wait, the flow with most of them is rejected.
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
    """Admits `places` holders at a time, and lets at most `max_waiting` wait. On one event loop."""

    def __init__(self, places: int, max_waiting: int, what: str) -> None:
        """`what` describes the waiting work in errors, as in "texts are being tokenized"."""
        self._places = places
        self._max_waiting = max_waiting
        self._limit = places + max_waiting
        self._what = what
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, _Waiter]] = []  # by start tag; cancelled waiters stay until popped
        self._waiting: dict[str, list[_Waiter]] = {}  # by flow, oldest first
        self._num_waiting = 0
        self._inside: Counter[str] = Counter()
        self._clock = 0.0  # start tag of the last admitted waiter
        self._finish: dict[str, float] = {}  # finish tag of each flow's last request

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return self._num_waiting

    @property
    def num_inside(self) -> int:
        """Number of held slots."""
        return self._inside.total()

    @contextlib.asynccontextmanager
    async def slot(self, flow: str, cost: float) -> AsyncIterator[None]:
        """Wait for a slot, and hold it. `cost` is the amount of work, in any fixed unit.

        Raises QueueFull if too many requests wait, now or later.
        """
        await self.acquire(flow, cost)
        try:
            yield
        finally:
            self.release(flow)

    async def acquire(self, flow: str, cost: float) -> None:
        """Wait for a slot. `release` must follow."""
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
                self.release(flow)  # admitted and cancelled in the same loop iteration
            else:
                self._forget(waiter)
            raise

    def release(self, flow: str) -> None:
        """Return a slot."""
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
        """Admit waiters that fit, by start tag."""
        skipped = []
        while self._queue and self._inside.total() < self._places:
            entry = heapq.heappop(self._queue)
            start, _, waiter = entry
            if waiter.future.done():
                continue
            if not self._may_acquire(waiter.flow):
                skipped.append(entry)
                continue
            self._forget(waiter)
            self._admit(waiter.flow, start)
            waiter.future.set_result(None)
        for entry in skipped:
            heapq.heappush(self._queue, entry)

    def _forget(self, waiter: _Waiter) -> None:
        of_flow = self._waiting.get(waiter.flow, [])
        if waiter in of_flow:
            of_flow.remove(waiter)
            self._num_waiting -= 1
            if not of_flow:
                del self._waiting[waiter.flow]

    def _evict(self, flow: str) -> None:
        """Reject the newest request of the flow with most waiting requests, which may be `flow` itself."""
        largest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=flow)
        if len(self._waiting.get(largest, ())) <= len(self._waiting.get(flow, ())) + 1:
            raise self._full()
        victim = self._waiting[largest][-1]
        self._forget(victim)
        victim.future.set_exception(self._full())

    def _full(self) -> QueueFull:
        return QueueFull(
            f"{self._limit} {self._what}, the limit is {self._limit}; retry later",
            retry_after_seconds=1.0,
            metadata={"limit": str(self._limit)},
        )
