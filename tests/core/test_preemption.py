"""Too few blocks for all: who yields, who is left alone, who is overtaken, in examples to check by hand.

Blocks have 4 positions unless said.
"""

from __future__ import annotations

from core.harness import Rig, answer

from lineclear.scheduler.core.events import Preempted


def test_the_cheapest_of_the_younger_yields_and_comes_back_with_the_same_answer() -> None:
    # Twelve blocks of one position. The middle one has computed most, so the youngest, with less to lose, yields.
    rig = Rig(worker_num_blocks=12, worker_block_size=1, prefix_cache=False)
    requests = [rig.submit("oldest", 2, max_tokens=8), rig.submit("large", 4, 6), rig.submit("small", 1, 6)]
    rig.run()
    preempted = [e.request_id for e in rig.events if isinstance(e, Preempted)]
    assert preempted
    assert preempted[0] == "small"
    assert "oldest" not in preempted
    for request in requests:
        assert rig.outputs(request.request_id) == answer(request)


def test_newest_yields_when_the_setting_says_so() -> None:
    rig = Rig(worker_num_blocks=12, worker_block_size=1, prefix_cache=False, victim="newest")
    rig.submit("oldest", 2, max_tokens=8)
    rig.submit("small", 1, max_tokens=6)
    rig.submit("large", 4, max_tokens=6)
    rig.run()
    assert next(e.request_id for e in rig.events if isinstance(e, Preempted)) == "large"


def test_a_request_preempted_often_is_pinned_and_then_left_alone() -> None:
    rig = Rig(worker_num_blocks=12, worker_block_size=1, prefix_cache=False, max_preemptions=1)
    for number in range(6):
        rig.submit(f"r{number}", 2, max_tokens=8)
    rig.run()
    counts = [rig.end(f"r{number}").record.preemptions for number in range(6)]
    assert max(counts) == 1
    assert counts[0] == 0


def test_max_preemptions_0_means_never() -> None:
    rig = Rig(worker_num_blocks=12, worker_block_size=1, prefix_cache=False, max_preemptions=0)
    for number in range(6):
        rig.submit(f"r{number}", 2, max_tokens=8)
    rig.run()
    assert rig.counters.preemptions == 0


def test_a_request_that_fills_the_pool_runs_when_it_is_alone() -> None:
    rig = Rig(worker_num_blocks=1, worker_block_size=4)
    request = rig.submit("a", 1, max_tokens=4)
    rig.run()
    assert rig.outputs("a") == answer(request)


def test_a_large_head_is_overtaken_a_bounded_number_of_times() -> None:
    rig = Rig(worker_num_blocks=10, max_bypasses=2, max_batch_size=3)
    rig.submit("running", 20, max_tokens=12)  # 5 of 10 blocks, later 8
    rig.step()
    rig.submit("large", 24, max_tokens=1)
    for number in range(5):
        rig.submit(f"small{number}", 1, max_tokens=1)
    rig.run()
    order = rig.started()
    assert order.index("large") - order.index("running") - 1 == 2
    assert order[:4] == ["running", "small0", "small1", "large"]


def test_max_bypasses_0_is_strictly_by_rank() -> None:
    rig = Rig(worker_num_blocks=10, max_bypasses=0, max_batch_size=3)
    rig.submit("running", 20, max_tokens=12)
    rig.step()
    rig.submit("large", 24, max_tokens=1)
    rig.submit("small", 1, max_tokens=1)
    rig.run()
    assert rig.started() == ["running", "large", "small"]


def test_rows_of_a_stay_that_ended_do_not_count_for_the_next() -> None:
    rig = Rig(worker_num_blocks=14, worker_block_size=1, pipeline_depth=3, target_batch_tokens=4)
    rig.submit("old", 1, max_tokens=12)
    rig.submit("gone", 1, max_tokens=12)
    rig.step()
    rig.submit("young", 9, max_tokens=1)
    assert rig.rows(rig.plan()) == [(0, 1, 2), (1, 1, 2), (2, 0, 2)]  # takes nine blocks and computes two positions
    assert rig.rows(rig.plan()) == [(0, 2, 3), (1, 2, 3)]  # "gone" is short of a block, and "young" yields
    rig.cancel("gone")
    cached = rig.core.snapshot().blocks_cached
    # Room again: it begins anew while the result of its first two positions is still on its way. When that comes, no
    # block of its new stay is known to be filled.
    assert rig.rows(rig.plan()) == [(0, 3, 4), (1, 0, 3)]
    rig.apply()
    rig.cancel("young")
    assert rig.core.snapshot().blocks_cached == cached
