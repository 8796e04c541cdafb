"""`Batcher`: schedules token sequences for a step function (iteration-level scheduling, Orca, Yu et al. 2022)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

from lineclear.embedded import numbers
from lineclear.embedded.answers import Answer
from lineclear.embedded.numbers import MAX_COUNT, MAX_TOKEN, real, token_ids, whole
from lineclear.embedded.options import Options, core_limits
from lineclear.embedded.stats import StepTotals
from lineclear.embedded.step_loop import StepLoop
from lineclear.errors import InvalidRequest
from lineclear.scheduler.core.events import Finished, StepTokens
from lineclear.scheduler.core.sequence import Request
from lineclear.wire.messages import BlockCopy, Hello, Row, Sampling, SlotInit, StepPlan


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
        self.number = init.sampling.seed
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
        capacity = Hello(
            epoch=1,
            # A quarter block for each running sequence stays free at an admission.
            num_blocks=num_blocks or num_slots * -(-max_model_len // block_size) + -(-num_slots // 4),
            block_size=block_size,
            num_slots=num_slots,
            max_model_len=max_model_len,
            vocab_size=MAX_TOKEN,
            eos_token_ids=(),
            max_step_tokens=target_batch_tokens or num_slots * max_model_len,
        )
        super().__init__(step_fn, limits, capacity, options.get("on_error", "isolate"))
        self._slots: dict[int, _Slot] = {}
        self._by_number: dict[int, Answer] = {}

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
        number = self._next_number()
        answer = Answer(request_id or str(number), number, self._cancel_request, data)
        stops = frozenset(token_ids("stop_ids", stop_ids))
        request = Request(
            answer.request_id,
            tokens,
            Sampling(seed=number, stop_ids=tuple(stops), min_tokens=min_tokens),
            max_tokens,
            stop_ids=stops,
            priority=numbers.priority(priority),
            deadline=numbers.deadline(timeout_seconds),
            tenant=tenant,
        )
        return self._submit(request, answer)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _compute(self, plan: StepPlan, futures: list[Answer | None]) -> tuple[Sequence[int], Sequence[int]]:
        batch = self._batch(plan)
        found = list(self._call(batch))
        sampling_rows = batch.sampling_rows
        if len(found) != len(sampling_rows):
            raise ValueError(f"the step function returned {len(found)} tokens for {len(sampling_rows)} sampling rows")
        bad = [index for index, entry in enumerate(found) if isinstance(entry, Exception)]
        for index in bad:
            if (answer := futures[index]) is not None:
                answer.failure = found[index]
            found[index] = 0
        tokens = [int(token) for token in found]
        for row, token in zip(sampling_rows, tokens, strict=True):
            self._slots[row.slot].tokens.append(token)
        return tokens, bad

    def _batch(self, plan: StepPlan) -> StepBatch:
        """Return the plan's rows with their tokens. Decodes come first, as in the result."""
        for init in plan.inits:
            self._slots[init.slot] = _Slot(init)
        new_slots = {init.slot for init in plan.inits}
        rows = tuple(self._row(row, row.slot in new_slots) for row in plan.rows)
        return StepBatch(plan.step, rows, plan.copy_blocks)

    def _row(self, row: Row, is_new: bool) -> SlotRow:
        slot = self._slots[row.slot]
        slot.blocks += row.new_blocks
        answer = self._by_number.get(slot.number)
        return SlotRow(
            row.slot,
            str(slot.number) if answer is None else answer.request_id,
            is_new,
            row.start,
            tuple(slot.tokens[row.start : row.start + row.num_tokens]),
            row.sample,
            slot.tokens,
            slot.blocks,
            slot.prompt_len,
            None if answer is None else answer.data,
        )

    def _totals(self, plan: StepPlan, seconds: float) -> StepTotals:
        held = sum(row.start + row.num_tokens for row in plan.rows)
        return StepTotals(plan.step, plan.num_rows, plan.num_tokens, held, seconds)

    def _futures_in(self, plan: StepPlan) -> list[Answer]:
        slots = {init.slot: init.sampling.seed for init in plan.inits}
        numbers = [slots.get(row.slot) or self._slots[row.slot].number for row in plan.rows]
        return [self._by_number[number] for number in numbers if number in self._by_number]

    # --- requests ---------------------------------------------------------------------------------------------------

    def _on_submit(self, future: Answer) -> None:
        self._by_number[future.number] = future

    def _on_end(self, future: Answer) -> None:
        self._by_number.pop(future.number, None)

    def _on_tokens(self, event: StepTokens) -> None:
        for request_id, token in zip(event.request_ids, event.tokens, strict=True):
            answer = self._futures.get(request_id)
            if answer is not None:
                answer.add_token(token)

    def _on_finished(self, future: Answer, event: Finished) -> None:
        future.finish(event)
