"""The state for observers has the figures of the core: an example that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.harness import CoreHarness

from lineclear.scheduler.observe.scheduler_state import MAX_WAITING, take_state
from lineclear.v1 import steps_pb2 as pb


def state_of(harness: CoreHarness) -> pb.SchedulerState:
    return take_state(harness.core.state, {harness.epoch: 3}, harness.now, 2).message


def test_figures_are_those_of_the_core() -> None:
    """Eight blocks: request 3 is preempted, and waits before request 4, which has never run."""
    harness = CoreHarness(max_batch_size=2, worker_num_blocks=8)
    harness.submit("earlier", range(8), max_tokens=2)
    harness.run()
    harness.submit("cached", range(8), max_tokens=20)
    harness.now = 1.5
    for name in ("preempted", "new"):
        harness.submit(name, 9, max_tokens=20)
    harness.now = 2.0
    while not harness.counters.preemptions:
        harness.step()
    for _ in range(3):
        harness.step()
    plan = harness.core.plan(harness.epoch, harness.now)  # harness.plan checks the core, which syncs the positions
    assert plan is not None
    harness.flights.append(plan)
    waits: dict[str, Any] = {"prompt_tokens": 9, "max_tokens": 20, "waited": {"nanos": 500_000_000}}
    worker = pb.WatchedWorker(worker=3, epoch=1, device="toy", num_slots=2, num_running=1, steps_in_flight=1, steps=16)
    worker.MergeFrom(pb.WatchedWorker(num_blocks=8, block_size=4, blocks_used=6, blocks_cached=2))
    assert state_of(harness) == pb.SchedulerState(
        taken_at={"seconds": 2},
        num_waiting=2,
        num_tokens_waiting=9 + 8 + 9,  # two prompts, and the output before the preemption
        waiting=[{"request": 3, "is_resuming": True, **waits}, {"request": 4, **waits}],
        running=[{"request": 2, "worker": 3, "prompt_tokens": 8, "max_tokens": 20, "position": 21, "cached_tokens": 7}],
        workers=[worker],
        generation_tokens=23,
        prefix_cache_queries=8 + 8 + 9,
        prefix_cache_hits=7,
        preemptions=1,
        num_workers_wanted=2,
    )
    while [running.request for running in state_of(harness).running] != [3]:
        harness.step()
    assert [running.preemptions for running in state_of(harness).running] == [1]


def test_states_of_a_worker_are_those_of_its_pool() -> None:
    harness = CoreHarness(worker_num_state_snapshots=3)
    for name in ("first", "again"):
        harness.submit(name, range(9), max_tokens=2)
        harness.run()
    (worker,) = state_of(harness).workers
    assert (worker.num_state_snapshots, worker.state_snapshots_used, worker.state_snapshot_hits) == (3, 1, 1)


def test_memory_of_a_worker_is_that_of_its_hello() -> None:
    harness = CoreHarness()
    figures = {"load_seconds": 2.5, "weight_bytes": 7, "kv_cache_bytes": 8, "step_memory_bytes": 9}
    worker = harness.core.state.workers[harness.epoch]
    worker.hello = replace(worker.hello, **figures)  # type: ignore[arg-type]
    (found,) = state_of(harness).workers
    assert {name: getattr(found, name) for name in figures} == figures


def test_waiting_requests_are_limited() -> None:
    """Also where some of them have run before."""
    harness = CoreHarness()
    harness.submit("started", 4, max_tokens=20)
    harness.step()
    for number in range(MAX_WAITING + 9):
        harness.submit(str(number), 4)
    harness.lose()
    state = state_of(harness)
    assert [waiting.request for waiting in state.waiting] == [*range(1, MAX_WAITING + 1)]
    assert state.num_waiting == MAX_WAITING + 10
