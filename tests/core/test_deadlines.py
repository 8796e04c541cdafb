"""Who is gone, by deadline or by hanging up, costs no more than what was on its way to the worker already."""

from __future__ import annotations

import pytest
from core.harness import Rig

from lineclear.scheduler.core.events import Started


@pytest.mark.parametrize("how", ["deadline", "cancel"])
@pytest.mark.parametrize("phase", ["queue", "prompt", "decode"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_who_is_gone_costs_no_more_than_the_steps_in_flight(depth: int, phase: str, how: str) -> None:
    budget = 8
    rig = Rig(pipeline_depth=depth, target_batch_tokens=budget, max_batch_size=1 if phase == "queue" else 8)
    rig.submit("stays", 4, max_tokens=40)
    rig.submit("goes", 120 if phase == "prompt" else 4, max_tokens=40, deadline=1.0)
    for _ in range(4):
        while rig.plan() is not None:
            pass
        rig.apply()
    while rig.plan() is not None:
        pass
    assert len(rig.flights) == depth
    slots = {e.slot for e in rig.events if isinstance(e, Started) and e.request_id == "goes"}
    assert len(slots) == (phase != "queue")
    on_the_way = [row for plan in rig.flights for row in rig.rows(plan) if row[0] in slots]
    assert len(on_the_way) == (0 if phase == "queue" else depth)
    assert sum(end - start for _, start, end in on_the_way) <= depth * budget
    sent = len(rig.plans)
    if how == "cancel":
        rig.cancel("goes")
    else:
        rig.now = 1.0
        rig.saw(rig.core.expire(rig.now))
    assert rig.core.num_live == 1
    rig.run()
    assert len(rig.plans) > sent
    assert not [row for plan in rig.plans[sent:] for row in rig.rows(plan) if row[0] in slots]
    assert rig.counters.wasted_samples == (depth if phase == "decode" else 0)
    assert rig.core.snapshot().blocks_used == 0
