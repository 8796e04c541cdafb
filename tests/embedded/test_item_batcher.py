"""ItemBatcher: which items share a batch, costs, several steps, errors, deadlines, and its end."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed, wait
from typing import Any

import pytest
from support.embedded import Gate
from support.time_limits import PATIENCE_SECONDS

from lineclear.embedded import (
    MORE,
    DeadlineExceeded,
    DuplicateRequest,
    ItemBatcher,
    QueueFull,
    ServerDraining,
)
from lineclear.errors import InvalidRequest, ShutdownInterrupted


def doubled(items: list[int]) -> list[int]:
    return [2 * item for item in items]


def busy(running: Callable[[Any], Any], item: int = 0, **options: Any) -> tuple[Gate, ItemBatcher[int, int]]:
    """Return a gate, and a batcher that computes `item` until the gate opens."""
    gate = Gate(doubled)
    batcher = running(ItemBatcher(gate, **options))
    batcher.submit(item)
    gate.wait_for_call()
    return gate, batcher


def test_items_that_wait_share_a_batch(running: Callable[[Any], Any]) -> None:
    gate, batcher = busy(running, max_batch_size=3)
    others = [batcher.submit(n) for n in range(1, 6)]
    gate.open()
    assert [future.result() for future in others] == [2, 4, 6, 8, 10]
    assert gate.calls == [[0], [1, 2, 3], [4, 5]]


def test_asyncio_gather_gets_each_result_in_its_place() -> None:
    async def slow(items: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return doubled(items)

    async def main() -> list[int]:
        async with ItemBatcher(slow, max_batch_size=4) as batcher:
            return await asyncio.gather(*(batcher.submit(n) for n in range(20)))

    assert asyncio.run(main()) == doubled(list(range(20)))


def test_asyncio_wait_returns_the_first_item(running: Callable[[Any], Any]) -> None:
    gate, batcher = busy(running, max_batch_size=1)

    async def main() -> None:
        first, second = batcher.submit(1), batcher.submit(2)
        asyncio.get_running_loop().call_later(0.01, gate.open)
        done, _ = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        assert first in done
        done, pending = await asyncio.wait([first, second])
        assert (sorted(future.result() for future in done), pending) == ([2, 4], set())

    asyncio.run(asyncio.wait_for(main(), PATIENCE_SECONDS))


def test_done_callback_of_a_task_runs_on_its_loop() -> None:
    threads: list[threading.Thread] = []

    def note(future: Any) -> None:
        threads.append(threading.current_thread())

    async def main() -> None:
        async with ItemBatcher(doubled) as batcher:
            kept, dropped = batcher.submit(1), batcher.submit(2)
            kept.add_done_callback(note)
            dropped.add_done_callback(note)
            assert (dropped.remove_done_callback(note), dropped.remove_done_callback(note)) == (1, 0)
            assert [await kept, await dropped] == [2, 4]
            await asyncio.sleep(0)

    asyncio.run(main())
    assert threads == [threading.current_thread()]


def test_coroutine_function_runs_on_the_callers_loop() -> None:
    async def where(items: list[int]) -> list[threading.Thread]:
        return [threading.current_thread() for _ in items]

    async def main() -> threading.Thread:
        async with ItemBatcher(where) as batcher:
            return await batcher.submit(1)

    assert asyncio.run(main()) is threading.current_thread()
    with ItemBatcher(where) as batcher:  # without a loop it runs in the batcher's thread
        assert batcher.submit(1).result() is not threading.current_thread()


@pytest.mark.parametrize(("target", "max_batch_size", "largest"), [(20, 8, 9), (100, 4, 60), (5000, 16, 1500)])
def test_costs_of_a_batch_stay_within_the_target(target: int, max_batch_size: int, largest: int) -> None:
    batches: list[list[int]] = []
    random.seed(target)
    items = [random.randint(1, largest) for _ in range(300)]
    gate = Gate(lambda batch: batches.append(batch) or batch)
    with ItemBatcher(gate, cost_estimator=int, target_batch_cost=target, max_batch_size=max_batch_size) as batcher:
        futures = [batcher.submit(item) for item in items]
        gate.open()
        assert [future.result() for future in futures] == items
    assert max(map(sum, batches)) <= target
    assert max(map(len, batches)) <= max_batch_size
    full = batches[1:-1]
    # First fit in order of arrival, with a little overtaking, wastes less than one item a batch.
    assert all(sum(batch) > target - largest or len(batch) == max_batch_size for batch in full)


def test_batch_of_equal_costs_reaches_the_target_exactly(running: Callable[[Any], Any]) -> None:
    gate, batcher = busy(running, target_batch_cost=8, default_cost=2, max_batch_size=16)
    futures = [batcher.submit(n) for n in range(8)]
    gate.open()
    wait(futures, PATIENCE_SECONDS)
    assert [len(call) for call in gate.calls] == [1, 4, 4]


def test_item_above_the_target_runs_alone(running: Callable[[Any], Any]) -> None:
    gate, batcher = busy(running, cost_estimator=int, target_batch_cost=10, item=1)
    futures = [batcher.submit(n) for n in (3, 1000, 3)]
    gate.open()
    wait(futures, PATIENCE_SECONDS)
    assert sorted(gate.calls[1:]) == [[3, 3], [1000]]


def test_item_of_several_steps_keeps_its_place_and_others_join(running: Callable[[Any], Any]) -> None:
    def count_down(items: list[list[int]]) -> list[Any]:
        for item in items:
            item[0] -= 1
        return [MORE if item[0] else tuple(item) for item in items]

    gate = Gate(count_down)
    batcher = running(ItemBatcher(gate, max_batch_size=2, max_steps=5))
    long = batcher.submit([4, 1])
    gate.wait_for_call()
    short, last = batcher.submit([1, 2]), batcher.submit([2, 3])
    gate.open()
    assert [future.result() for future in (long, short, last)] == [(0, 1), (0, 2), (0, 3)]
    assert [[item[1] for item in call] for call in gate.calls] == [[1], [1, 2], [1, 3], [1, 3]]


def test_item_that_never_ends_fails_after_max_steps() -> None:
    with ItemBatcher(lambda items: [MORE] * len(items), max_steps=3) as batcher:
        with pytest.raises(RuntimeError, match="more than max_steps = 3"):
            batcher.submit(1).result()
        assert batcher.stats().steps == 3


def test_priority_decides_the_order(running: Callable[[Any], Any]) -> None:
    gate, batcher = busy(running, max_batch_size=1, scheduling_policy="priority")
    futures = [batcher.submit(n, priority=10 - n) for n in (1, 2, 3)]
    gate.open()
    wait(futures, PATIENCE_SECONDS)
    assert gate.calls == [[0], [3], [2], [1]]


def test_full_queue_rejects_at_once(running: Callable[[Any], Any]) -> None:
    gate, batcher = busy(running, max_batch_size=1, max_queue_size=2)
    waiting = [batcher.submit(n) for n in (1, 2)]
    with pytest.raises(QueueFull, match="2 requests are waiting, the limit is 2"):
        batcher.submit(3)
    assert batcher.stats().requests_rejected == 1
    gate.open()
    assert [future.result() for future in waiting] == [2, 4]


def test_queue_is_bounded_by_cost(running: Callable[[Any], Any]) -> None:
    gate, batcher = busy(running, max_batch_size=1, cost_estimator=int, max_queue_cost=10, item=100)
    batcher.submit(6)
    with pytest.raises(QueueFull, match="a cost of 6 is waiting, the limit is 10"):
        batcher.submit(5)
    last = batcher.submit(4)
    gate.open()
    assert last.result() == 8
    assert batcher.submit(9).result() == 18


def test_exception_of_one_item_fails_only_that_item() -> None:
    with ItemBatcher(lambda items: [ValueError(n) if n == 2 else n for n in items]) as batcher:
        futures = [batcher.submit(n) for n in range(4)]
        assert [type(future.exception()) for future in futures] == [type(None), type(None), ValueError, type(None)]
        assert batcher.stats().requests_failed == 1


def test_item_that_breaks_every_batch_fails_alone() -> None:
    calls = []

    def divide(items: list[int]) -> list[int]:
        calls.append(items)
        return [12 // item for item in items]

    with ItemBatcher(divide, max_batch_size=8) as batcher:
        futures = [batcher.submit(n) for n in (1, 2, 0, 3, 4)]
        with pytest.raises(ZeroDivisionError):
            futures[2].result()
        assert [future.result() for future in futures if future is not futures[2]] == [12, 6, 4, 3]
        assert batcher.stats().failed_steps == len([call for call in calls if 0 in call])
    assert [0] in calls


def test_passing_exception_costs_a_retry() -> None:
    faults = [OSError("once")]

    def sometimes(items: list[int]) -> list[int]:
        if faults:
            raise faults.pop()
        return doubled(items)

    with ItemBatcher(sometimes) as batcher:
        assert batcher.submit(1).result() == 2
        assert batcher.stats().failed_steps == 1


def test_on_error_fail_fails_the_whole_batch(running: Callable[[Any], Any]) -> None:
    calls = []

    def broken(items: list[int]) -> list[int]:
        calls.append(items)
        raise OSError("broken")

    gate = Gate(broken)
    batcher = running(ItemBatcher(gate, on_error="fail"))
    batcher.submit(0)
    gate.wait_for_call()
    futures = [batcher.submit(n) for n in (1, 2)]
    gate.open()
    for future in futures:
        with pytest.raises(OSError, match="broken"):
            future.result()
    assert calls == [[0], [1, 2]]


def test_memory_error_halves_the_batch() -> None:
    sizes = []

    def small_only(items: list[int]) -> list[int]:
        sizes.append(len(items))
        if len(items) > 4:
            raise MemoryError
        return doubled(items)

    with ItemBatcher(small_only, max_batch_size=16) as batcher:
        futures = [batcher.submit(n) for n in range(64)]
        assert [future.result() for future in futures] == doubled(list(range(64)))
    assert max(sizes[-5:]) <= 4


def test_wrong_number_of_results_is_an_error() -> None:
    with (
        ItemBatcher(lambda items: []) as batcher,
        pytest.raises(ValueError, match="returned 0 results for 1 requests"),
    ):
        batcher.submit(1).result()


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="batching_strategy is 'sometimes'; give one of continuous"):
        ItemBatcher(doubled, batching_strategy="sometimes")
    with pytest.raises(ValueError, match="max_batch_size is 0; give a whole number from 1 to 4096"):
        ItemBatcher(doubled, max_batch_size=0)
    with pytest.raises(TypeError, match="unknown option 'max_size'"):
        ItemBatcher(doubled, max_size=3)  # type: ignore[call-arg]
    with ItemBatcher(doubled) as batcher, pytest.raises(InvalidRequest, match="cost is 0"):
        batcher.submit(1, cost=0)


def test_cancelled_item_leaves_the_queue(running: Callable[[Any], Any]) -> None:
    gate, batcher = busy(running, max_batch_size=1)
    dropped, kept, named = batcher.submit(1), batcher.submit(2), batcher.submit(3, request_id="c")
    with pytest.raises(DuplicateRequest):
        batcher.submit(4, request_id="c")
    assert dropped.cancel()
    assert dropped.cancel()
    assert batcher.cancel("c")
    assert not batcher.cancel("c")
    with pytest.raises(CancelledError):
        dropped.result()
    gate.open()
    assert kept.result() == 4
    assert not kept.cancel()
    assert named.cancelled()
    assert gate.calls == [[0], [2]]
    assert set(as_completed([dropped, kept, named], PATIENCE_SECONDS)) == {dropped, kept, named}


def test_cancelled_task_cancels_its_item(running: Callable[[Any], Any]) -> None:
    gate, batcher = busy(running, max_batch_size=1)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batcher.submit(1), 0.01)

    asyncio.run(main())
    assert batcher.stats().requests_waiting == 0
    gate.open()


def test_deadline_in_the_queue_passes_while_a_step_runs(running: Callable[[Any], Any]) -> None:
    gate, batcher = busy(running, max_batch_size=1)
    with pytest.raises(DeadlineExceeded, match="in the queue"):
        batcher.submit(1, timeout_seconds=0.01).result(PATIENCE_SECONDS)
    gate.open()


def test_stop_finishes_what_waits_and_rejects_what_comes(running: Callable[[Any], Any]) -> None:
    gate = Gate(doubled)
    batcher = running(ItemBatcher(gate, max_batch_size=2, batching_strategy="fixed_size"))
    futures = [batcher.submit(n) for n in range(3)]
    gate.open()
    assert batcher.stop()
    assert [future.result(0) for future in futures] == [0, 2, 4]
    with pytest.raises(ServerDraining, match="the batcher is stopped"):
        batcher.submit(1)


def test_stop_without_drain_fails_the_rest(running: Callable[[Any], Any]) -> None:
    gate = Gate(doubled)
    batcher = running(ItemBatcher(gate, max_batch_size=1))
    futures = [batcher.submit(n) for n in range(3)]
    gate.wait_for_call()
    threading.Timer(0.05, gate.open).start()
    assert not batcher.stop(drain=False)
    for future in futures:
        with pytest.raises(ShutdownInterrupted):
            future.result(0)


def test_stop_inside_the_step_function_is_an_error() -> None:
    def stops(items: list[int]) -> list[int]:
        batcher.stop()
        return items

    with ItemBatcher(stops, on_error="fail") as batcher, pytest.raises(RuntimeError, match="would wait for itself"):
        batcher.submit(1).result()


def test_end_of_the_step_thread_fails_every_request() -> None:
    def exits(items: list[int]) -> list[int]:
        raise SystemExit(3)

    with ItemBatcher(exits) as batcher:
        with pytest.raises(SystemExit):
            batcher.submit(1).result(PATIENCE_SECONDS)
        with pytest.raises(RuntimeError, match="ended with an exception"):
            batcher.submit(2)


def test_idle_batcher_uses_no_processor_time(running: Callable[[Any], Any]) -> None:
    batcher = running(ItemBatcher(doubled))
    assert batcher.submit(1, timeout_seconds=3600).result() == 2
    before = time.process_time()
    threading.Event().wait(1.0)
    assert time.process_time() - before < 0.05


def test_many_threads_submit(running: Callable[[Any], Any]) -> None:
    batcher = running(ItemBatcher(doubled, max_batch_size=16))

    def ask(first: int) -> list[int]:
        return [batcher.submit(first + n).result() for n in range(100)]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(ask, range(0, 8000, 1000)))
    assert found == [[2 * (first + n) for n in range(100)] for first in range(0, 8000, 1000)]
    stats = batcher.stats()
    assert (stats.requests_submitted, stats.requests_finished, stats.rows) == (800, 800, 800)
