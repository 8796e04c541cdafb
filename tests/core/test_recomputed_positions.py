"""Recomputed tokens: each position that was in an earlier plan counts every time it is planned again."""

from __future__ import annotations

from core.harness import CoreHarness, answer

from lineclear.scheduler.core.events import Preempted


def test_recomputed_tokens_are_counted() -> None:
    harness = CoreHarness(worker_num_blocks=12, worker_block_size=1, prefix_cache=False)
    harness.submit("oldest", 2, max_tokens=8)
    harness.submit("large", 4, max_tokens=6)
    harness.submit("small", 1, max_tokens=6)
    harness.run()
    computed = sum(row.num_tokens for plan in harness.plans for row in plan.rows)
    needed = (2 + 7) + (4 + 5) + (1 + 5)
    assert harness.counters.recomputed_tokens == computed - needed > 0


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
