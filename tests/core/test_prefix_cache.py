"""Which requests share cached prefixes. Blocks have 4 positions by default."""

from __future__ import annotations

import pytest
from core.harness import CoreHarness, answer

from lineclear.scheduler.core.events import Failed
from lineclear.wire.messages import BlockCopy


def test_same_prompt_hits_all_but_the_last_token() -> None:
    harness = CoreHarness()
    prompt = list(range(8))
    harness.submit("a", prompt, max_tokens=1)
    harness.run()
    harness.submit("b", prompt, max_tokens=1)
    harness.run()
    # Eight tokens are two blocks; the second holds the last token, which must be computed to sample the next. Its other
    # positions are copied.
    assert harness.end("b").stats.cached_tokens == 7
    assert harness.plans[-1].copy_blocks == (BlockCopy(1, 2, 3),)
    harness.submit("c", [*prompt, 9], max_tokens=1)
    harness.run()
    assert harness.end("c").stats.cached_tokens == 8
    assert (harness.counters.prefix_cache_hits, harness.counters.prefix_cache_queries) == (15, 25)
    assert harness.runner.num_positions == 25 - 15
    assert harness.outputs("b") == harness.outputs("a")


def test_answer_is_cached_for_the_next_message() -> None:
    harness = CoreHarness()
    first = harness.submit("a", 6, max_tokens=8)
    harness.run()
    # 13 positions were computed (the last output never is): three full blocks.
    harness.submit("b", [*first.prompt, *harness.outputs("a"), 1, 2], max_tokens=1)
    harness.run()
    assert harness.end("b").stats.cached_tokens == 12


def test_equal_prompts_of_one_step_are_computed_once() -> None:
    harness = CoreHarness()
    requests = [harness.submit(name, list(range(20)), max_tokens=3) for name in "abcd"]
    plan = harness.step()
    assert harness.rows(plan) == [(0, 0, 20), (1, 16, 20), (2, 16, 20), (3, 16, 20)]
    harness.run()
    assert [harness.outputs(request.request_id) for request in requests] == [answer(request) for request in requests]


def test_equal_prompts_longer_than_a_step_are_computed_once() -> None:
    harness = CoreHarness(target_batch_tokens=6, pipeline_depth=3)
    for name in "abc":
        harness.submit(name, list(range(40)), max_tokens=1)
    harness.run()
    assert harness.runner.num_positions <= 40 + 2 * (4 + 3)  # the last block, and at most one that is half planned


def test_sequence_that_shares_blocks_of_a_bad_row_is_computed_again() -> None:
    prompt = list(range(20))
    # The worker leaves no finite values behind for "bad", whose result comes when "good" has sampled twice.
    harness = CoreHarness(pipeline_depth=3, is_bad=lambda context: len(context) == 20)
    harness.submit("bad", prompt, max_tokens=9)
    harness.plan()
    good = harness.submit("good", [*prompt, 5], max_tokens=4)
    for _ in range(2):
        harness.plan()
    assert [len(init.blocks) for plan in harness.plans for init in plan.inits] == [0, 5]
    harness.apply()
    assert isinstance(harness.end("bad"), Failed)
    assert harness.outputs("good") == []
    harness.run()
    assert harness.outputs("good") == answer(good)
    end = harness.finished("good")
    assert (end.stats.preemptions, end.stats.recomputed_tokens) == (1, 21)
    assert sorted(block for plan in harness.plans for block in plan.zero_blocks)[:5] == [0, 1, 2, 3, 4]


# --- a part of a block ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_common", [1, 2, 3])
@pytest.mark.parametrize("finish_first", [True, False])
def test_part_of_a_block_is_copied(num_common: int, finish_first: bool) -> None:
    harness = CoreHarness(pipeline_depth=2)
    first = harness.submit("a", [*range(4), 50, 51, 52, 53], max_tokens=6)
    harness.run() if finish_first else harness.plan()
    second = harness.submit("b", [*range(4), *range(50, 50 + num_common), 9, 8, 7], max_tokens=6)
    plan = harness.plan()
    assert plan is not None
    assert [(copy.source, copy.num_positions) for copy in plan.copy_blocks] == [(1, num_common)]
    harness.run()
    assert [harness.outputs(name) for name in "ab"] == [answer(first), answer(second)]
    assert harness.end("b").stats.cached_tokens == 4 + num_common


def test_source_of_a_copy_may_be_evicted_in_the_same_plan() -> None:
    """The only cached block is the source, and it is the last free one: the request copies it to itself."""
    harness = CoreHarness(worker_num_blocks=2)
    harness.submit("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=2)
    harness.run()
    second = harness.submit("b", [1, 2, 3, 9, 8, 7], max_tokens=3)
    plan = harness.step()
    assert plan is not None
    (copy,) = plan.copy_blocks
    assert copy.num_positions == 3
    assert copy.source in plan.rows[0].new_blocks
    harness.run()
    assert harness.outputs("b") == answer(second)
