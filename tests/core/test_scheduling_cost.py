"""The scheduler's work as counted calls: the same with 100 and with 10,000 waiting requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core.harness import CoreHarness, make_request
from support.work import count_calls

from lineclear.scheduler.core import invariants
from lineclear.wire.messages import Logprobs

LARGE = 10_000


def loaded_harness(count: int, **sizes: object) -> CoreHarness:
    """Return a harness with two running and `count` waiting requests."""
    harness = CoreHarness(
        max_queue_size=2 * LARGE, max_queue_tokens=10**9, max_batch_size=2, worker_max_model_len=2000, **sizes
    )
    for name in ("old", "older"):
        harness.core.submit(make_request(name, 4, max_tokens=100), 0.0)
    harness.core.apply(harness.runner.launch(harness.core.plan(harness.epoch, 0.0)).result(), 0.0)  # type: ignore[arg-type]
    for number in range(count):
        deadline = 1e6 + number if number % 2 else None
        harness.core.submit(make_request(f"r{number}", (number % 97,), max_tokens=2, deadline=deadline), 0.0)
    return harness


@pytest.fixture(scope="module")
def small() -> CoreHarness:
    return loaded_harness(100)


@pytest.fixture(scope="module")
def large() -> CoreHarness:
    return loaded_harness(LARGE)


def test_step_cost_is_independent_of_queue_length(small: CoreHarness, large: CoreHarness) -> None:
    few, many = (count_calls(lambda harness=harness: [_step(harness) for _ in range(5)]) for harness in (small, large))
    assert many <= few + 20


@pytest.mark.parametrize("order", ["priority", "deadline"])
def test_step_cost_in_other_orders(order: str) -> None:
    few, many = (
        count_calls(lambda harness=harness: _step(harness))
        for harness in (loaded_harness(100, scheduling_policy=order), loaded_harness(5000, scheduling_policy=order))
    )
    assert many <= few + 20


def test_call_costs_are_independent_of_queue_length(small: CoreHarness, large: CoreHarness) -> None:
    costs = []
    for harness in (small, large):
        request = make_request("new", 4)
        submit = count_calls(lambda harness=harness, request=request: harness.core.submit(request, 0.0))
        cancel = count_calls(lambda harness=harness: harness.core.cancel("new", None, 0.0))
        timers = count_calls(harness.core.next_deadline) + count_calls(lambda harness=harness: harness.core.expire(0.0))
        costs.append((submit, cancel, timers))
    assert costs[0] == costs[1]
    assert max(costs[0]) < 60


def test_admission_cost_is_independent_of_queue_length(small: CoreHarness, large: CoreHarness) -> None:
    costs = []
    for harness in (small, large):
        harness.core.cancel("old", None, 0.0)
        costs.append(count_calls(lambda harness=harness: _step(harness)))
    assert costs[1] <= costs[0] + 20


def test_cancel_cost_is_constant() -> None:
    count = 5000
    harness = loaded_harness(count)
    total = count_calls(lambda: [harness.core.cancel(f"r{number}", None, 0.0) for number in reversed(range(count))])
    assert total < 60 * count
    invariants.check(harness.core)  # bounds the heap of deadlines


@pytest.mark.parametrize("logprobs", [False, True])
def test_steady_decode_costs_no_call_per_sequence(logprobs: bool) -> None:
    # Copies of columns grow with the batch; interpreted calls only with changes.
    costs = []
    for count in (8, 512):
        worker = {"worker_num_slots": count, "worker_num_blocks": 4096, "worker_block_size": 64}
        harness = CoreHarness(max_batch_size=count, target_batch_tokens=8 * count, **worker)
        for number in range(count):
            harness.core.submit(make_request(f"r{number}", 5, max_tokens=200), 0.0)
        for _ in range(3):
            _step(harness)
        plan = harness.core.plan(harness.epoch, 0.0)
        assert plan is not None
        assert plan.num_rows == count
        result = harness.runner.launch(plan).result()
        if logprobs:
            result = replace(result, logprobs=(Logprobs(-1.0),) * count)
        applying = count_calls(lambda harness=harness, result=result: harness.core.apply(result, 0.0))
        planning = count_calls(lambda harness=harness: harness.core.plan(harness.epoch, 0.0))
        costs.append((planning, applying))
    (plan_few, apply_few), (plan_many, apply_many) = costs
    assert plan_many <= plan_few + 20
    assert apply_many <= apply_few + 520  # one append a token


def test_admission_skips_a_bounded_number_of_requests() -> None:
    costs = []
    for count in (20, 2000):
        harness = CoreHarness(max_queue_size=LARGE, worker_num_blocks=16, max_batch_size=8)
        harness.core.submit(make_request("old", 40, max_tokens=20), 0.0)
        harness.core.apply(harness.runner.launch(harness.core.plan(harness.epoch, 0.0)).result(), 0.0)  # type: ignore[arg-type]
        for number in range(count):
            harness.core.submit(make_request(f"r{number}", 40), 0.0)
        costs.append(count_calls(lambda harness=harness: _step(harness)))
    assert costs[1] <= 1.5 * costs[0]


def test_containers_do_not_grow_with_history() -> None:
    harness = CoreHarness()
    core = harness.core
    for index in range(600):
        harness.submit(f"r{index}", 3 + index % 7, max_tokens=3, deadline=1e9)
        harness.run()
        inflight = core.state.workers[harness.epoch].inflight
        assert not any((core.num_live, core.drain_events(), inflight, len(core.state.fresh), len(core.state.resuming)))
        invariants.check(core)  # bounds the heap of deadlines


def _step(harness: CoreHarness) -> None:
    plan = harness.core.plan(harness.epoch, 0.0)
    assert plan is not None
    harness.core.apply(harness.runner.launch(plan).result(), 0.0)
