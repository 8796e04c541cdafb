"""A plan that contradicts the slots is refused before it changes anything; one that does not is laid out for speed."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch

from lineclear.wire.messages import NO_DECODES, BlockCopy, Decodes, Row, Sampling, SlotInit, StepErrorKind, StepPlan
from lineclear.worker.device.staging import Staging
from lineclear.worker.kv_cache.slot_table import Capacity
from lineclear.worker.loop.runner_interface import StepFailed
from lineclear.worker.runner.input_batch import InputBatch, PackedInputs

CAPACITY = Capacity(4, 10, 4, max_model_len=18, max_step_tokens=16, vocab_size=50, num_swap_blocks=2)


def init(slot: int, num_tokens: int, blocks: tuple[int, ...] = (), prompt_len: int | None = None) -> SlotInit:
    return SlotInit(slot, tuple(range(1, num_tokens + 1)), prompt_len or num_tokens, blocks, Sampling())


def plan(
    *rows: Row,
    inits: tuple[SlotInit, ...] = (),
    zero_blocks: tuple[int, ...] = (),
    decodes: Decodes = NO_DECODES,
    copies: tuple[tuple[int, int, int], ...] = (),
) -> StepPlan:
    return StepPlan(1, 1, rows, inits, zero_blocks, decodes, tuple(BlockCopy(*copy) for copy in copies))


def batch_with_one() -> InputBatch:
    """Slot 2 has computed positions [0, 6) of 6 and sampled the seventh token."""
    batch = InputBatch(CAPACITY, torch.device("cpu"))
    go(batch, plan(Row(2, 0, 6, True, (3, 4)), inits=(init(2, 6),)))
    return batch


def go(batch: InputBatch, step: StepPlan) -> PackedInputs:
    batch.slots.check(step)
    return batch.apply(step)


GOOD = plan(Row(2, 6, 1, True))
BAD: dict[str, tuple[StepPlan, str]] = {
    "a gap": (plan(Row(2, 7, 1, False)), "6 are computed"),
    "a repetition": (plan(Row(2, 5, 1, False)), "6 are computed"),
    "a token nobody knows": (plan(Row(2, 6, 2, True)), "7 tokens are known"),
    "sampling in the middle": (plan(Row(1, 0, 2, True, (5,)), inits=(init(1, 3),)), "3 tokens are known"),
    "two blocks for a decode": (plan(decodes=Decodes((2,), (6,), ((2, 5), (2, 6)))), "two blocks"),
    "a decode after a gap": (plan(decodes=Decodes((2,), (7,))), "6 are computed"),
    "a decode of a token nobody knows": (plan(decodes=Decodes((1,), (3,)), inits=(init(1, 3),)), "0 are computed"),
    "a decode of a negative slot": (plan(decodes=Decodes((-1,), (6,))), "slot -1 of 4"),
    "a decode of a slot without an owner": (plan(decodes=Decodes((0,), (0,))), "0 tokens are known"),
    "a decode with a block it has no room for": (plan(decodes=Decodes((2,), (6,), ((2, 10),))), "outside the pool"),
    "a decode and a chunk of one slot": (plan(Row(2, 6, 1, True), decodes=Decodes((2,), (6,))), "two rows"),
    "no positions": (plan(Row(2, 6, 0, False)), "row of 0 positions"),
    "a slot without an owner": (plan(Row(0, 0, 1, True, (5,))), "0 tokens are known"),
    "a slot that is not there": (plan(Row(4, 0, 1, True)), "slot 4 of 4"),
    "a negative slot": (plan(Row(-1, 0, 1, True)), "slot -1 of 4"),
    "two rows of a slot": (plan(Row(2, 6, 1, True), Row(2, 6, 1, True)), "two rows"),
    "two owners of a slot": (plan(inits=(init(1, 3), init(1, 3))), "two owners"),
    "a block outside the pool": (plan(Row(2, 6, 1, True, (10,))), "outside the pool"),
    "a negative block": (plan(Row(2, 6, 1, True, (-1,))), "outside the pool"),
    "a zeroed block outside the pool": (plan(zero_blocks=(10,)), "outside the pool"),
    "too few blocks": (plan(Row(1, 0, 5, True, (5,)), inits=(init(1, 5),)), "1 blocks for 5 positions"),
    "too many blocks": (plan(Row(2, 6, 1, True, (5, 6, 7, 8))), "6 blocks"),
    "a token outside the vocabulary": (plan(inits=(init(1, 51),)), "51 tokens"),
    "a token id too large": (plan(inits=(replace(init(1, 3), tokens=(1, 50, 2)),)), "outside the vocabulary"),
    "a negative token": (plan(inits=(replace(init(1, 3), tokens=(1, -1, 2)),)), "outside the vocabulary"),
    "an empty sequence": (plan(inits=(init(1, 0),)), "a sequence of 0 tokens"),
    "a sequence beyond the context": (plan(inits=(init(1, 19),)), "a sequence of 19 tokens"),
    "a prompt longer than the sequence": (plan(inits=(init(1, 3, prompt_len=4),)), "a prompt of 4"),
    "nothing left to compute": (plan(inits=(init(1, 4, (5,)),)), "nothing is left to compute"),
    "too many tokens": (
        plan(Row(0, 0, 9, True, (5, 6, 7)), Row(1, 0, 8, True, (8, 9)), inits=(init(0, 9), init(1, 8))),
        "more than 16 tokens",
    ),
    "a banned token outside the vocabulary": (
        plan(inits=(replace(init(1, 3), sampling=Sampling(banned_ids=(50,))),)),
        "sampling parameters name",
    ),
    "a copy that no sequence starts behind": (
        plan(Row(1, 4, 3, True, (5,)), inits=(init(1, 7, (4,)),), copies=((3, 6, 2),)),
        "a copy whose target",
    ),
    "a copy to a running sequence": (plan(Row(2, 6, 1, True, (5,)), copies=((3, 5, 2),)), "a copy whose target"),
    "a row within copied positions": (
        plan(Row(1, 5, 2, True, (5,)), inits=(init(1, 7, (4,)),), copies=((3, 5, 2),)),
        "at 5, but 6 are computed",
    ),
    "a copy of a whole block": (
        plan(Row(1, 8, 1, True, (5, 6)), inits=(init(1, 9, (4,)),), copies=((3, 5, 4),)),
        "a copy of a whole block",
    ),
    "a copy of a block outside the pool": (
        plan(Row(1, 6, 1, True, (5,)), inits=(init(1, 7, (4,)),), copies=((12, 5, 2),)),
        "outside the pool",
    ),
    "a part of a host block": (
        plan(Row(1, 6, 1, True, (5,)), inits=(init(1, 7, (4,)),), copies=((10, 5, 2),)),
        "copied in part",
    ),
    "a copy between host blocks": (plan(Row(2, 6, 1, True), copies=((10, 11, 4),)), "to another one"),
    "a host block that is read and written": (
        plan(Row(1, 8, 1, True, (5, 6)), inits=(init(1, 9, (4,)),), copies=((10, 5, 4), (3, 10, 4))),
        "both read and written",
    ),
    "a swapped block of no new sequence": (plan(Row(2, 6, 1, True, (5,)), copies=((10, 5, 4),)), "a copy whose target"),
    "a row within swapped positions": (
        plan(Row(1, 7, 2, True, (5, 6, 7)), inits=(init(1, 9),), copies=((10, 5, 4), (11, 6, 4))),
        "at 7, but 8 are computed",
    ),
    "two copies to one block": (
        plan(Row(1, 6, 1, True, (5,)), inits=(init(1, 7, (4,)),), copies=((3, 5, 2), (4, 5, 2))),
        "two copies",
    ),
    "a negative temperature": (
        plan(inits=(replace(init(1, 3), sampling=Sampling(temperature=-1.0)),)),
        "sampling parameters out of range",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_contradicting_plan_changes_nothing(name: str) -> None:
    bad, reason = BAD[name]
    batch = batch_with_one()
    with pytest.raises(StepFailed, match=reason) as caught:
        batch.slots.check(bad)
    assert caught.value.kind is StepErrorKind.PROTOCOL
    assert go(batch, GOOD).positions.tolist() == [6]


def test_last_position_of_the_context_is_computed() -> None:
    batch = InputBatch(CAPACITY, torch.device("cpu"))
    packed = go(batch, plan(Row(0, 0, 16, False, (0, 1, 2, 3)), inits=(init(0, 18),)))
    packed = go(batch, plan(Row(0, 16, 2, True, (4,))))
    assert packed.sample_positions == [18]
    batch.write_sampled(packed, torch.tensor([42]))
    assert batch.tokens[0].tolist() == [*range(1, 19), 42]


def test_reset_frees_every_slot() -> None:
    batch = batch_with_one()
    batch.slots.reset()
    with pytest.raises(StepFailed, match="0 tokens are known"):
        batch.slots.check(GOOD)


def test_single_tokens_are_packed_first() -> None:
    batch = InputBatch(CAPACITY, torch.device("cpu"))
    first = plan(Row(0, 0, 7, True, (0, 1)), Row(3, 0, 3, True, (2,)), inits=(init(0, 7), init(3, 3)))
    batch.write_sampled(go(batch, first), torch.tensor([30, 31]))
    packed = go(batch, plan(Row(1, 0, 4, True, (5,)), Row(0, 7, 1, True), Row(3, 3, 1, True), inits=(init(1, 4),)))
    assert [(chunk.num_queries, chunk.start, chunk.blocks.tolist()) for chunk in packed.batch.chunks] == [
        (1, 3, [2]),
        (1, 7, [0, 1]),
        (4, 0, [5]),
    ]
    assert batch.tokens.view(-1)[torch.from_numpy(packed.read_indices)].tolist() == [31, 30, 1, 2, 3, 4]
    assert packed.positions.tolist() == [3, 7, 0, 1, 2, 3]
    assert packed.sample_rows.tolist() == [5, 1, 0]
    assert packed.sample_slots == [1, 0, 3]
    assert packed.sample_positions == [4, 8, 4]


def test_packing_a_prompt_has_no_python_loop_over_tokens() -> None:
    def lines(num_tokens: int) -> int:
        """How many lines of Python entering such a prompt runs."""
        batch = InputBatch(CAPACITY._replace(max_model_len=512, num_blocks=200), torch.device("cpu"))
        step = plan(Row(0, 0, num_tokens, True, tuple(range(-(-num_tokens // 4)))), inits=(init(0, num_tokens),))
        count = 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            batch.apply(step)
        finally:
            sys.settrace(before)
        return count

    assert 0 < lines(5) == lines(500)


def test_decodes_are_packed_like_rows() -> None:
    first = plan(Row(0, 0, 7, True, (0, 1)), Row(3, 0, 4, True, (2,)), inits=(init(0, 7), init(3, 4)))
    decodes = Decodes((0, 3), (7, 4), ((3, 6),))
    chunk = Row(1, 0, 4, True, (5,))
    adapted = replace(init(1, 4), adapter=2)
    found = []
    for step in (plan(*decodes.rows(), chunk, inits=(adapted,)), plan(chunk, inits=(adapted,), decodes=decodes)):
        batch = InputBatch(CAPACITY, torch.device("cpu"), adapters=(2,))
        batch.write_sampled(go(batch, first), torch.tensor([30, 31]))
        packed = go(batch, step)
        batch.write_sampled(packed, torch.tensor([40, 41, 42]), [40, 41, 42])
        columns = [list(column) for column in (*packed[1:9], packed.batch.cells)]
        blocks = [chunk.blocks.tolist() for chunk in packed.batch.chunks]
        found.append(
            (columns, blocks, batch.tokens.tolist(), go(batch, plan(decodes=Decodes((3,), (5,)))).read_indices.tolist())
        )
    assert found[0] == found[1]
    assert found[0][1] == [[2, 6], [0, 1], [5]], "the shortest first, chunks last"
    assert packed.adapters is not None
    assert packed.adapters.tolist() == [0, 0, 2, 2, 2, 2]


def test_steps_without_adapters_have_none() -> None:
    batch = InputBatch(CAPACITY, torch.device("cpu"), adapters=(2,))
    assert go(batch, plan(Row(0, 0, 4, True, (0,)), inits=(init(0, 4),))).adapters is None
    second = go(batch, plan(Row(1, 0, 4, True, (1,)), inits=(replace(init(1, 4), adapter=2),)))
    assert second.adapters is not None
    assert second.adapters.tolist() == [2, 2, 2, 2]
    assert go(batch, plan(decodes=Decodes((0,), (4,), ((0, 2),)))).adapters is None, "another slot has one"
    assert go(batch, plan(Row(1, 0, 4, True, (1,)), inits=(init(1, 4),))).adapters is None, "the next owner has none"


def test_touched_blocks_end_at_the_highest_block() -> None:
    batch = batch_with_one()
    assert batch.slots.num_touched_blocks == 5
    go(batch, plan(inits=(init(1, 8, blocks=(6,)),)))
    assert batch.slots.num_touched_blocks == 7, "shared ones count"
    go(batch, plan(Row(2, 6, 1, True)))
    go(batch, plan(decodes=Decodes((2,), (7,))))
    go(batch, plan(decodes=Decodes((2,), (8,), ((2, 8),))))
    assert batch.slots.num_touched_blocks == 9
    batch.slots.reset()
    assert batch.slots.num_touched_blocks == 0, "the next scheduler begins with the lowest again"


def test_tokens_of_a_step_that_failed_do_not_arrive_later() -> None:
    """As on a GPU: they were put for the step, which failed before it sent them."""
    staging = Staging(torch.device("cpu"), 1 << 16, is_direct=False)
    batch = InputBatch(CAPACITY, torch.device("cpu"), staging=staging)
    staging.begin()
    go(batch, plan(Row(2, 0, 6, True, (3, 4)), inits=(init(2, 6),)))
    batch.reset()
    staging.begin()
    go(batch, plan(Row(1, 0, 3, True, (5,)), inits=(init(1, 3),)))
    batch.send()
    assert batch.tokens[1, :3].tolist() == [1, 2, 3]
    assert not batch.tokens[2].any()
