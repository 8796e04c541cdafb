"""Fair sharing between flows: a large flow waits behind itself, and cancelled waiters leave no state."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from lineclear.errors import QueueFull
from lineclear.scheduler.requests.fair_semaphore import FairSemaphore
from lineclear.scheduler.requests.limited_processes import LimitedProcesses
from lineclear.scheduler.security import identity


async def settle() -> None:
    """Run all callbacks that are ready."""
    for _ in range(10):
        await asyncio.sleep(0)


def is_idle(gate: FairSemaphore) -> bool:
    """Return whether nothing of any flow is left."""
    return not (gate.num_inside or gate.num_waiting or gate._finish or gate._starts or gate._waiting)


class Queued:
    """Requests for a semaphore. `admitted` are the flows in the order of admission, and `costs` their costs."""

    def __init__(self, places: int, max_waiting: int = 200) -> None:
        self.gate = FairSemaphore(places, max_waiting, "things wait")
        self.admitted: list[str] = []
        self.costs: list[float] = []
        self.num_released = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def submit(self, flow: str, *costs: float) -> None:
        self._tasks += [asyncio.ensure_future(self._acquire(flow, cost)) for cost in costs]
        await settle()

    async def _acquire(self, flow: str, cost: float) -> None:
        await self.gate.acquire(flow, cost)
        self.admitted.append(flow)
        self.costs.append(cost)

    async def release(self) -> None:
        self.gate.release(self.admitted[self.num_released])
        self.num_released += 1
        await settle()

    async def finish(self) -> None:
        """Release the admitted requests in turn until none waits; nothing of them is left."""
        while self.num_released < len(self.admitted):
            await self.release()
        await asyncio.gather(*self._tasks)
        assert is_idle(self.gate)


async def test_flood_waits_behind_the_first_of_another_flow() -> None:
    work = Queued(1)
    await work.submit("flood", *[1.0] * 20)
    await work.submit("other", *[1.0] * 3)
    await work.finish()
    assert work.admitted[:8].count("other") == 3
    assert len(work.admitted) == 23


async def test_work_counts_by_its_cost() -> None:
    """A request of cost ten counts as much as ten of cost one."""
    work = Queued(1)
    await work.submit("large", *[10.0] * 5)
    await work.submit("small", *[1.0] * 40)
    await work.finish()
    at = [index for index, flow in enumerate(work.admitted) if flow == "large"]
    assert all(9 <= after - before - 1 <= 11 for before, after in itertools.pairwise(at)), work.admitted


async def test_cheap_request_is_first_in_its_flow() -> None:
    work = Queued(2)
    await work.submit("flow", *[1000.0 + number for number in range(16)])
    await work.submit("flow", 10.0)
    await work.submit("other", 5000.0)
    await work.finish()
    assert work.costs[:3] == [1000.0, 5000.0, 10.0], "the other flow has a slot of its own"
    assert work.costs[3:] == [1001.0 + number for number in range(15)], "equal ones by arrival"


async def test_expensive_request_is_overtaken_by_its_own_cost_at_most() -> None:
    work = Queued(1)
    await work.submit("flow", 10.0, 100.0)
    while 100.0 not in work.costs:
        await work.submit("flow", 10.0)
        await work.release()
    assert work.costs == [10.0] * 10 + [100.0]
    await work.finish()


async def test_cheap_requests_give_their_flow_no_advantage() -> None:
    work = Queued(1)
    await work.submit("mixed", *(50.0, 1.0) * 20)
    await work.submit("even", *[10.0] * 60)
    await work.finish()
    served = dict.fromkeys(("mixed", "even"), 0.0)
    for flow, cost in zip(work.admitted[:70], work.costs[:70], strict=True):
        served[flow] += cost
    assert abs(served["mixed"] - served["even"]) <= 60.0, served


async def test_work_that_took_longer_counts_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tenants send few bytes that take long; a third one sends many that do not."""
    monkeypatch.setattr("lineclear.scheduler.requests.limited_processes.num_processes", lambda cores: 2)
    pool = LimitedProcesses("work", "none", {}, cpu_seconds=1.0, max_bytes=100, max_waiting=200, what="things wait")
    order: list[str] = []

    async def answer(frame: bytes) -> bytes:
        order.append(identity.flow())
        await asyncio.sleep(0.05 if frame == b"slow" else 0)
        return b"+"

    pool._answer = answer  # type: ignore[method-assign]

    async def work(tenant: str, frame: bytes, cost: float, count: int) -> None:
        identity.set_flow_tenant(tenant)
        for _ in range(count):
            await pool.ask(frame, cost)

    slow = [asyncio.ensure_future(work(tenant, b"slow", 50.0, 1)) for tenant in ("a", "c") for _ in range(60)]
    await settle()
    await work("b", b"quick", 50_000.0, 3)
    assert len(order) < 100, "not behind all of the slow work"
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_one_flow_leaves_a_slot_to_others() -> None:
    work = Queued(3)
    await work.submit("flood", *[1.0] * 5)
    assert work.admitted == ["flood", "flood"]
    await work.submit("other", 1.0)
    assert work.admitted == ["flood", "flood", "other"]
    await work.finish()


async def test_full_queue_rejects_the_largest_flow() -> None:
    work = Queued(1, max_waiting=4)
    await work.submit("flood", *[1.0] * 4)
    newest = asyncio.ensure_future(work.gate.acquire("flood", 1.0))
    await settle()
    with pytest.raises(QueueFull, match="5 things wait") as caught:
        await work.gate.acquire("flood", 1.0)
    assert caught.value.metadata == {"limit": "5"}
    await work.submit("other", 1.0)
    assert newest.done()  # it was rejected for the other flow
    with pytest.raises(QueueFull):
        await newest
    await work.finish()
    assert sorted(work.admitted) == ["flood"] * 4 + ["other"]


async def test_cancelled_waiters_leave_nothing() -> None:
    gate = FairSemaphore(1, 4, "things wait")
    await gate.acquire("a", 1.0)
    waiting = [asyncio.ensure_future(gate.acquire(flow, 1.0)) for flow in "abc"]
    await settle()
    waiting[0].cancel()
    await settle()
    assert gate.num_waiting == 2
    gate.release("a")  # admits b
    waiting[1].cancel()  # in the same iteration
    await settle()
    assert waiting[2].done()
    assert gate.num_inside == 1
    gate.release("c")
    assert is_idle(gate)


async def test_slot_without_a_waiting_queue() -> None:
    gate = FairSemaphore(1, 0, "things wait")
    async with gate.slot("a", 1.0):
        with pytest.raises(QueueFull):
            await gate.acquire("b", 1.0)
    async with gate.slot("b", 1.0):
        assert gate.num_inside == 1
