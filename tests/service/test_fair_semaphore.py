"""Fair sharing between flows: a large flow waits behind itself, and cancelled waiters leave no state."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from lineclear.errors import QueueFull
from lineclear.scheduler.requests.fair_semaphore import FairSemaphore


async def settle() -> None:
    """Run all callbacks that are ready."""
    for _ in range(10):
        await asyncio.sleep(0)


class Work:
    """Requests for a semaphore. `admitted` are the flows in the order of admission."""

    def __init__(self, gate: FairSemaphore) -> None:
        self.gate = gate
        self.admitted: list[str] = []

    def submit(self, flow: str, cost: float = 1.0) -> asyncio.Task[None]:
        return asyncio.ensure_future(self._acquire(flow, cost))

    async def _acquire(self, flow: str, cost: float) -> None:
        await self.gate.acquire(flow, cost)
        self.admitted.append(flow)

    async def finish(self) -> None:
        """Release the admitted requests in turn until none waits."""
        released = 0
        while released < len(self.admitted):
            self.gate.release(self.admitted[released])
            released += 1
            await settle()


async def test_flood_waits_behind_the_first_of_another_flow() -> None:
    work = Work(FairSemaphore(1, 100, "things wait"))
    flood = [work.submit("flood") for _ in range(20)]
    await settle()
    others = [work.submit("other") for _ in range(3)]
    await settle()
    await work.finish()
    assert work.admitted[:8].count("other") == 3
    assert len(work.admitted) == 23
    await asyncio.gather(*flood, *others)
    assert (work.gate.num_inside, work.gate.num_waiting) == (0, 0)


async def test_work_counts_by_its_cost() -> None:
    """A request of cost ten counts as much as ten of cost one."""

    work = Work(FairSemaphore(1, 100, "things wait"))
    tasks = [work.submit("large", 10.0) for _ in range(5)] + [work.submit("small", 1.0) for _ in range(40)]
    await settle()
    await work.finish()
    at = [index for index, flow in enumerate(work.admitted) if flow == "large"]
    assert all(9 <= after - before - 1 <= 11 for before, after in itertools.pairwise(at)), work.admitted
    await asyncio.gather(*tasks)


async def test_one_flow_leaves_a_slot_to_others() -> None:
    work = Work(FairSemaphore(3, 100, "things wait"))
    tasks = [work.submit("flood") for _ in range(5)]
    await settle()
    assert work.admitted == ["flood", "flood"]
    tasks.append(work.submit("other"))
    await settle()
    assert work.admitted == ["flood", "flood", "other"]
    await work.finish()
    await asyncio.gather(*tasks)


async def test_full_queue_rejects_the_largest_flow() -> None:
    work = Work(FairSemaphore(1, 4, "things wait"))
    flood = [work.submit("flood") for _ in range(5)]
    await settle()
    with pytest.raises(QueueFull, match="5 things wait") as caught:
        await work.submit("flood")
    assert caught.value.metadata == {"limit": "5"}
    other = work.submit("other")
    await settle()
    assert flood[-1].done()  # its newest request was rejected for it
    with pytest.raises(QueueFull):
        await flood[-1]
    await work.finish()
    assert sorted(work.admitted) == ["flood"] * 4 + ["other"]
    await asyncio.gather(*flood[:-1], other)


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
    assert (gate.num_inside, gate.num_waiting) == (0, 0)
    assert not any((gate._finish, gate._queue, gate._waiting))


async def test_slot_without_a_waiting_queue() -> None:
    gate = FairSemaphore(1, 0, "things wait")
    async with gate.slot("a", 1.0):
        with pytest.raises(QueueFull):
            await gate.acquire("b", 1.0)
    async with gate.slot("b", 1.0):
        assert gate.num_inside == 1
