"""What is computed again is counted: each position that was in a plan before, once for every time it comes back."""

from __future__ import annotations

from core.harness import Rig, answer

from lineclear.scheduler.core.events import Preempted


def test_recomputed_tokens_are_those_computed_twice() -> None:
    rig = Rig(worker_num_blocks=12, worker_block_size=1, prefix_cache=False)
    rig.submit("oldest", 2, max_tokens=8)
    rig.submit("large", 4, max_tokens=6)
    rig.submit("small", 1, max_tokens=6)
    rig.run()
    computed = sum(row.num_tokens for plan in rig.plans for row in plan.rows)
    needed = (2 + 7) + (4 + 5) + (1 + 5)
    assert rig.counters.recomputed_tokens == computed - needed > 0


def test_the_last_position_of_a_sample_that_was_never_heard_is_computed_again_and_counted() -> None:
    rig = Rig(worker_num_blocks=8, worker_block_size=1, pipeline_depth=2, target_batch_tokens=4)
    rig.submit("old", 1, max_tokens=8)
    young = rig.submit("young", 4, max_tokens=3)
    assert rig.rows(rig.step()) == [(0, 0, 1), (1, 0, 3)]
    assert rig.rows(rig.step()) == [(0, 1, 2), (1, 3, 4)]
    assert rig.outputs("young") == answer(young)[:1]  # five tokens are known, of which four are computed
    # All eight blocks are taken now, so that in the next step "young" yields with its second sample in flight.
    assert rig.rows(rig.plan()) == [(0, 2, 3), (1, 4, 5)]
    assert rig.rows(rig.plan()) == [(0, 3, 4)]
    assert [e.request_id for e in rig.events if isinstance(e, Preempted)] == ["young"]
    rig.lose()
    rig.cancel("old")
    rig.join()
    # A step takes four tokens. The fifth position looks like a decode, a single one behind a token that was told, but
    # it was in a plan before.
    assert [rig.rows(rig.step()) for _ in range(3)] == [[(0, 0, 4)], [(0, 4, 5)], [(0, 5, 6)]]
    assert rig.outputs("young") == answer(young)
    assert rig.end("young").record.recomputed_tokens == 5
    assert rig.counters.recomputed_tokens == 5
