"""The copies of the core's state that observers read."""

from __future__ import annotations

import pytest
from core.harness import CoreHarness


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_position_of_a_running_request_is_the_end_of_its_last_row(pipeline_depth: int) -> None:
    h = CoreHarness(target_batch_tokens=8, pipeline_depth=pipeline_depth)
    h.submit("a", 20, max_tokens=12)
    h.submit("b", 5, max_tokens=12)
    for _ in range(10):
        plan = h.plan()
        ends = {slot: end for slot, _, end in h.rows(plan)}
        seen = {running.slot: running.position for running in h.core.view().workers[0].running}
        assert ends.items() <= seen.items()
        if len(h.flights) == pipeline_depth:
            h.apply()
