"""Results that cannot be, and logits that are not finite: what is refused, and who reads what they left in blocks.

Blocks have 4 positions unless said.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from core.harness import Rig, answer

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
def test_a_result_that_cannot_be_is_refused_whole(change: dict[str, object]) -> None:
    rig = Rig()
    request = rig.submit("a", 3)
    rig.plan()
    good = rig.compute()
    before = rig.core.snapshot()
    with pytest.raises(BadResult):
        rig.core.apply(replace(good, **change), rig.now)
    assert rig.core.snapshot() == before
    invariants.check(rig.core)
    rig.core.apply(good, rig.now)
    with pytest.raises(BadResult):
        rig.core.apply(good, rig.now)  # twice
    rig.run()
    assert isinstance(rig.end("a"), Finished)
    assert answer(request)[1:] == rig.outputs("a")


@pytest.mark.parametrize("token", [-1, 97, 2**31 - 1])
def test_a_token_out_of_the_vocabulary_fails_its_request_only(token: int) -> None:
    rig = Rig()
    rig.submit("a", 3)
    neighbour = rig.submit("b", 3)
    rig.plan()
    rig.apply(tokens=(token, answer(neighbour)[0]))
    end = rig.end("a")
    assert isinstance(end, Failed)
    assert isinstance(end.error, InternalError)
    rig.run()
    assert rig.outputs("b") == answer(neighbour)


def test_blocks_of_a_bad_row_are_zeroed_before_reuse_and_never_shared() -> None:
    prompt = list(range(9))
    rig = Rig(worker_num_blocks=4, is_bad=lambda context: len(context) == 11)
    rig.submit("a", prompt, max_tokens=6)
    rig.submit("b", 2, max_tokens=1)
    for _ in range(3):
        rig.step()
    end = rig.end("a")
    assert isinstance(end, Failed)
    assert isinstance(end.error, NonFiniteLogits)
    assert len(rig.outputs("a")) == 2
    dirty = {block for plan in rig.plans for row in plan.rows if row.slot == 0 for block in row.new_blocks}
    rig.submit("c", prompt, max_tokens=2)
    plan = rig.step()
    assert plan is not None
    assert plan.inits[0].blocks == ()
    taken = set(plan.rows[0].new_blocks)
    assert set(plan.zero_blocks) == taken & dirty != set()


def test_a_dirty_block_that_another_shares_is_zeroed_when_the_last_lets_go() -> None:
    prompt = list(range(8))
    rig = Rig(worker_num_blocks=8, is_bad=lambda context: context[-1] == 90)
    rig.submit("clean", [*prompt, 1], max_tokens=6)
    rig.step()
    rig.submit("bad", [*prompt, 90], max_tokens=6)
    rig.step()  # shares the two blocks of the prompt, and fails
    assert isinstance(rig.end("bad"), Failed)
    rig.cancel("clean")
    rig.submit("next", 30, max_tokens=1)
    plan = rig.step()
    assert plan is not None
    assert {0, 1} <= set(plan.zero_blocks)


def test_blocks_left_with_rows_in_flight_are_zeroed_before_reuse_until_the_rows_prove_finite() -> None:
    bad: list[bool] = [False]
    rig = Rig(worker_num_blocks=4, pipeline_depth=2, max_batch_size=1, is_bad=lambda context: bad[0])
    for turn, dirty in enumerate((False, True)):
        rig.submit(f"a{turn}", 5, max_tokens=8)
        rig.plan()
        (begun,) = rig.plans[-1].chunks
        rig.apply()
        rig.plan()
        rig.cancel(f"a{turn}")  # while its second step is in flight
        bad[0] = dirty
        rig.apply()
        bad[0] = False
        rig.submit(f"b{turn}", [5 * i for i in range(14)], max_tokens=1)  # takes all four blocks
        plan = rig.plan()
        assert plan is not None
        assert set(plan.zero_blocks) == ({begun.new_blocks[1]} if dirty else set())
        rig.run()


def test_a_block_whose_rows_are_still_in_flight_is_zeroed_at_once() -> None:
    rig = Rig(worker_num_blocks=4, pipeline_depth=2, max_batch_size=1)
    rig.submit("a", 5, max_tokens=8)
    rig.plan()
    rig.cancel("a")
    rig.submit("b", [5 * i for i in range(14)], max_tokens=1)
    plan = rig.plan()
    assert plan is not None
    assert sorted(plan.zero_blocks) == [0, 1]
    rig.run()
