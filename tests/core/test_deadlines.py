"""A request that expires or is cancelled costs only the rows already in flight."""

from __future__ import annotations

import pytest
from core.harness import CoreHarness

from lineclear.scheduler.core.events import Started


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
