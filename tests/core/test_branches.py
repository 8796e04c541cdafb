"""Several requests of one admission: outputs of a request, and the steps of a beam search. One slot by default."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core.harness import CoreHarness, answer

from lineclear.errors import NoTokenAllowed
from lineclear.scheduler.core.events import Failed, Finished


@pytest.mark.parametrize("is_switched", [False, True])
@pytest.mark.parametrize("policy", ["fifo", "priority", "shortest", "deadline", "prefill_first"])
def test_next_step_of_a_search_starts_before_later_requests(policy: str, is_switched: bool) -> None:
    first_policy = "fair" if is_switched else policy
    harness = CoreHarness(worker_num_slots=1, scheduling_policy=first_policy, priority_aging_seconds=0.01)
    harness.submit("running", 4, 2)
    harness.step()
    harness.now = 5.0
    harness.submit("later", 4, 1)
    harness.now = 6.0
    harness.submit("next step", 4, 1, is_sibling=True, queued_since=0.0)
    harness.core.switch(replace(harness.core.limits, scheduling_policy=policy), harness.now)
    harness.run()
    assert harness.started() == ["running", "next step", "later"]


def test_step_of_a_search_computes_one_position_for_each_beam() -> None:
    """Also of several beams that continue the same one, and while all blocks keep positions."""
    harness = CoreHarness(worker_block_size=4, worker_num_blocks=12)
    for number in range(12):
        harness.submit(f"before {number}", [*range(number, number + 3)], 1)
        harness.run()
    beams: list[tuple[int, ...]] = [()]
    num_planned = []
    for step in range(8):
        names = [f"{step}.{beam}" for beam in range(len(beams))]
        for name, tokens in zip(names, beams, strict=True):
            more = {"is_sibling": name != "0.0", "queued_since": 0.0, "output": tokens}
            harness.submit(name, [30, 31, 32, 33, 34], len(tokens) + 1, **more)
        plan = harness.step()
        assert plan is not None
        num_planned.append(sum(row.num_tokens for row in plan.rows))
        beams = [(*beams[0], 40), (*beams[0], 41), (*beams[-1], 42)]
    assert num_planned == [5, *[3] * 7]


@pytest.mark.parametrize("token", [0, -1, 2**31 - 1])
@pytest.mark.parametrize("depth", [1, 2])
def test_stuck_row_fails_only_its_request_whatever_its_token(token: int, depth: int) -> None:
    harness = CoreHarness(pipeline_depth=depth)
    prompt = tuple(range(10))
    harness.submit("stuck", prompt, 4)
    other = harness.submit("other", prompt, 4)  # it shares blocks that the row of the first fills
    harness.plan()
    if depth == 2:
        harness.plan()
    harness.apply(tokens=(token, answer(other)[0]), stuck_rows=frozenset({0}))
    harness.run()
    end = harness.end("stuck")
    assert isinstance(end, Failed)
    assert isinstance(end.error, NoTokenAllowed)
    assert isinstance(harness.end("other"), Finished)
    assert harness.outputs("other") == answer(other)
    assert harness.counters.preemptions == 0
    assert not any(plan.zero_blocks for plan in harness.plans)
