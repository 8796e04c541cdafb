"""Ends of requests: what they release, and what an out-of-memory step costs its requests and the token budget."""

from __future__ import annotations

import pytest
from core.harness import CoreHarness

from lineclear.errors import DeviceOutOfMemory
from lineclear.scheduler.core.events import Failed, Started
from lineclear.wire.messages import StepError, StepErrorKind

OUT_OF_MEMORY = StepErrorKind.OUT_OF_MEMORY


def test_out_of_memory_halves_and_restores_the_budget() -> None:
    harness = CoreHarness(
        target_batch_tokens=16, worker_num_blocks=300, worker_max_model_len=1200, target_inter_token_latency_seconds=0.0
    )
    harness.submit("old", 2, max_tokens=1000)
    for budget in (16, 8, 4):
        for _ in range(40):
            harness.step()  # all pass their clear_position: no suspects are left
        harness.submit(f"long{budget}", 40, max_tokens=1)
        harness.step()
        plan = harness.plan()
        assert plan is not None
        assert sum(row.num_tokens for row in plan.rows) == budget
        assert harness.core.on_step_error(StepError(harness.epoch, plan.step, OUT_OF_MEMORY), harness.now) == []
        harness.lose()
        harness.join()
    budgets = []
    for number in range(450):
        if number % 40 == 0:
            harness.submit(f"more{number}", 100, max_tokens=1)
        plan = harness.step()
        assert plan is not None
        budgets.append(sum(row.num_tokens for row in plan.rows))
    assert max(budgets[:200]) == 2
    assert max(budgets[200:400]) == 4
    assert max(budgets[400:]) == 8


def test_out_of_memory_alone_fails_the_request() -> None:
    harness = CoreHarness()
    harness.submit("huge", 30)
    plan = harness.plan()
    assert plan is not None
    (end,) = harness.core.on_step_error(StepError(harness.epoch, plan.step, OUT_OF_MEMORY), harness.now)
    assert isinstance(end, Failed)
    assert isinstance(end.error, DeviceOutOfMemory)


def test_cancel_in_flight_releases_slot_and_blocks() -> None:
    harness = CoreHarness(pipeline_depth=2)
    harness.submit("a", 5, max_tokens=9)
    harness.plan()
    harness.cancel("a")
    assert harness.core.snapshot().blocks_used == 0
    assert harness.core.plan(harness.epoch, 0.0) is None
    harness.apply()
    assert harness.outputs("a") == []


@pytest.mark.parametrize("how", ["deadline", "cancel"])
@pytest.mark.parametrize("phase", ["queue", "prompt", "decode"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_ended_request_costs_only_steps_in_flight(depth: int, phase: str, how: str) -> None:
    budget = 8
    harness = CoreHarness(pipeline_depth=depth, target_batch_tokens=budget, max_batch_size=1 if phase == "queue" else 8)
    harness.submit("stays", 4, max_tokens=40)
    harness.submit("goes", 120 if phase == "prompt" else 4, max_tokens=40, deadline=1.0)
    for _ in range(4):
        while harness.plan() is not None:
            pass
        harness.apply()
    while harness.plan() is not None:
        pass
    assert len(harness.flights) == depth
    slots = {e.slot for e in harness.events if isinstance(e, Started) and e.request_id == "goes"}
    assert len(slots) == (phase != "queue")
    on_the_way = [row for plan in harness.flights for row in harness.rows(plan) if row[0] in slots]
    assert len(on_the_way) == (0 if phase == "queue" else depth)
    assert sum(end - start for _, start, end in on_the_way) <= depth * budget
    sent = len(harness.plans)
    if how == "cancel":
        harness.cancel("goes")
    else:
        harness.now = 1.0
        harness.record(harness.core.expire(harness.now))
    assert harness.core.num_live == 1
    harness.run()
    assert len(harness.plans) > sent
    assert not [row for plan in harness.plans[sent:] for row in harness.rows(plan) if row[0] in slots]
    assert harness.counters.wasted_samples == (depth if phase == "decode" else 0)
    assert harness.core.snapshot().blocks_used == 0
