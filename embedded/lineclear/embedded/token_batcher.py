"""`Batcher`: schedules token sequences for a step function (iteration-level scheduling, Orca, Yu et al. 2022)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

from lineclear.embedded.answers import Answer
from lineclear.embedded.options import MAX_COUNT, Options, core_limits, deadline, real, token_ids, whole
from lineclear.embedded.step_loop import StepLoop
from lineclear.errors import InvalidRequest
from lineclear.scheduler.core.events import StepTokens
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import BlockCopy, Row, Sampling, SlotInit, StepPlan


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One row of a step: compute positions [start, start + len(tokens)) of the sequence in `slot`."""

    slot: int
    """Index of the sequence's state in the model, from 0 to max_batch_size - 1."""
    request_id: str
    is_new: bool
    """The slot has a new owner: forget its state, and compute from `start`."""
    start: int
    """Position of the first token; the positions before it are computed, or cached in `blocks` and by its copies."""
    tokens: tuple[int, ...]
    """Tokens to compute, at positions `start` and following."""
    samples: bool
    """The step function returns a token for this row."""
    context: Sequence[int]
    """The prompt and the output so far, `start + len(tokens)` of them or more. Do not change it or keep it."""
    blocks: Sequence[int]
    """Block table of the sequence, for a model with paged keys and values. Do not change it or keep it."""
    prompt_len: int
    data: Any
    """What the caller passed to `submit`."""

    @property
    def positions(self) -> range:
        """Return the positions of `tokens`."""
        return range(self.start, self.start + len(self.tokens))


@dataclass(frozen=True)
class StepBatch:
    """The rows of a step. A step function returns one token for each of `sampling_rows`, in order."""

    step: int
    rows: tuple[SlotRow, ...]
    copy_blocks: tuple[BlockCopy, ...] = ()
    """With `prefix_cache`: copies of leading positions between blocks, to make before the step writes keys and values.
    Read all sources before the first write."""

    @cached_property
    def sampling_rows(self) -> tuple[SlotRow, ...]:
        """The rows that sample."""
        return tuple(row for row in self.rows if row.samples)

    @property
    def num_tokens(self) -> int:
        """Return how many positions this step computes."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def total_tokens(self) -> int:
        """Return how many positions all rows hold, prompt and output together."""
        return sum(row.start + len(row.tokens) for row in self.rows)


StepFunction = (
    Callable[[StepBatch], Sequence[int | Exception]] | Callable[[StepBatch], Awaitable[Sequence[int | Exception]]]
)


class _Slot:
    """The sequence in a slot, as a worker keeps it."""

    def __init__(self, init: SlotInit) -> None:
        self.tokens = list(init.tokens)
        self.blocks = list(init.blocks)
        self.prompt_len = init.prompt_len


class Batcher(StepLoop[Answer]):
    """Schedules prompts for `step_fn(batch: StepBatch) -> Sequence[int]`, which computes one step.

    `step_fn` returns one token for each row of `batch.sampling_rows`, in order; an exception in place of a token fails
    that request alone. A blocking function runs in the batcher's thread. An `async def` runs on the event loop of
    `start`, or in that thread if no loop ran.

    `max_model_len` bounds prompt and answer together. `num_blocks` is the number of key and value blocks of
    `block_size` positions that sequences may hold; 0: enough for every slot. When they run out, a younger sequence is
    preempted and computed again. With `prefix_cache` sequences share the blocks of equal prefixes, and the model must
    read keys and values through `SlotRow.blocks` and make the copies of `StepBatch.copy_blocks`. `target_batch_tokens`
    bounds the positions of a step; 0: all.
    `target_inter_token_latency_ms` and `max_prefill_slowdown` cut long prompts into chunks beside decodes; 0 ms: never.
    """

    def __init__(
        self,
        step_fn: StepFunction,
        *,
        max_model_len: int = 4096,
        num_blocks: int = 0,
        block_size: int = 16,
        prefix_cache: bool = False,
        target_batch_tokens: int = 0,
        target_inter_token_latency_ms: float = 200.0,
        max_prefill_slowdown: float = 2.0,
        preemption_policy: str = "cheapest",
        max_preemptions: int = 4,
        max_queue_tokens: int = 1_000_000,
        **options: Unpack[Options],
    ) -> None:
        max_model_len = whole("max_model_len", max_model_len, 2, MAX_COUNT)
        num_blocks = whole("num_blocks", num_blocks, 0, MAX_COUNT)
        block_size = whole("block_size", block_size, 1, MAX_COUNT)
        target_batch_tokens = whole("target_batch_tokens", target_batch_tokens, 0, MAX_COUNT)
        max_queue_tokens = whole("max_queue_tokens", max_queue_tokens, 1, 2**62)
        max_preemptions = whole("max_preemptions", max_preemptions, 0, MAX_COUNT)
        max_prefill_slowdown = real("max_prefill_slowdown", max_prefill_slowdown, 1, 1_000_000)
        target_ms = real("target_inter_token_latency_ms", target_inter_token_latency_ms, 0, 86_400_000)
        limits = core_limits(
            options,
            max_queue_tokens=max_queue_tokens,
            target_batch_tokens=target_batch_tokens,
            preemption_policy=preemption_policy,
            max_preemptions=max_preemptions,
            prefix_cache=prefix_cache,
            target_step_seconds=target_ms / 1000,
            max_prefill_slowdown=max_prefill_slowdown,
        )
        num_slots = limits.max_batch_size
        super().__init__(
            step_fn,
            options,
            limits,
            # A quarter block for each running sequence stays free at an admission.
            num_blocks=num_blocks or num_slots * -(-max_model_len // block_size) + -(-num_slots // 4),
            block_size=block_size,
            max_model_len=max_model_len,
            max_step_tokens=target_batch_tokens or num_slots * max_model_len,
        )
        self._states: dict[int, _Slot] = {}

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
        priority: int = 128,
        timeout_seconds: float | None = None,
        tenant: str = "",
        request_id: str = "",
        data: Any = None,
    ) -> Answer:
        """Queue a prompt of token ids for at most `max_tokens` output tokens; any thread.

        The answer ends after a token of `stop_ids`, which it includes. `priority` 0 is served first under
        `scheduling_policy="priority"`. Raises QueueFull, PromptTooLong, KvCapacityExceeded, DuplicateRequest,
        InvalidRequest or ServerDraining.
        """
        tokens = token_ids("prompt", prompt)
        if not tokens:
            raise InvalidRequest("the prompt has 0 tokens; give at least 1")
        max_tokens = whole("max_tokens", max_tokens, 1, MAX_COUNT, InvalidRequest)
        min_tokens = whole("min_tokens", min_tokens, 0, max_tokens, InvalidRequest)
        number = next(self._numbers)
        answer = Answer(request_id or str(number), number, self._cancel_request, data)
        stops = frozenset(token_ids("stop_ids", stop_ids))
        request = Request(
            answer.request_id,
            tokens,
            Sampling(seed=number, stop_ids=tuple(stops), min_tokens=min_tokens),
            max_tokens,
            stop_ids=stops,
            priority=whole("priority", priority, 0, 255, InvalidRequest),
            deadline=deadline(timeout_seconds),
            tenant=tenant,
        )
        return self._submit(request, answer)

    def _compute(self, plan: StepPlan, futures: list[Answer | None]) -> list[Any]:
        for init in plan.inits:
            self._states[init.slot] = _Slot(init)
        new_slots = {init.slot for init in plan.inits}
        rows = tuple(self._row(row, row.slot in new_slots) for row in plan.rows)
        batch = StepBatch(plan.step, rows, plan.copy_blocks)
        found = self._call(batch, len(batch.sampling_rows))
        for index, row in enumerate(batch.sampling_rows):
            if not isinstance(found[index], Exception):
                found[index] = int(found[index])
                self._states[row.slot].tokens.append(found[index])
        return found

    def _row(self, row: Row, is_new: bool) -> SlotRow:
        state, number = self._states[row.slot], self._slots[row.slot]
        state.blocks += row.new_blocks
        answer = self._by_number.get(number)
        return SlotRow(
            row.slot,
            str(number) if answer is None else answer.request_id,
            is_new,
            row.start,
            tuple(state.tokens[row.start : row.start + row.num_tokens]),
            row.sample,
            state.tokens,
            state.blocks,
            state.prompt_len,
            None if answer is None else answer.data,
        )

    def _sizes(self, plan: StepPlan) -> tuple[int, int]:
        return plan.num_tokens, sum(row.start + row.num_tokens for row in plan.rows)

    def _on_tokens(self, event: StepTokens) -> None:
        for request_id, token in zip(event.request_ids, event.tokens, strict=True):
            if (answer := self._futures.get(request_id)) is not None:
                answer.add_token(token)
