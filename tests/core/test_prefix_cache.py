"""Which requests share cached prefixes. Blocks have 4 positions by default."""

from __future__ import annotations

import pytest
from core.harness import CoreHarness, answer

from lineclear.scheduler.core.events import Failed, Finished
from lineclear.scheduler.core.poison_detector import WorkerLoss
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


def test_running_requests_share_planned_blocks() -> None:
    harness = CoreHarness(pipeline_depth=2)
    prompt = list(range(20))
    requests = [harness.submit("a", prompt, max_tokens=9)]
    harness.plan()
    requests.append(harness.submit("b", [*prompt, 5], max_tokens=9))
    harness.plan()
    harness.apply()
    requests.append(harness.submit("c", [*prompt, 6], max_tokens=9))
    harness.plan()
    shared = {init.slot: len(init.blocks) for plan in harness.plans for init in plan.inits}
    assert shared == {0: 0, 1: 5, 2: 5}
    harness.run()
    assert [harness.outputs(request.request_id) for request in requests] == [answer(request) for request in requests]


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


def test_request_is_computed_again_before_it_fails_for_values_of_another() -> None:
    """Both rows of a step are bad: only the first wrote the blocks, so the second gets its own."""
    harness = CoreHarness(is_bad=lambda context: len(harness.plans) == 1)
    for name in "ab":
        harness.submit(name, list(range(20)), max_tokens=3)
    harness.step()
    assert isinstance(harness.end("a"), Failed)
    harness.run()
    assert isinstance(harness.end("b"), Finished)


def test_other_salt_misses() -> None:
    harness = CoreHarness()
    prompt = list(range(9))
    for request_id, salt in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        harness.submit(request_id, prompt, max_tokens=1, cache_salt=salt)
        harness.run()
    assert [harness.end(i).stats.cached_tokens for i in "abc"] == [0, 0, 8]


def test_prefix_cache_can_be_disabled_and_cleared() -> None:
    for harness, hits in ((CoreHarness(prefix_cache=False), 0), (CoreHarness(), 8)):
        prompt = list(range(9))
        for request_id in "ab":
            harness.submit(request_id, prompt, max_tokens=1)
            harness.run()
        assert harness.end("b").stats.cached_tokens == hits
        harness.core.clear_prefix_cache()
        harness.submit("c", prompt, max_tokens=1)
        harness.run()
        assert harness.end("c").stats.cached_tokens == 0


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


def test_partly_filled_block_of_a_running_prompt_is_copied() -> None:
    harness = CoreHarness()
    prompt = [5, 6, 7, 8, 9, 10]
    first = harness.submit("a", prompt, max_tokens=30)
    harness.step()
    second = harness.submit("b", [*prompt, 11], max_tokens=2)
    plan = harness.step()
    assert plan is not None
    assert [copy.num_positions for copy in plan.copy_blocks] == [2]
    harness.run()
    assert [harness.outputs(name) for name in "ab"] == [answer(first), answer(second)]


def test_partly_filled_block_of_a_finished_prompt_is_copied() -> None:
    """It is evicted before the full block of the same prompt."""
    harness = CoreHarness(worker_num_blocks=5)
    prompt = [5, 6, 7, 8, 9, 10]
    for name in "ab":
        harness.submit(name, prompt, max_tokens=1)
        harness.run()
    assert harness.end("b").stats.cached_tokens == 5
    harness.submit("c", [*prompt, 11], max_tokens=1)
    harness.run()
    assert harness.end("c").stats.cached_tokens == 6
    harness.submit("d", [*range(50, 66)], max_tokens=1)  # needs four of five blocks
    harness.run()
    harness.submit("e", [*prompt, 11], max_tokens=1)
    harness.run()
    assert harness.end("e").stats.cached_tokens == 4


def test_positions_of_the_same_step_are_not_copied() -> None:
    harness = CoreHarness()
    for name in "ab":
        harness.submit(name, [1, 2, 3, 4, 5, 6], max_tokens=1)
    plan = harness.step()
    assert harness.rows(plan) == [(0, 0, 6), (1, 4, 6)]
    assert plan is not None
    assert plan.copy_blocks == ()


def test_the_longest_of_several_parts_is_copied() -> None:
    harness = CoreHarness()
    for name, tokens in (("a", [1, 9, 9, 9]), ("b", [1, 2, 3, 9]), ("c", [1, 2, 9, 9])):
        harness.submit(name, tokens, max_tokens=1)
        harness.run()
    harness.submit("d", [1, 2, 3, 4], max_tokens=1)
    harness.run()
    assert harness.end("d").stats.cached_tokens == 3
    harness.submit("e", [1, 2, 9, 10, 11], max_tokens=1)
    harness.run()
    assert harness.end("e").stats.cached_tokens == 3


def test_block_of_a_running_prompt_is_not_copied_after_the_cache_was_cleared() -> None:
    harness = CoreHarness()
    harness.submit("a", [1, 2, 3], max_tokens=30)
    harness.step()
    harness.core.clear_prefix_cache()
    harness.submit("b", [1, 2, 3, 4], max_tokens=1)
    harness.run()
    assert harness.end("b").stats.cached_tokens == 0


def test_part_of_a_block_with_another_salt_or_parent_is_not_copied() -> None:
    harness = CoreHarness()
    harness.submit("a", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1, cache_salt=b"x")
    harness.run()
    for name, tokens, salt in (("b", [1, 2, 3, 0], b"y"), ("c", [5, 6, 7, 0], b"x"), ("d", [0, 2, 3, 4, 5, 6], b"x")):
        harness.submit(name, tokens, max_tokens=1, cache_salt=salt)
        harness.run()
        assert harness.end(name).stats.cached_tokens == 0


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


def test_request_that_copied_from_a_bad_row_is_computed_again() -> None:
    """Also one that shares a block with the copy: neither fails for the values of another."""
    prompt = [1, 2, 3]
    harness = CoreHarness(pipeline_depth=4, is_bad=lambda context: len(context) == 3)
    harness.submit("bad", prompt, max_tokens=9)
    harness.plan()
    second = harness.submit("b", [*prompt, 7, 8, 9, 10, 11], max_tokens=4)
    harness.plan()
    third = harness.submit("c", [*prompt, 7, 8, 9, 10, 50], max_tokens=4)
    harness.plan()
    assert [(copy.source, copy.num_positions) for p in harness.plans for copy in p.copy_blocks] == [(0, 3), (2, 3)]
    assert [init.blocks for plan in harness.plans for init in plan.inits] == [(), (), (1,)]
    harness.apply()
    assert isinstance(harness.end("bad"), Failed)
    harness.run()
    for request in (second, third):
        end = harness.finished(request.request_id)
        assert end.stats.preemptions == 1
        assert harness.outputs(request.request_id) == answer(request)


@pytest.mark.parametrize("loss", WorkerLoss)
def test_request_that_copied_continues_after_a_worker_loss(loss: WorkerLoss) -> None:
    harness = CoreHarness(pipeline_depth=2)
    requests = [harness.submit("a", [1, 2, 3, 4, 5, 6], max_tokens=5)]
    harness.plan()
    requests.append(harness.submit("b", [1, 2, 3, 4, 5, 6, 7], max_tokens=5))
    plan = harness.plan()
    assert plan is not None
    assert plan.copy_blocks
    harness.lose(loss)
    harness.join()
    harness.run()
    assert [harness.outputs(name) for name in "ab"] == [answer(request) for request in requests]
