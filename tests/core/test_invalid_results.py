"""Invalid results, non-finite logits, and the blocks they leave behind. Blocks have 4 positions by default."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core.harness import CoreHarness, answer

from lineclear.errors import InternalError, NonFiniteLogits
from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.events import Failed, Finished
from lineclear.scheduler.core.inflight_step import BadResult


@pytest.mark.parametrize(
    "change",
    [
        {"step": 2},
        {"epoch": 7},
        {"tokens": ()},
        {"tokens": (1, 2)},
        {"logprobs": (None, None)},
        {"bad_rows": frozenset({1})},
        {"bad_rows": frozenset({-1})},
        {"step_seconds": float("nan")},
        {"step_seconds": float("inf")},
        {"step_seconds": -0.001},
    ],
    ids=str,
)
def test_invalid_result_changes_nothing(change: dict[str, object]) -> None:
    harness = CoreHarness()
    request = harness.submit("a", 3)
    harness.plan()
    good = harness.compute()
    before = harness.core.snapshot()
    with pytest.raises(BadResult):
        harness.core.apply(replace(good, **change), harness.now)
    assert harness.core.snapshot() == before
    invariants.check(harness.core)
    harness.core.apply(good, harness.now)
    with pytest.raises(BadResult):
        harness.core.apply(good, harness.now)  # twice
    harness.run()
    assert isinstance(harness.end("a"), Finished)
    assert answer(request)[1:] == harness.outputs("a")


@pytest.mark.parametrize("token", [-1, 97, 2**31 - 1])
def test_token_outside_vocabulary_fails_only_its_request(token: int) -> None:
    harness = CoreHarness()
    harness.submit("a", 3)
    neighbour = harness.submit("b", 3)
    harness.plan()
    harness.apply(tokens=(token, answer(neighbour)[0]))
    assert isinstance(harness.error("a"), InternalError)
    harness.run()
    assert harness.outputs("b") == answer(neighbour)


def test_blocks_of_bad_row_are_zeroed_and_not_shared() -> None:
    prompt = list(range(9))
    harness = CoreHarness(worker_num_blocks=4, is_bad=lambda context: len(context) == 11)
    harness.submit("a", prompt, max_tokens=6)
    harness.submit("b", 2, max_tokens=1)
    for _ in range(3):
        harness.step()
    assert isinstance(harness.error("a"), NonFiniteLogits)
    assert len(harness.outputs("a")) == 2
    dirty = {block for plan in harness.plans for row in plan.rows if row.slot == 0 for block in row.new_blocks}
    harness.submit("c", prompt, max_tokens=2)
    plan = harness.step()
    assert plan is not None
    assert plan.inits[0].blocks == ()
    taken = set(plan.rows[0].new_blocks)
    assert set(plan.zero_blocks) == taken & dirty != set()


def test_shared_tainted_block_is_zeroed_after_last_release() -> None:
    prompt = list(range(8))
    harness = CoreHarness(worker_num_blocks=8, is_bad=lambda context: context[-1] == 90)
    harness.submit("clean", [*prompt, 1], max_tokens=6)
    harness.step()
    harness.submit("bad", [*prompt, 90], max_tokens=6)
    harness.step()  # shares the two blocks of the prompt, and fails
    assert isinstance(harness.end("bad"), Failed)
    harness.cancel("clean")
    harness.submit("next", 30, max_tokens=1)
    plan = harness.step()
    assert plan is not None
    assert {0, 1} <= set(plan.zero_blocks)
