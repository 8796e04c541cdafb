"""Too few blocks: preemption, pinning and overtaking. Blocks have 4 positions by default."""

from __future__ import annotations

from core.harness import CoreHarness, answer

from lineclear.scheduler.core.events import Preempted


def test_newest_policy_preempts_youngest() -> None:
    harness = CoreHarness(worker_num_blocks=12, worker_block_size=1, prefix_cache=False, preemption_policy="newest")
    harness.submit("oldest", 2, max_tokens=8)
    harness.submit("small", 1, max_tokens=6)
    harness.submit("large", 4, max_tokens=6)
    harness.run()
    assert next(e.request_id for e in harness.events if isinstance(e, Preempted)) == "large"


def test_often_preempted_request_is_pinned() -> None:
    harness = CoreHarness(worker_num_blocks=12, worker_block_size=1, prefix_cache=False, max_preemptions=1)
    for number in range(6):
        harness.submit(f"r{number}", 2, max_tokens=8)
    harness.run()
    counts = [harness.end(f"r{number}").stats.preemptions for number in range(6)]
    assert max(counts) == 1
    assert counts[0] == 0


def test_max_preemptions_0_never_preempts() -> None:
    harness = CoreHarness(worker_num_blocks=12, worker_block_size=1, prefix_cache=False, max_preemptions=0)
    for number in range(6):
        harness.submit(f"r{number}", 2, max_tokens=8)
    harness.run()
    assert harness.counters.preemptions == 0


def test_request_as_large_as_the_pool_runs_alone() -> None:
    harness = CoreHarness(worker_num_blocks=1, worker_block_size=4)
    request = harness.submit("a", 1, max_tokens=4)
    harness.run()
    assert harness.outputs("a") == answer(request)


def test_large_head_is_overtaken_a_bounded_number_of_times() -> None:
    harness = CoreHarness(worker_num_blocks=10, max_queue_overtakes=2, max_batch_size=3)
    harness.submit("running", 20, max_tokens=12)  # 5 of 10 blocks, later 8
    harness.step()
    harness.submit("large", 24, max_tokens=1)
    for number in range(5):
        harness.submit(f"small{number}", 1, max_tokens=1)
    harness.run()
    order = harness.started()
    assert order.index("large") - order.index("running") - 1 == 2
    assert order[:4] == ["running", "small0", "small1", "large"]


def test_max_queue_overtakes_0_keeps_strict_order() -> None:
    harness = CoreHarness(worker_num_blocks=10, max_queue_overtakes=0, max_batch_size=3)
    harness.submit("running", 20, max_tokens=12)
    harness.step()
    harness.submit("large", 24, max_tokens=1)
    harness.submit("small", 1, max_tokens=1)
    harness.run()
    assert harness.started() == ["running", "large", "small"]


def test_rows_of_earlier_admission_do_not_count() -> None:
    harness = CoreHarness(worker_num_blocks=14, worker_block_size=1, pipeline_depth=3, target_batch_tokens=4)
    harness.submit("old", 1, max_tokens=12)
    harness.submit("gone", 1, max_tokens=12)
    harness.step()
    harness.submit("young", 9, max_tokens=1)
    assert harness.rows(harness.plan()) == [
        (0, 1, 2),
        (1, 1, 2),
        (2, 0, 2),
    ]  # takes nine blocks and computes two positions
    assert harness.rows(harness.plan()) == [(0, 2, 3), (1, 2, 3)]  # "gone" is short of a block: "young" is preempted
    harness.cancel("gone")
    cached = harness.core.snapshot().blocks_cached
    # With free blocks it is admitted again while the result of its first two positions is in flight. That result fills
    # no block of the new admission.
    assert harness.rows(harness.plan()) == [(0, 3, 4), (1, 0, 3)]
    harness.apply()
    harness.cancel("young")
    assert harness.core.snapshot().blocks_cached == cached
