"""Several workers: placement, failover, stopping."""

from __future__ import annotations

import pytest
from core.harness import answer
from core.workers_harness import WorkersHarness
from support.events import TokensReady

from lineclear.errors import KvCapacityExceeded, PromptTooLong

SHARED = list(range(1, 41))  # ten full blocks


def test_requests_are_spread_over_the_workers() -> None:
    harness = WorkersHarness(3)
    for index in range(12):
        harness.submit(f"r{index}", 8)
    harness.round()
    assert harness.running() == [4, 4, 4]


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
