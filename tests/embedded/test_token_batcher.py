"""Batcher: rows of a step, answers that equal those alone, token streams, preemption, prefix cache and failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.embedded import Gate, alone, model, next_token

from lineclear.embedded import Batcher, FinishReason, StepBatch
from lineclear.errors import InvalidRequest, KvCapacityExceeded, PromptTooLong
from lineclear.scheduler.core.policies import QUEUE_ORDERS, STRATEGIES


class SlotModel:
    """A model that keeps a state for each slot and reads only the tokens of its rows, as one with a KV cache does."""

    def __init__(self) -> None:
        self.states: dict[int, list[int]] = {}
        self.batches: list[StepBatch] = []

    def __call__(self, batch: StepBatch) -> list[int]:
        self.batches.append(batch)
        tokens = []
        for row in batch.rows:
            state = self.states[row.slot] = [] if row.is_new else self.states[row.slot]
            assert len(state) == row.start == row.positions.start
            state += row.tokens
            assert len(state) == row.positions.stop
            if row.samples:
                tokens.append(next_token(state))
        return tokens


def prompts(count: int, longest: int = 12) -> list[list[int]]:
    """Return `count` prompts of random lengths."""
    random.seed(count)
    return [[random.randrange(97) for _ in range(random.randint(1, longest))] for _ in range(count)]


def test_rows_join_and_leave_at_every_step(running: Callable[[Any], Any]) -> None:
    gate = Gate(model)
    batcher = running(Batcher(gate, max_batch_size=2))
    batcher.submit([5, 6, 7], 3)
    gate.wait_for_call()
    batcher.submit([8], 1)
    batcher.submit([9, 9], 1)
    gate.open()
    batcher.stop()
    shapes = [[(row.slot, row.start, len(row.tokens), row.is_new) for row in call.rows] for call in gate.calls]
    assert shapes == [
        [(0, 0, 3, True)],
        [(0, 3, 1, False), (1, 0, 1, True)],
        [(0, 4, 1, False), (1, 0, 2, True)],
    ]
    assert [call.total_tokens for call in gate.calls] == [3, 5, 7]
    assert [call.num_tokens for call in gate.calls] == [3, 2, 3]


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("policy", sorted(QUEUE_ORDERS))
def test_answers_equal_those_alone(strategy: str, policy: str) -> None:
    model, asked = SlotModel(), prompts(20)
    options = {"batching_strategy": strategy, "scheduling_policy": policy, "batch_timeout_ms": 1.0}
    with Batcher(model, max_batch_size=4, target_batch_tokens=8, max_model_len=32, **options) as batcher:
        answers = [batcher.submit(prompt, 1 + n % 7, tenant=str(n % 2)) for n, prompt in enumerate(asked)]
        assert [a.result().tokens for a in answers] == [alone(p, 1 + n % 7) for n, p in enumerate(asked)]
    assert max(len(batch.rows) for batch in model.batches) <= 4
    assert max(batch.num_tokens for batch in model.batches) <= 8


def test_preempted_sequences_start_again() -> None:
    model, asked = SlotModel(), prompts(12)
    with Batcher(model, max_batch_size=4, num_blocks=12, block_size=4, max_model_len=48) as batcher:
        answers = [batcher.submit(prompt, 30) for prompt in asked]
        assert [a.result().tokens for a in answers] == [alone(p, 30) for p in asked]
        assert batcher.stats().preemptions > 0
    assert sum(a.result().preemptions for a in answers) == batcher.stats().preemptions


def test_cached_prefix_is_read_through_blocks() -> None:
    cells: dict[tuple[int, int], int] = {}

    def paged(batch: StepBatch) -> list[int]:
        copied = {
            (copy.target, offset): cells[copy.source, offset]
            for copy in batch.copy_blocks
            for offset in range(copy.num_positions)
        }
        cells.update(copied)
        for row in batch.rows:
            for position, token in zip(row.positions, row.tokens, strict=True):
                cells[row.blocks[position // 4], position % 4] = token
        return [
            next_token([cells[row.blocks[p // 4], p % 4] for p in range(row.positions.stop)])
            for row in batch.sampling_rows
        ]

    prefix = list(range(16))
    with Batcher(paged, block_size=4, prefix_cache=True) as batcher:
        first = batcher.submit([*prefix, 1], 4).result()
        second = batcher.submit([*prefix, 2], 4).result()
        third = batcher.submit([*prefix[:14], 3], 4).result()
    assert first.tokens == alone([*prefix, 1], 4)
    assert second.tokens == alone([*prefix, 2], 4)
    assert third.tokens == alone([*prefix[:14], 3], 4)
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 16, 14)


def test_stop_token_ends_the_answer() -> None:
    whole = alone([1, 2, 3], 20)
    stop = whole[5]
    with Batcher(model) as batcher:
        done = batcher.submit([1, 2, 3], 20, stop_ids=[stop]).result()
    assert done.tokens == whole[: whole.index(stop) + 1]
    assert done.reason is FinishReason.STOP_TOKEN
    assert done.tokens_per_second > 0


def test_tokens_arrive_step_by_step(running: Callable[[Any], Any]) -> None:
    gate = Gate(model)
    batcher = running(Batcher(gate))
    answer = batcher.submit([1, 2], 3)
    stream = iter(answer)
    for index in range(3):
        gate.wait_for_call()
        assert not answer.done()
        gate.allow()
        assert next(stream) == alone([1, 2], 3)[index]
    assert list(stream) == []
    assert list(answer) == list(answer.tokens) == list(alone([1, 2], 3))


def test_tokens_arrive_in_asyncio() -> None:
    async def step(batch: StepBatch) -> list[int]:
        await asyncio.sleep(0)
        return model(batch)

    async def read(batcher: Batcher, prompt: Sequence[int]) -> list[int]:
        return [token async for token in batcher.submit(prompt, 9)]

    async def main() -> list[list[int]]:
        async with Batcher(step, max_batch_size=3) as batcher:
            return await asyncio.gather(*(read(batcher, prompt) for prompt in prompts(10)))

    assert asyncio.run(main()) == [list(alone(prompt, 9)) for prompt in prompts(10)]


def test_stream_raises_after_its_tokens(running: Callable[[Any], Any]) -> None:
    def fails(batch: StepBatch) -> list[Any]:
        return [KeyError("here") if len(row.context) == 4 else 7 for row in batch.sampling_rows]

    batcher = running(Batcher(fails))
    stream = iter(batcher.submit([1, 2], 9))
    assert [next(stream), next(stream)] == [7, 7]
    with pytest.raises(KeyError, match="here"):
        next(stream)


def test_failed_step_recomputes_its_sequences() -> None:
    model, asked, faults = SlotModel(), prompts(6), [3, 7]

    def step(batch: StepBatch) -> list[int]:
        if len(model.batches) in faults:
            faults.remove(len(model.batches))
            model.states.clear()
            raise OSError("lost")
        return model(batch)

    with Batcher(step, max_batch_size=3) as batcher:
        answers = [batcher.submit(prompt, 6) for prompt in asked]
        assert [a.result().tokens for a in answers] == [alone(prompt, 6) for prompt in asked]
        assert batcher.stats().failed_steps == 2


def test_requests_that_can_never_run_are_rejected() -> None:
    with Batcher(model, max_model_len=16, num_blocks=2, block_size=4) as batcher:
        with pytest.raises(PromptTooLong):
            batcher.submit([1] * 10, 7)
        with pytest.raises(KvCapacityExceeded):
            batcher.submit([1] * 8, 7)
        with pytest.raises(InvalidRequest):
            batcher.submit([], 1)
        assert batcher.stats().requests_rejected == 2


def test_stats_have_the_totals_of_the_last_step() -> None:
    with Batcher(model, max_batch_size=4) as batcher:
        batcher.submit([1, 2, 3], 4).result()
    stats = batcher.stats()
    assert (stats.steps, stats.rows, stats.mean_batch_size) == (4, 4, 1.0)
    assert stats.last_step is not None
    assert (stats.last_step.num_tokens, stats.last_step.total_tokens) == (1, 6)
