"""Blocks of preempted sequences in host memory. Blocks have 4 positions; host blocks are numbered from 8 on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from core.harness import CoreHarness, answer, make_request
from core.workers_harness import WorkersHarness

from lineclear.scheduler.core import invariants
from lineclear.scheduler.core.block_pool import BlockPool, Donor
from lineclear.scheduler.core.dump import dump_core, load_core
from lineclear.scheduler.core.placement import _uncached
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request, Sequence
from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.scheduler.core.swap_space import SwapSpace
from lineclear.scheduler.flight_recorder.recorder import to_json_types
from lineclear.wire.messages import BlockCopy, Hello

SIZES = {"worker_num_blocks": 8, "worker_num_swap_blocks": 4, "max_batch_size": 2, "prefix_cache": False}


def measured(**sizes: Any) -> CoreHarness:
    """Return a core that can predict step times: 10 ms, and 1 ms for each token."""
    harness = CoreHarness(**SIZES | sizes)
    harness.seconds_per_step, harness.seconds_per_token = 0.01, 0.001
    for number in range(6):
        harness.submit(f"first{number}", 3 * number + 1, max_tokens=4)
        harness.run()
    return harness


def submit_two(harness: CoreHarness, names: tuple[str, str] = ("old", "young")) -> list[Request]:
    """Submit two requests that need 12 of the 8 blocks: the second is preempted."""
    return [harness.submit(names[0], 8, max_tokens=16), harness.submit(names[1], 12, max_tokens=12)]


def copies(harness: CoreHarness) -> list[BlockCopy]:
    return [copy for plan in harness.plans for copy in plan.copy_blocks]


def test_preempted_sequence_gets_its_blocks_back() -> None:
    harness = measured()
    requests = submit_two(harness)
    harness.run()
    assert [harness.outputs(x.request_id) for x in requests] == [answer(x) for x in requests]
    # "old" has 16 positions and needs a fifth block; "young" waits with 16 positions in the other four.
    out, back = copies(harness)[:4], copies(harness)[4:]
    assert [(copy.target, copy.num_positions) for copy in out] == [(8, 4), (9, 4), (10, 4), (11, 4)]
    assert [(copy.source, copy.num_positions) for copy in back] == [(8, 4), (9, 4), (10, 4), (11, 4)]
    c = harness.counters
    assert (c.preemptions, c.swapped_out_tokens, c.swapped_in_tokens) == (1, 16, 16)
    assert (c.recomputed_tokens, c.prefix_cache_hits) == (0, 0)


@pytest.mark.parametrize(("swap_seconds", "is_swapped"), [(0.0019, True), (0.0021, False)])
def test_cheaper_way_is_taken(swap_seconds: float, is_swapped: bool) -> None:
    """Four tokens take 4 ms, and the two copies of a block twice `swap_seconds`."""
    harness = measured(worker_swap_seconds=swap_seconds)
    requests = submit_two(harness)
    harness.run()
    assert bool(copies(harness)) == is_swapped
    assert [harness.outputs(x.request_id) for x in requests] == [answer(x) for x in requests]


def test_nothing_is_swapped_before_times_are_known() -> None:
    harness = CoreHarness(**SIZES)
    submit_two(harness)
    harness.run()
    assert harness.counters.preemptions > 0
    assert copies(harness) == []


def test_few_host_blocks_keep_the_beginning() -> None:
    harness = measured(worker_num_swap_blocks=1)
    young = submit_two(harness)[1]
    harness.run()
    assert {max(copy.source, copy.target) for copy in copies(harness)} == {8}
    c = harness.counters
    assert (c.preemptions, c.swapped_out_tokens, c.swapped_in_tokens, c.recomputed_tokens) == (1, 4, 4, 12)
    assert harness.outputs("young") == answer(young)


@pytest.mark.parametrize("end", ["cancel", "deadline", "loss"])
def test_request_that_ends_while_it_waits_frees_its_host_blocks(end: str) -> None:
    harness = measured()
    harness.submit("old", 8, max_tokens=16)
    harness.submit("young", 12, max_tokens=12, deadline=10.0)
    while not copies(harness):
        harness.step()
    if end == "cancel":
        harness.cancel("young")
    elif end == "deadline":
        harness.now = 11.0
        harness.record(harness.core.expire(harness.now))
    else:
        harness.join()  # a new worker, whose host blocks hold nothing
    harness.run()
    submit_two(harness, ("old again", "young again"))
    harness.run()  # which checks after each call that every host block is free or has a waiting owner
    if end == "loss":
        assert harness.finished("young").stats.recomputed_tokens == 16
    else:
        assert (harness.counters.swapped_out_tokens, harness.counters.swapped_in_tokens) == (32, 16)


def test_recording_that_starts_while_a_request_is_swapped_out_goes_on() -> None:
    harness = measured()
    submit_two(harness)
    while not copies(harness):
        harness.step()
    state = json.dumps(to_json_types(dump_core(harness.core)))
    loaded = Scheduler(harness.core.limits)
    load_core(loaded, json.loads(state))
    assert json.dumps(to_json_types(dump_core(loaded))) == state
    invariants.check(loaded)


def test_blocks_that_are_not_confirmed_stay() -> None:
    harness = CoreHarness(pipeline_depth=3)
    prompt = list(range(20))
    harness.submit("writer", prompt, max_tokens=9)
    harness.plan()
    harness.submit("reader", [*prompt, 5], max_tokens=9)
    harness.plan()
    batch = next(iter(harness.core.state.workers.values())).batch
    batch.dissolve_decode()
    writer, reader = batch.by_age()
    assert batch.confirmed_blocks(reader) == batch.confirmed_blocks(writer) == []
    harness.apply()
    assert batch.confirmed_blocks(writer) == writer.blocks[:5]
    assert batch.confirmed_blocks(reader) == reader.blocks[:5] == writer.blocks[:5]


def test_request_that_continues_on_another_worker_gives_up_its_host_blocks() -> None:
    harness = WorkersHarness(0, prefix_cache=False, max_batch_size=2)
    sizes = {"num_blocks": 8, "num_swap_blocks": 4}
    first = harness.join(**sizes)
    for number in range(6):
        harness.submit(f"first{number}", 3 * number + 1)
        harness.run()
    harness.submit("old", 8, max_tokens=16)
    young = harness.submit("young", 12, max_tokens=12)
    while not harness.core.snapshot().counters.swapped_out_tokens:
        harness.step(first)
    second = harness.join(num_blocks=12)
    workers, (waiting,) = harness.core.state.workers, harness.core.state.resuming.sequences()
    assert len(waiting.tokens) == 17
    assert (_uncached(workers[first], waiting, []), _uncached(workers[second], waiting, [])) == (1, 17)
    assert harness.plan(second) is not None, "the first worker has no room"
    swap = workers[first].batch.swap
    assert swap is not None
    assert swap.find(waiting, 0) == []
    harness.run()
    assert harness.outputs("young") == answer(young)
    assert harness.core.snapshot().counters.swapped_in_tokens == 0


# --- the host blocks ------------------------------------------------------------------------------------------------


def swap_space(num_swap_blocks: int = 3) -> tuple[SwapSpace, BlockPool]:
    pool = BlockPool(8, 4)
    return SwapSpace(Hello(1, 8, 4, 8, 64, 97, (), 64, num_swap_blocks=num_swap_blocks)), pool


def sequence(number: int) -> Sequence:
    return Sequence(make_request(f"r{number}", 30), (float(number), number), 0.0)


class Fitted(StepTimeModel):
    """A model that predicts a millisecond for each token."""

    coefficients = (0.0, 0.001, 0.0)  # type: ignore[assignment]
    is_fitted = True  # type: ignore[assignment]


def test_blocks_that_others_use_are_left_out() -> None:
    swap, pool = swap_space()
    blocks = pool.take(4)
    pool.release(blocks[1:])
    owner = sequence(1)
    assert swap.swap_out(owner, blocks, pool, Fitted()) == [
        BlockCopy(block, target, 4) for block, target in zip(blocks[1:], (8, 9, 10), strict=True)
    ]
    assert swap.find(owner, 0) == [], "the first block is neither shared nor swapped"
    assert swap.find(owner, 1) == [Donor(8, 4), Donor(9, 4), Donor(10, 4)]
    assert swap.find(owner, 3) == [Donor(10, 4)]
    assert swap.find(owner, 4) == swap.find(sequence(2), 1) == []


def test_no_plan_writes_the_host_blocks_that_it_reads() -> None:
    swap, pool = swap_space()
    blocks = pool.take(3)
    pool.release(blocks)
    assert len(swap.swap_out(sequence(1), blocks, pool, Fitted())) == 3
    owner = sequence(2)
    assert swap.swap_out(owner, blocks, pool, Fitted()) == [], "all host blocks are taken"
    swap, pool = swap_space()
    swap.swap_out(owner, blocks, pool, Fitted())
    swap.drop(owner)
    assert swap.swap_out(sequence(3), blocks, pool, Fitted()) == []
    swap.begin_plan()
    assert len(swap.swap_out(sequence(3), blocks, pool, Fitted())) == 3
