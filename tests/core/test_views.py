"""The copies of the core that observers read, and its check of itself."""

from __future__ import annotations

import pytest
from core.harness import CoreHarness

from lineclear.scheduler.core import invariants
from lineclear.scheduler.observe.scheduler_state import take_state


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_position_of_a_running_request_is_the_end_of_its_last_row(pipeline_depth: int) -> None:
    h = CoreHarness(target_batch_tokens=8, pipeline_depth=pipeline_depth)
    h.submit("a", 20, max_tokens=12)
    h.submit("b", 5, max_tokens=12)
    for _ in range(10):
        plan = h.plan()
        ends = {slot: end for slot, _, end in h.rows(plan)}
        message = take_state(h.core.state, dict.fromkeys(h.core.workers, 0), 0.0, 1).message
        seen = {running.slot: running.position for running in message.running}
        assert ends.items() <= seen.items()
        if len(h.flights) == pipeline_depth:
            h.apply()


def test_step_time_is_that_of_the_oldest_worker_and_zero_without_one() -> None:
    h = CoreHarness()
    h.seconds_per_step, h.seconds_per_token = 0.01, 0.001
    for length in (5, 9, 17, 3, 30, 12):
        h.submit(f"r{length}", length, max_tokens=8)
        h.run()
    base, per_token, _ = h.core.snapshot().step_time
    assert (base, per_token) == pytest.approx((0.01, 0.001), rel=0.1)
    h.lose()
    assert h.core.snapshot().step_time == (0.0, 0.0, 0.0)


def test_prompts_of_waiting_requests_are_checked_on_demand() -> None:
    """An engine leaves them out, because their number and length are those of the queue."""
    h = CoreHarness(max_batch_size=1)
    for name in ("running", "waiting"):
        h.submit(name, 5, max_tokens=20)
    h.step()
    (waiting,) = h.core.state.fresh.sequences()
    waiting.tokens[0] += 1
    invariants.check(h.core, with_waiting_prompts=False)
    with pytest.raises(AssertionError, match="a prompt has changed"):
        invariants.check(h.core)
