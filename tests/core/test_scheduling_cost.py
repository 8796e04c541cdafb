"""How much work the scheduler does, counted and not timed: the same for 100 requests in the queue and for 100,000."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core.harness import Rig, make_request
from support.work import count_calls

from lineclear.scheduler.core import invariants
from lineclear.wire.messages import Logprobs

LARGE = 100_000


def crowd(count: int, **sizes: object) -> Rig:
    """A scheduler with two running requests and `count` waiting."""
    rig = Rig(max_queue_size=2 * LARGE, max_queue_tokens=10**9, max_batch_size=2, worker_max_model_len=2000, **sizes)
    for name in ("old", "older"):
        rig.core.submit(make_request(name, 4, max_tokens=100), 0.0)
    rig.core.apply(rig.runner.launch(rig.core.plan(0.0)).result(), 0.0)  # type: ignore[arg-type]
    for number in range(count):
        deadline = 1e6 + number if number % 2 else None
        rig.core.submit(make_request(f"r{number}", (number % 97,), max_tokens=2, deadline=deadline), 0.0)
    return rig


@pytest.fixture(scope="module")
def small() -> Rig:
    return crowd(100)


@pytest.fixture(scope="module")
def large() -> Rig:
    return crowd(LARGE)


def test_a_step_costs_the_same_whatever_waits(small: Rig, large: Rig) -> None:
    few, many = (count_calls(lambda rig=rig: [_step(rig) for _ in range(5)]) for rig in (small, large))
    assert many <= few + 20


@pytest.mark.parametrize("order", ["priority", "deadline"])
def test_it_does_in_other_orders_too(order: str) -> None:
    few, many = (count_calls(lambda rig=rig: _step(rig)) for rig in (crowd(100, order=order), crowd(5000, order=order)))
    assert many <= few + 20


def test_submit_cancel_and_timers_cost_the_same_whatever_waits(small: Rig, large: Rig) -> None:
    costs = []
    for rig in (small, large):
        request = make_request("new", 4)
        submit = count_calls(lambda rig=rig, request=request: rig.core.submit(request, 0.0))
        cancel = count_calls(lambda rig=rig: rig.core.cancel("new", None, 0.0))
        timers = count_calls(rig.core.next_deadline) + count_calls(lambda rig=rig: rig.core.expire(0.0))
        costs.append((submit, cancel, timers))
    assert costs[0] == costs[1]
    assert max(costs[0]) < 60


def test_a_step_that_admits_costs_the_same_whatever_waits(small: Rig, large: Rig) -> None:
    costs = []
    for rig in (small, large):
        rig.core.cancel("old", None, 0.0)
        costs.append(count_calls(lambda rig=rig: _step(rig)))
    assert costs[1] <= costs[0] + 20


def test_cancelling_all_costs_a_constant_for_each() -> None:
    count = 5000
    rig = crowd(count)
    total = count_calls(lambda: [rig.core.cancel(f"r{number}", None, 0.0) for number in reversed(range(count))])
    assert total < 60 * count
    invariants.check(rig.core)
    assert len(rig.core._fresh._heap) < 200
    assert len(rig.core._deadlines) < 200


@pytest.mark.parametrize("logprobs", [False, True])
def test_who_just_goes_on_costs_no_call(logprobs: bool) -> None:
    # Copies of columns grow with who runs; work of the interpreter only with what changes.
    costs = []
    for count in (8, 512):
        worker = {"worker_num_slots": count, "worker_num_blocks": 4096, "worker_block_size": 64}
        rig = Rig(max_batch_size=count, target_batch_tokens=8 * count, **worker)
        for number in range(count):
            rig.core.submit(make_request(f"r{number}", 5, max_tokens=200), 0.0)
        for _ in range(3):
            _step(rig)
        plan = rig.core.plan(0.0)
        assert plan is not None
        assert plan.num_rows == count
        result = rig.runner.launch(plan).result()
        if logprobs:
            result = replace(result, logprobs=(Logprobs(-1.0),) * count)
        applying = count_calls(lambda rig=rig, result=result: rig.core.apply(result, 0.0))
        planning = count_calls(lambda rig=rig: rig.core.plan(0.0))
        costs.append((planning, applying))
    (plan_few, apply_few), (plan_many, apply_many) = costs
    assert plan_many <= plan_few + 20
    assert apply_many <= apply_few + 520  # one append a token


def test_what_does_not_fit_is_looked_at_a_bounded_number_of_times() -> None:
    costs = []
    for count in (20, 2000):
        rig = Rig(max_queue_size=LARGE, worker_num_blocks=16, max_batch_size=8)
        rig.core.submit(make_request("old", 40, max_tokens=20), 0.0)
        rig.core.apply(rig.runner.launch(rig.core.plan(0.0)).result(), 0.0)  # type: ignore[arg-type]
        for number in range(count):
            rig.core.submit(make_request(f"r{number}", 40), 0.0)
        costs.append(count_calls(lambda rig=rig: _step(rig)))
    assert costs[1] <= 1.5 * costs[0]


def test_nothing_grows_with_history() -> None:
    rig = Rig()
    sizes = []
    for turn in range(600):
        rig.submit(f"r{turn}", 3 + turn % 7, max_tokens=3, deadline=1e9)
        rig.run()
        rig.events.clear()
        rig.plans.clear()
        core = rig.core
        containers = (
            core._live,
            core._deadlines,
            core._inflight,
            core._events,
            core._fresh._heap,
            core._resuming._heap,
        )
        sizes.append(sum(map(len, containers)))
    assert max(sizes[300:]) <= max(sizes[:300]) <= 300


def _step(rig: Rig) -> None:
    plan = rig.core.plan(0.0)
    assert plan is not None
    rig.core.apply(rig.runner.launch(plan).result(), 0.0)
