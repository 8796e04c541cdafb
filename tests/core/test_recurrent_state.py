"""Recurrent state beside KV blocks. Blocks have 4 positions, slots the states 0 to 7, and snapshots follow from 8 on.

The toy worker checks that each row starts from the state of exactly the positions before it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from core.harness import CoreHarness, answer
from core.workers_harness import WorkersHarness

from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.dump import dump_core, load_core
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.state_pool import StatePool
from lineclear.scheduler.flight_recorder.recorder import to_json_types
from lineclear.wire.messages import StateCopy

PROMPT = list(range(3, 21))
"""Of 18 tokens: four full blocks, behind which the state is kept, and two positions."""


def hybrid(num_state_snapshots: int = 4, **sizes: Any) -> CoreHarness:
    return CoreHarness(**{"worker_num_state_snapshots": num_state_snapshots} | sizes)


def copies(harness: CoreHarness) -> list[list[tuple[int, int]]]:
    """Return the copies of states of each plan with some."""
    return [[(copy.source, copy.target) for copy in plan.copy_states] for plan in harness.plans if plan.copy_states]


def positions(harness: CoreHarness) -> list[list[tuple[int, int, int]]]:
    return [harness.rows(plan) for plan in harness.plans]


def test_state_is_kept_behind_the_last_full_block() -> None:
    harness = hybrid()
    first = harness.submit("first", PROMPT, max_tokens=2)
    harness.run()
    assert positions(harness) == [[(0, 0, 16)], [(0, 16, 18)], [(0, 18, 19)]]
    assert copies(harness) == [[(0, 8)]]
    harness.plans.clear()
    second = harness.submit("second", [*PROMPT, 50], max_tokens=2)
    harness.run()
    assert positions(harness) == [[(0, 16, 19)], [(0, 19, 20)]]
    assert copies(harness) == [[(8, 0)]]
    assert [harness.outputs(x.request_id) for x in (first, second)] == [answer(first), answer(second)]
    assert harness.finished("second").stats.cached_tokens == 16


def test_state_is_kept_where_a_request_leaves_a_cached_prefix() -> None:
    harness = hybrid()
    harness.submit("first", PROMPT, max_tokens=1)
    harness.run()
    harness.plans.clear()
    other = PROMPT[:9] + PROMPT[:9]
    harness.submit("second", other, max_tokens=1)
    harness.run()
    assert positions(harness) == [[(0, 0, 8)], [(0, 8, 16)], [(0, 16, 18)]]
    assert copies(harness) == [[(0, 9)], [(0, 10)]]
    assert harness.counters.prefix_cache_stateless_tokens == 8, "cached, and computed again"
    (worker,) = harness.core.snapshot().workers
    assert worker.state_snapshots_used == 3
    harness.submit("third", [*PROMPT[:8], *range(50, 60)], max_tokens=1)
    harness.run()
    assert harness.finished("third").stats.cached_tokens == 8


def test_outputs_of_one_prompt_compute_it_once() -> None:
    harness = hybrid(pipeline_depth=2)
    requests = [harness.submit(f"r{n}", PROMPT, max_tokens=4, seed=n) for n in range(3)]
    harness.plan()
    harness.plan()
    assert positions(harness) == [[(0, 0, 16)], [(0, 16, 18), (1, 16, 18), (2, 16, 18)]]
    assert copies(harness) == [[(0, 1), (0, 2), (0, 8)]], "they begin with the state of the slot"
    harness.run()
    assert [harness.outputs(x.request_id) for x in requests] == [answer(x) for x in requests]


def test_request_waits_for_a_state_while_others_start() -> None:
    harness = hybrid(target_batch_tokens=20)
    for name, prompt in (("first", PROMPT), ("second", [*PROMPT, 1]), ("other", [9, 9, 9])):
        harness.submit(name, prompt, max_tokens=1)
    harness.run()
    assert harness.started() == ["first", "other", "second"]
    assert harness.finished("second").stats.cached_tokens == 16


def test_chat_begins_behind_the_last_answer() -> None:
    harness = hybrid(pipeline_depth=2)
    first = harness.submit("first", PROMPT, max_tokens=20)
    harness.run()
    assert copies(harness) == [[(0, 8)], [(0, 9)]], "behind the prompt, and behind 32 positions"
    turn = [*PROMPT, *harness.outputs("first"), 50, 51]
    second = harness.submit("second", turn, max_tokens=2)
    harness.run()
    assert harness.finished("second").stats.cached_tokens == 32
    assert [harness.outputs(x.request_id) for x in (first, second)] == [answer(first), answer(second)]
    (worker,) = harness.core.snapshot().workers
    assert (worker.state_snapshots_used, worker.state_snapshot_hits) == (3, 1)


@pytest.mark.parametrize(("num_state_snapshots", "num_used"), [(3, 1), (4, 3), (20, 3)])
def test_answers_keep_a_part_of_the_snapshots(num_state_snapshots: int, num_used: int) -> None:
    """Behind the prompt, and the last two of seven."""
    harness = hybrid(num_state_snapshots)
    request = harness.submit("long", PROMPT, max_tokens=112)
    harness.run()
    assert harness.outputs("long") == answer(request)
    (worker,) = harness.core.snapshot().workers
    assert worker.state_snapshots_used == num_used


def test_state_behind_tokens_that_never_are_known_is_dropped() -> None:
    harness = hybrid(pipeline_depth=3)
    harness.submit("first", PROMPT, max_tokens=40)
    states = next(iter(harness.core.state.workers.values())).batch.pool.states
    assert states is not None
    while copies(harness)[-1:] != [[(0, 9)]]:  # behind 32 positions: its row is in flight
        if len(harness.flights) == 3:
            harness.apply()
        harness.plan()
    assert states.num_used == 2
    harness.cancel("first")
    assert states.num_used == 1
    harness.run()


def test_equal_answers_keep_one_state() -> None:
    harness = hybrid(8, pipeline_depth=2)
    requests = [harness.submit(name, PROMPT, max_tokens=20) for name in ("one", "two")]
    harness.run()
    assert [harness.outputs(x.request_id) for x in requests] == [answer(x) for x in requests]
    (worker,) = harness.core.snapshot().workers
    assert worker.state_snapshots_used == 2, "behind the prompt, and behind the block of one of the answers"


@pytest.mark.parametrize("sizes", [{"num_state_snapshots": 0}, {"prefix_cache": False}])
def test_without_snapshots_there_is_no_prefix_cache(sizes: dict[str, Any]) -> None:
    harness = hybrid(**sizes)
    for name in ("first", "second"):
        harness.submit(name, PROMPT, max_tokens=1)
        harness.run()
    assert positions(harness) == [[(0, 0, 18)]] * 2, "no row ends early for nothing"
    assert copies(harness) == []
    assert harness.counters.prefix_cache_hits == 0


def test_one_snapshot_is_read_and_replaced_in_the_same_plan() -> None:
    harness = hybrid(num_state_snapshots=1)
    requests = [harness.submit("first", PROMPT, max_tokens=1)]
    harness.run()
    requests.append(harness.submit("other", PROMPT[::-1], max_tokens=1))
    harness.plan()
    requests.append(harness.submit("again", PROMPT, max_tokens=1))
    harness.apply()
    harness.plan()
    assert copies(harness)[-1] == [(8, 1), (0, 8)], "the reads come first"
    harness.run()
    requests.append(harness.submit("third", PROMPT, max_tokens=1))
    harness.run()
    assert [harness.outputs(x.request_id) for x in requests] == [answer(x) for x in requests]
    assert [harness.finished(x).stats.cached_tokens for x in ("again", "third")] == [16, 0]


def test_snapshot_is_dropped_with_its_block() -> None:
    harness = hybrid(worker_num_blocks=5)
    harness.submit("first", PROMPT, max_tokens=1)
    harness.run()
    harness.submit("large", 20, max_tokens=1)  # takes all blocks
    harness.run()
    states = next(iter(harness.core.state.workers.values())).batch.pool.states
    assert states is not None
    assert states.num_used == 1, "that of the large one"
    harness.submit("again", PROMPT, max_tokens=1)
    harness.run()
    assert harness.finished("again").stats.cached_tokens == 0
    harness.core.clear_prefix_cache(0.0)
    invariants.check(harness.core)
    assert states.num_used == 0


def test_preempted_sequence_is_computed_again_from_its_last_state() -> None:
    harness = hybrid(worker_num_blocks=8, max_batch_size=2, worker_num_swap_blocks=8)
    harness.submit("old", 8, max_tokens=16)
    young = harness.submit("young", 13, max_tokens=12)
    while not harness.counters.preemptions:
        harness.step()
    harness.cancel("old")
    harness.run()
    assert harness.outputs("young") == answer(young)
    c = harness.counters
    assert c.swapped_out_tokens == 0, "host blocks keep no state"
    assert c.recomputed_tokens == 5, "of 17 positions: the state behind the third block of the prompt was kept"


def test_next_worker_has_no_states() -> None:
    harness = hybrid()
    request = harness.submit("first", PROMPT, max_tokens=6)
    for _ in range(4):
        harness.step()
    harness.join()
    harness.run()
    assert harness.outputs("first") == answer(request)
    assert copies(harness) == [[(0, 8)], [(0, 8)]], "the same state again"


def test_drafts_are_off() -> None:
    harness = hybrid(adaptive_drafts=False)
    request = harness.submit("first", PROMPT, max_tokens=20, max_drafts=4)
    harness.run()
    assert harness.outputs("first") == answer(request)
    assert harness.counters.spec_decode_num_drafts == 0


def test_requests_of_another_adapter_begin_with_other_states() -> None:
    harness = hybrid()
    key = b"\1" * 32
    harness.runner.load_adapter(harness.core.load_adapter(key, 0.0), key)
    for name, adapter in (("plain", b""), ("adapted", key), ("again", key)):
        harness.submit(name, PROMPT, max_tokens=1, adapter=adapter)
        harness.run()
    assert [harness.finished(x).stats.cached_tokens for x in ("plain", "adapted", "again")] == [0, 0, 16]


def test_state_of_a_bad_row_is_not_kept() -> None:
    harness = hybrid(pipeline_depth=2, is_bad=lambda context: len(context) == 18)
    harness.submit("bad", PROMPT, max_tokens=2)
    for _ in range(2):
        harness.plan()
    harness.apply()
    reader = harness.submit("reader", [*PROMPT[:16], 60, 61, 62], max_tokens=1)
    harness.plan()
    harness.run()
    assert type(harness.error("bad")).__name__ == "NonFiniteLogits"
    assert harness.outputs("reader") == answer(reader)
    states = next(iter(harness.core.state.workers.values())).batch.pool.states
    assert states is not None
    assert states.num_used == 0, "it was behind a block of the request that failed"


def test_workers_with_states_share_a_queue() -> None:
    harness = WorkersHarness(0)
    for _ in range(2):
        harness.join(num_state_snapshots=2)
    requests = [harness.submit(f"r{n}", [*PROMPT, n], max_tokens=3) for n in range(8)]
    harness.run()
    assert [harness.outputs(x.request_id) for x in requests] == [answer(x) for x in requests]


def test_dump_of_a_core_has_the_states() -> None:
    harness = hybrid(pipeline_depth=2)
    harness.submit("first", PROMPT, max_tokens=4)
    harness.run()
    harness.submit("second", PROMPT[:9] + PROMPT, max_tokens=4)
    harness.plan()  # a state in its slot, and a boundary ahead
    state = json.dumps(to_json_types(dump_core(harness.core)))
    loaded = Scheduler(harness.core.limits)
    load_core(loaded, json.loads(state))
    assert json.dumps(to_json_types(dump_core(loaded))) == state
    invariants.check(loaded)


# --- the snapshots --------------------------------------------------------------------------------------------------


def test_least_recently_used_snapshot_is_replaced() -> None:
    states = StatePool(8, 2)
    for block in (1, 2):
        states.reach(block, block)
        states.end_plan()
    assert states.end_plan() == [StateCopy(2, 9)]
    assert states.load(1) == 8
    states.reach(3, 5)
    assert [states.end_plan(), states.end_plan()] == [[], [StateCopy(5, 9)]]
    assert [states.num_usable([block]) for block in (1, 2, 3)] == [1, 0, 1]


def test_plan_keeps_no_more_states_than_there_are_snapshots() -> None:
    states = StatePool(8, 2)
    for block in range(3):
        states.reach(block, block)
    states.end_plan()
    assert states.end_plan() == [StateCopy(0, 8), StateCopy(1, 9)]
    states.check([b"key"] * 3, [0] * 3, range(8))


def test_state_is_lost_with_its_slot_or_its_block() -> None:
    states = StatePool(8, 2)
    for block in range(2):
        states.reach(block, block)
    states.end_plan()
    states.leave(0)
    states.drop(1)
    assert states.end_plan() == []
    assert states.num_usable([0, 1]) == 0
