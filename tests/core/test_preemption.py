"""Too few blocks: requests that do not fit are overtaken or preempted. Blocks have 4 positions by default."""

from __future__ import annotations

from core.harness import CoreHarness, answer

from lineclear.scheduler.core.events import Preempted


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


def test_position_of_lost_sample_counts_as_recomputed() -> None:
    harness = CoreHarness(worker_num_blocks=8, worker_block_size=1, pipeline_depth=2, target_batch_tokens=4)
    harness.submit("old", 1, max_tokens=8)
    young = harness.submit("young", 4, max_tokens=3)
    assert harness.rows(harness.step()) == [(0, 0, 1), (1, 0, 3)]
    assert harness.rows(harness.step()) == [(0, 1, 2), (1, 3, 4)]
    assert harness.outputs("young") == answer(young)[:1]  # five tokens are known, of which four are computed
    # All eight blocks are used, so the next step preempts "young" with its second sample in flight.
    assert harness.rows(harness.plan()) == [(0, 2, 3), (1, 4, 5)]
    assert harness.rows(harness.plan()) == [(0, 3, 4)]
    assert [e.request_id for e in harness.events if isinstance(e, Preempted)] == ["young"]
    harness.lose()
    harness.cancel("old")
    harness.join()
    # A step takes four tokens. The fifth position looks like a decode, but it was in a plan before.
    assert [harness.rows(harness.step()) for _ in range(3)] == [[(0, 0, 4)], [(0, 4, 5)], [(0, 5, 6)]]
    assert harness.outputs("young") == answer(young)
    assert harness.end("young").stats.recomputed_tokens == 5
    assert harness.counters.recomputed_tokens == 5
