"""Several workers: placement, failover, isolation, stopping."""

from __future__ import annotations

import pytest
from core.harness import answer
from core.workers_harness import WorkersHarness

from lineclear.errors import KvCapacityExceeded, PoisonRequest, PromptTooLong
from lineclear.scheduler.core.events import Failed, Finished, TokensReady
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.policies import STRATEGIES, PolicySettings

SHARED = list(range(1, 41))  # ten full blocks


def test_requests_are_spread_over_the_workers() -> None:
    harness = WorkersHarness(3)
    for index in range(12):
        harness.submit(f"r{index}", 8)
    harness.round()
    assert harness.running() == [4, 4, 4]


def test_every_answer_is_that_of_the_request_alone() -> None:
    harness = WorkersHarness(3, pipeline_depth=2)
    requests = [harness.submit(f"r{index}", 3 + 5 * index, max_tokens=9) for index in range(20)]
    harness.run()
    for request in requests:
        assert harness.outputs(request.request_id) == answer(request)


def test_request_follows_its_cached_prefix() -> None:
    harness = WorkersHarness(2)
    harness.submit("first", [*SHARED, 90])
    harness.submit("other", 41)
    harness.run()
    assert harness.started_on() == {"first": 1, "other": 2}
    harness.submit("again", [*SHARED, 91])
    harness.submit("other again", [*SHARED, 92])
    harness.run()
    assert harness.started_on()["again"] == harness.started_on()["other again"] == 1
    end = harness.finished("again")
    assert end.stats.cached_tokens == 40


def test_cached_prefix_gives_way_to_a_longer_queue_of_work() -> None:
    harness = WorkersHarness(2, target_batch_tokens=16)
    harness.submit("first", [*SHARED, 90])
    harness.run()
    harness.submit("long", 120)
    harness.plan(1)  # 16 of 120 tokens
    harness.submit("again", [*SHARED, 91])
    assert harness.plan(2) is not None
    assert harness.started_on()["again"] == 2, "104 tokens are queued on the other worker, and the hit saves 40"


def test_request_is_left_to_a_busy_worker_no_longer_than_that_saves() -> None:
    harness = WorkersHarness(2)
    for worker in (1, 2):  # fit both step-time models: 0.01 seconds a token
        harness.submit(f"fit {worker}", 6 + worker, max_tokens=2)
        harness.plan(worker)
        harness.apply(worker)
        for index in range(9):
            harness.submit(f"fit {worker} {index}", 3 + 2 * index, max_tokens=1)
            harness.step(worker)
            harness.now += 1.0
    harness.run()
    harness.submit("first", [*SHARED, 90])
    harness.plan(1)
    harness.apply(1)
    harness.plan(1)  # a decode, in flight
    harness.submit("again", [*SHARED, 91])
    assert harness.plan(2) is None, "the first worker has 40 tokens of it"
    wakeup = harness.core.next_deadline()
    assert wakeup is not None
    assert 0.3 < wakeup - harness.now < 0.42, "40 tokens at 0.01 seconds, less the work queued there"
    harness.now = wakeup
    assert harness.plan(2) is not None, "the first worker hangs, so the request starts here"


def test_worker_that_gets_no_plans_has_no_wakeup() -> None:
    harness = WorkersHarness(1, policy=PolicySettings(min_batch_size=2, batch_timeout_seconds=0.05))
    harness.join(num_slots=1)
    harness.submit("runs", 8)
    assert harness.plan(1) is None
    assert harness.plan(2) is not None, "one request fills its slot"
    harness.submit("waits", 8)
    assert harness.core.next_deadline() == 0.05, "the first worker starts a smaller batch then"
    harness.now = 0.06  # but its connection is closed
    assert harness.core.next_deadline({2}) is None


def test_streams_of_a_dead_worker_continue_at_the_next_plan_of_another() -> None:
    harness = WorkersHarness(2)
    requests = [harness.submit(f"r{index}", 8, max_tokens=20) for index in range(6)]
    for _ in range(3):
        harness.round()
    assert harness.running() == [3, 3]
    harness.lose(1)
    before = len(harness.events)
    harness.step(2)
    tokens = {event.request_id for event in harness.events[before:] if isinstance(event, TokensReady)}
    assert tokens == {request.request_id for request in requests}, "each of the six has a token of this step"
    harness.run()
    for request in requests:
        assert harness.outputs(request.request_id) == answer(request)
    recoveries = [end.stats.recoveries for end in map(harness.end, (r.request_id for r in requests))]
    assert sorted(recoveries) == [0, 0, 0, 1, 1, 1]


def test_poison_request_ends_and_no_request_of_another_worker_pauses() -> None:
    harness = WorkersHarness(3)
    poison = harness.submit("poison", 8, max_tokens=30)
    healthy = [harness.submit(f"h{index}", 8, max_tokens=60) for index in range(2)]
    harness.round()
    crashes = 0
    while poison.request_id not in {e.request_id for e in harness.events if isinstance(e, Failed)}:
        for epoch in harness.core.workers:
            running_before = {s.request.request_id for s in harness.core.state.workers[epoch].batch.running}
            harness.plan(epoch)
            in_plan = {
                s.request.request_id for step in harness.core.state.workers[epoch].inflight for s in step.sequences()
            }
            if "poison" in in_plan:
                crashes += 1
                harness.lose(epoch)
                harness.join()
            elif harness.flights[epoch]:
                assert running_before <= in_plan, "a running request has no row"
                harness.apply(epoch)
    assert crashes <= 3
    assert isinstance(harness.error("poison"), PoisonRequest)
    harness.run()
    for request in healthy:
        assert harness.outputs(request.request_id) == answer(request)


def test_suspects_run_alone_on_the_worker_that_is_free_first() -> None:
    harness = WorkersHarness(4, max_queue_overtakes=0)
    on = (("a", 1, 30), ("b", 1, 30), ("short", 3, 6), ("long", 4, 40), ("longer", 4, 50))
    for name, epoch, max_tokens in on:
        harness.submit(name, 8, max_tokens=max_tokens)
        harness.step(epoch)
    for epoch in (1, 2):
        assert rows(harness, epoch, plan=True) == {"a", "b"}
        harness.lose(epoch)
    while "short" in rows(harness, 3, plan=True):
        assert rows(harness, 4, plan=True) == {"long", "longer"}
        harness.apply(3)
        harness.apply(4)
    assert isinstance(harness.end("short"), Finished)
    assert rows(harness, 3) == {"a"}, "the worker with the fewest requests has ended them"
    assert rows(harness, 4, plan=True) == {"long", "longer"}, "the others go on"
    harness.apply(3)
    harness.apply(4)
    harness.run()


def rows(harness: WorkersHarness, epoch: int, *, plan: bool = False) -> set[str]:
    """Return the requests with a row in flight on a worker, after another plan if asked for."""
    if plan:
        harness.plan(epoch)
    return set(harness.core.expected_samples(epoch))


def test_crash_makes_suspects_of_the_requests_in_flight_there_only() -> None:
    harness = WorkersHarness(2)
    for index in range(4):
        harness.submit(f"r{index}", 8, max_tokens=20)
    harness.round()
    harness.plan(1)
    harness.plan(2)
    on_first = {name for name, epoch in harness.started_on().items() if epoch == 1}
    harness.lose(1)
    assert {s.request.request_id for s in harness.core.state.poison} == on_first


def test_stopping_worker_finishes_its_requests_and_takes_no_others() -> None:
    harness = WorkersHarness(2)
    harness.submit("a", 8, max_tokens=10)
    harness.submit("b", 8, max_tokens=10)
    harness.round()
    assert harness.running() == [1, 1]
    harness.core.stop_placing(1)
    for index in range(4):
        harness.submit(f"later {index}", 8, max_tokens=10)
    harness.round()
    assert harness.running() == [1, 5]
    harness.run()
    assert set(harness.started_on().values()) == {1, 2}
    assert [name for name, epoch in harness.started_on().items() if epoch == 1] == ["a"]


def test_the_last_stopping_workers_run_what_is_left() -> None:
    harness = WorkersHarness(2)
    harness.core.stop_placing(1)
    harness.core.stop_placing(2)
    request = harness.submit("a", 8)
    harness.run()
    assert harness.outputs("a") == answer(request)


def test_request_is_placed_only_where_it_fits() -> None:
    harness = WorkersHarness(1)
    harness.join(num_blocks=4)
    for index in range(4):
        harness.submit(f"large {index}", 30)
        harness.submit(f"small {index}", 6)
    harness.run()
    assert {epoch for name, epoch in harness.started_on().items() if name.startswith("large")} == {1}
    assert 2 in set(harness.started_on().values())


def test_request_fails_only_if_no_joined_worker_can_run_it() -> None:
    harness = WorkersHarness(0)
    harness.join(num_blocks=4)
    with pytest.raises(KvCapacityExceeded):
        harness.submit("large", 30)
    large = harness.join()
    harness.submit("large", 30)
    with pytest.raises(PromptTooLong):
        harness.submit("huge", 300)
    harness.lose(large)
    harness.round()
    assert harness.core.num_live == 1, "the large worker may come back"
    harness.join(num_blocks=5)
    assert isinstance(harness.error("large"), KvCapacityExceeded)


def test_request_too_large_for_a_worker_does_not_stop_it() -> None:
    harness = WorkersHarness(1, max_queue_overtakes=1)
    small = harness.join(num_blocks=4)
    for index in range(3):
        harness.submit(f"running {index}", 60, max_tokens=20)
    harness.plan(1)
    harness.submit("large", 120)
    for index in range(12):
        harness.submit(f"small {index}", 6)
    for _ in range(60):
        harness.step(small)
        harness.now += 1.0
    assert sum(epoch == small for epoch in harness.started_on().values()) == 12


def test_workers_of_different_block_sizes_share_requests() -> None:
    harness = WorkersHarness(1)
    harness.join(block_size=3, num_blocks=40)
    requests = [harness.submit(f"r{index}", [*SHARED, index], max_tokens=12) for index in range(8)]
    for _ in range(4):
        harness.round()
    harness.lose(1, WorkerLoss.CLEAN)
    harness.run()
    for request in requests:
        assert harness.outputs(request.request_id) == answer(request)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_runs_on_several_workers(strategy: str) -> None:
    harness = WorkersHarness(2, batching_strategy=strategy, max_batch_size=4)
    requests = [harness.submit(f"r{index}", 8, max_tokens=6) for index in range(16)]
    harness.run()
    for request in requests:
        assert harness.outputs(request.request_id) == answer(request)
    assert set(harness.started_on().values()) == {1, 2}


def test_fixed_batch_counts_requests_that_fit_into_the_worker() -> None:
    harness = WorkersHarness(1, batching_strategy="fixed_size", max_batch_size=3)
    for index in range(6):
        harness.submit(f"long{index}", 8, max_tokens=12)
    small = harness.join(max_model_len=16)
    harness.round()
    assert harness.running() == [3, 0], "three long requests wait for the first worker"
    for index in range(3):
        assert harness.plan(small) is None
        harness.submit(f"short{index}", 4, max_tokens=4)
    harness.round()
    assert harness.running() == [3, 3]


def test_fixed_size_fills_a_batch_on_each_worker() -> None:
    harness = WorkersHarness(2, batching_strategy="fixed_size", max_batch_size=4)
    for index in range(7):
        harness.submit(f"r{index}", 8, max_tokens=6)
    harness.round()
    assert harness.running() == [4, 0], "the second batch lacks a request"
    harness.submit("r7", 8, max_tokens=6)
    harness.round()
    assert harness.running() == [4, 4]
