"""A semaphore that divides work fairly between flows: start-time fair queueing (Goyal, Vin and Cheng 1996).

A flow is a tenant, or a connection without a tenant. Requests of a busy flow delay that flow and no other. With two
slots or more, a flow cannot hold all of them. If too many requests wait, the flow with most of them is rejected.

Within a flow the cheapest request is first, with aging: later requests overtake one by at most its own cost in total.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from lineclear.errors import QueueFull

_T = TypeVar("_T")


class _Waiter:
    __slots__ = ("cost", "flow", "future", "key")

    def __init__(self, flow: str, cost: float, key: tuple[float, int]) -> None:
        self.flow, self.cost = flow, cost
        self.key = key  # the tag of the flow on arrival and the cost, so that later requests get higher keys
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class FairSemaphore:
    """Admits `places` holders at a time, and lets at most `max_waiting` wait. On one event loop."""

    def __init__(self, places: int, max_waiting: int, what: str, cost_per_second: float = 0.0) -> None:
        """`what` describes the waiting work in errors, as in "texts are being tokenized".

        Work that `run` starts costs at least `cost_per_second`: if it took longer, later work of the flow pays for it.
        """
        self._cost_per_second = cost_per_second
        self._running: set[asyncio.Future[Any]] = set()
        self._places = places
        self._max_waiting = max_waiting
        self._limit = places + max_waiting
        self._what = what
        self._numbers = itertools.count()
        self._waiting: dict[str, list[_Waiter]] = {}  # by flow, oldest first
        self._inside: Counter[str] = Counter()
        self._clock = 0.0  # start tag of the last admitted waiter
        self._finish: dict[str, float] = {}  # finish tag of each flow's last admitted request
        self._starts: dict[str, float] = {}  # start tag of the next request of each flow that waits

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

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

    async def run(self, flow: str, cost: float, start: Callable[[], asyncio.Future[_T]]) -> _T:
        """Wait for a slot, call `start`, and return the result of its future.

        Neither threads nor processes can be stopped, so a cancelled caller leaves the slot held until they finish.
        """
        await self.acquire(flow, cost)
        future, loop = start(), asyncio.get_running_loop()
        began_at = loop.time()
        self._running.add(future)

        def done(future: asyncio.Future[_T]) -> None:
            self.release(flow, (loop.time() - began_at) * self._cost_per_second - cost)
            self._running.discard(future)
            if not future.cancelled():
                future.exception()  # retrieve the exception if the client is gone

        future.add_done_callback(done)
        return await asyncio.shield(future)

    async def acquire(self, flow: str, cost: float) -> None:
        """Wait for a slot. `release` must follow."""
        start = self._starts.get(flow, max(self._clock, self._finish.get(flow, 0.0)))
        if self._may_acquire(flow) and not self._waiting:
            self._admit(flow, start, cost)
            return
        if self.num_waiting >= self._max_waiting:
            self._evict(flow)
        waiter = _Waiter(flow, cost, (start + cost, next(self._numbers)))
        self._starts[flow] = start
        self._waiting.setdefault(flow, []).append(waiter)
        self._grant()
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self.release(flow)  # admitted and cancelled in the same loop iteration
            else:
                self._forget(waiter)
            raise

    def release(self, flow: str, extra_cost: float = 0.0) -> None:
        """Return a slot. The work took `extra_cost` more than its `cost`: later work of the flow pays for it."""
        if extra_cost > 0:
            self._finish[flow] = self._finish.get(flow, 0.0) + extra_cost
            if flow in self._starts:
                self._starts[flow] += extra_cost
        self._inside[flow] -= 1
        if not self._inside[flow]:
            del self._inside[flow]
        self._grant()
        if not self._waiting and not self._inside:
            self._finish.clear()
            self._clock = 0.0

    def _may_acquire(self, flow: str) -> bool:
        return self._inside.total() < self._places and self._inside[flow] < max(1, self._places - 1)

    def _admit(self, flow: str, start: float, cost: float) -> None:
        self._inside[flow] += 1
        self._clock = max(self._clock, start)
        self._finish[flow] = start + cost

    def _grant(self) -> None:
        """Admit waiters that fit: the flow with the lowest start tag, and of it the waiter with the lowest key."""
        while self._inside.total() < self._places:
            flows = [flow for flow in self._waiting if self._may_acquire(flow)]
            if not flows:
                return
            flow = min(flows, key=lambda name: (self._starts[name], self._waiting[name][0].key[1]))
            waiter = min(self._waiting[flow], key=lambda each: each.key)
            start = self._starts[flow]
            self._starts[flow] = start + waiter.cost
            self._forget(waiter)
            self._admit(flow, start, waiter.cost)
            waiter.future.set_result(None)

    def _forget(self, waiter: _Waiter) -> None:
        of_flow = self._waiting.get(waiter.flow, [])
        if waiter in of_flow:
            of_flow.remove(waiter)
            if not of_flow:
                del self._waiting[waiter.flow], self._starts[waiter.flow]

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
