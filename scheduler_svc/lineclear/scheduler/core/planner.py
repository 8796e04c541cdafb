"""Builds one StepPlan: which positions of which sequences, within the step's tokens and the free blocks.

Running sequences go first, oldest first, so that waiting requests never starve them. Prompts are computed in chunks
beside the decodes, without stalling them (Sarathi-Serve, Agrawal et al. 2024).
"""

from __future__ import annotations

from functools import cached_property

from lineclear.scheduler.core.block_pool import Donor
from lineclear.scheduler.core.core_state import SharedState, WorkerState
from lineclear.scheduler.core.drafts import DraftPlan
from lineclear.scheduler.core.events import Event, Started
from lineclear.scheduler.core.inflight_step import ChunkRow, InflightStep, kv_of_drafts
from lineclear.scheduler.core.placement import Placement
from lineclear.scheduler.core.policies import PREEMPTION_POLICIES
from lineclear.scheduler.core.request_queue import QueueWalk
from lineclear.scheduler.core.sequence import Sequence, State
from lineclear.wire.messages import BlockCopy, Decodes, Row, RowOutput, SlotInit, StateCopy

_MAX_UNFIT = 8  # waiting sequences without enough blocks that a step skips before it stops admitting
_MAX_SKIPPED = 64  # the same, together with those left to other workers
_MIN_CHUNK, _MAX_FREE_CHUNK = 8, 16
"""Prompt tokens a step may always take, even above the latency target: as many as decodes, within these bounds."""
_DRAFT_SHARE = 0.5
"""Of the surplus of one prompt, for drafts beside a prompt and streams without drafts."""
_LEAST_SURPLUS = 0.5
"""Of the surplus that prompts get beside decodes, where the step-time model errs: so much is left to them."""


class StepPlanner:
    """Builds one plan of a worker. After `run`, `decodes`, `chunks` and the rest hold it; no rows: nothing can run."""

    def __init__(self, state: SharedState, worker: WorkerState, now: float) -> None:
        self._state = state
        self._worker = worker
        self._batch = worker.batch
        self.step = InflightStep(worker.step + 1, planned_at=now, is_ahead=bool(worker.inflight))
        """The step as the core keeps it in flight."""
        self._budget = worker.step_tokens
        self._now = now
        self._is_short_of_blocks = False  # a running sequence waited or was preempted: no request joins in this step
        self._decode_tokens = self._decode_kv_tokens = 0  # without drafts
        self._prompt_tokens = 0
        self._max_seconds: float | None = None
        self.decodes = Decodes()
        self.chunks: list[Row] = []
        self.inits: list[SlotInit] = []
        self.copies: list[BlockCopy] = []
        self.state_copies: list[StateCopy] = []
        self.events: list[Event] = []
        if self._batch.swap is not None:
            self._batch.swap.begin_plan()
        self._finishing: list[Sequence] = []  # their last row is in this step

    def run(self) -> None:
        if self._state.queue_order.prefill_first:
            self._plan_prefills()
            self._admit()
            self._plan_decodes()
        else:
            self._plan_decodes()
            self._plan_prefills()
            self._admit()
        self._end_plan()

    def _end_plan(self) -> None:
        """Keep the states that earlier plans left, and free the slots of sequences with their last row in this step.

        One with a grammar keeps its slot until the result: its last row may be deferred, and its mask is on the worker.
        """
        pool = self._batch.pool
        pool.end_plan()
        if pool.states is not None and self.step.num_rows:
            self.state_copies += pool.states.end_plan()
        for sequence in self._finishing:
            if not sequence.request.is_constrained:
                self._batch.release_slot(sequence)
            elif sequence.in_decode_batch:
                self._batch.leave_decode(sequence)

    def run_isolated(self, sequence: Sequence) -> None:
        """Plan a step for `sequence` alone; preempt other sequences if it needs their blocks."""
        batch = self._batch
        batch.dissolve_decode()
        if sequence.state is State.WAITING:
            if sequence.in_flight == 0 and self._preempt_for_blocks(sequence):
                shared = batch.cached_prefix(sequence)
                self._start(sequence, shared, batch.find_donors(sequence, shared))
        elif sequence.num_unplanned > 0:
            needs_block = sequence.num_planned == len(sequence.blocks) * batch.pool.block_size
            if needs_block:
                if not self._preempt_for_blocks(sequence):
                    return
                sequence.blocks += batch.pool.take(1)
            count = min(sequence.num_unplanned, self._prompt_tokens_left(sequence))
            new_blocks = tuple(sequence.blocks[-1:]) if needs_block else ()
            self._add(sequence, count, new_blocks, is_prompt=sequence.is_prefilling)
        self._end_plan()

    def _preempt_for_blocks(self, sequence: Sequence) -> bool:
        """Preempt others, youngest first, until a slot and blocks are free for the next row of `sequence`."""
        batch = self._batch
        for other in (*reversed([s for s in batch.by_age() if s is not sequence]), None):
            if sequence.state is State.RUNNING:
                enough = batch.pool.num_free > 0
            else:
                shared = batch.cached_prefix(sequence)
                enough = batch.num_free_slots > 0 and batch.has_room(sequence, shared, headroom=0)
            if enough:
                return True
            if other is not None:
                self._preempt(other)
        return False

    def _plan_decodes(self) -> None:
        """Plan the sequences that lack one position: as one decode step if tokens and blocks suffice for all."""
        batch, tokens_left = self._batch, self._budget - self.step.num_tokens
        if batch.decode_batch.resting and (sequence := self._drafting.next_trial()) is not None:
            batch.leave_decode(sequence)
        ready: list[Sequence] = []
        if batch.not_decoding:
            ready = [s for s in batch.not_decoding_by_age() if s.is_decoding and s.planned_step != self.step.step]
        if tokens_left <= 0 or not (ready or batch.decode_batch):
            return
        singles, drafting = self._without_batch(ready) if ready else ([], None)
        growing = batch.decode_batch.needing_block()
        num_rows, num_blocks = len(batch.decode_batch) + len(singles), len(growing)
        if drafting is not None:
            num_rows, num_blocks = num_rows + len(drafting), num_blocks + drafting.num_blocks
        if num_rows > tokens_left or num_blocks > batch.pool.num_free:
            self._plan_decodes_one_by_one()
            return
        if batch.decode_batch:
            self._plan_decode_batch(growing)
        for sequence in singles:
            self._add(sequence, 1, ())
        if drafting is not None:
            self._plan_drafts(drafting)

    def _plan_drafts(self, drafting: DraftPlan) -> None:
        """Plan rows with drafts. They delay streams without drafts no more than a prompt does."""
        policy, max_seconds = self._state.limits.policy, None
        if self.step.num_tokens and policy.target_inter_token_latency_seconds and self._worker.step_time.is_fitted:
            alone = self.step.num_tokens + len(drafting), self.step.kv_tokens + drafting.kv_tokens
            max_seconds = self._seconds_beside(*alone, _DRAFT_SHARE if self._has_prompts() else 1)
        while drafting:
            sequence, num_drafts, blocks = drafting.next(self._draft_tokens_left(drafting, max_seconds))
            self._add(sequence, 1, blocks, num_drafts=num_drafts)

    @cached_property
    def _drafting(self) -> DraftPlan:
        worker = self._worker
        return DraftPlan(self._state.limits, worker.batch, worker.step_time, worker.draft_costs)

    def _without_batch(self, ready: list[Sequence]) -> tuple[list[Sequence], DraftPlan | None]:
        """Let sequences that lack one position join the decode batch; return those that need a row of their own.

        Those are first tokens and recomputed positions, which are counted one by one as chunks, and those with drafts.
        """
        singles: list[Sequence] = []
        drafting: DraftPlan | None = None
        for sequence in ready:
            is_first = sequence.first_token_at is None and not sequence.in_flight
            if is_first or sequence.num_planned < sequence.max_computed_before:
                singles.append(sequence)
            elif sequence.request.max_drafts and self._drafting.takes(sequence):
                drafting = self._drafting
            else:
                self._batch.join_decode(sequence)
        return singles, drafting or None

    def _plan_decode_batch(self, growing: list[Sequence]) -> None:
        """Plan a row for every member of the decode batch, and a further block for the `growing` members."""
        batch, decode_batch = self._batch, self._batch.decode_batch
        new_blocks = []
        for sequence, block in zip(growing, batch.pool.take(len(growing)), strict=True):
            sequence.blocks.append(block)
            new_blocks.append((sequence.slot, block))
        step = self.step
        step.decode_rows = rows = decode_batch.next_step(step.step)
        step.decode_step = decode_step = decode_batch.decode_step
        self.decodes = Decodes(rows.slots, tuple([offset + decode_step for offset in rows.offsets]), tuple(new_blocks))
        step.completing_block = decode_batch.completing_block()
        if batch.pool.states is not None:
            for sequence in step.completing_block:
                batch.keep_answer_state(sequence, sequence.decode_offset + decode_step + 1)
        step.num_tokens += len(rows.slots)
        step.kv_tokens += decode_batch.num_positions
        self._decode_tokens += len(rows.slots)
        self._decode_kv_tokens += decode_batch.num_positions
        self._finishing += decode_batch.finishing()

    def _plan_decodes_one_by_one(self) -> None:
        """Plan decodes oldest first, when tokens or blocks do not suffice for all of them."""
        batch = self._batch
        batch.dissolve_decode()
        size = batch.pool.block_size
        for sequence in batch.by_age():
            if self.step.num_tokens >= self._budget:
                break
            # Skip sequences preempted in this pass, sequences with a row already, and those that do not lack one.
            is_running = sequence.state is State.RUNNING
            if not is_running or sequence.planned_step == self.step.step or not sequence.is_decoding:
                continue
            if sequence.num_planned < len(sequence.blocks) * size:
                self._add(sequence, 1, ())
            elif (block := self._take_block_or_preempt(sequence)) is not None:
                sequence.blocks.append(block)
                self._add(sequence, 1, (block,))

    def _take_block_or_preempt(self, sequence: Sequence) -> int | None:
        """Take a block, preempting younger sequences if necessary; None if no sequence may be preempted.

        Then `sequence` waits, and that is safe: an older sequence progresses, or the younger ones are protected, have
        all blocks they need, and will finish.
        """
        pool = self._batch.pool
        while pool.num_free == 0:
            self._is_short_of_blocks = True
            younger = [
                s
                for s in self._batch.running
                if s.queue_key > sequence.queue_key and not s.protected and s.planned_step != self.step.step
            ]
            if not younger:
                return None
            self._preempt(PREEMPTION_POLICIES[self._state.limits.preemption_policy](younger))
        return pool.take(1)[0]

    def _preempt(self, victim: Sequence) -> None:
        swap = self._batch.swap
        blocks = [] if swap is None else self._batch.confirmed_blocks(victim)
        self.events.append(self._state.preempt(self._worker, victim))
        if swap is not None and (copies := swap.swap_out(victim, blocks, self._batch.pool, self._worker.step_time)):
            self.copies += copies
            self._state.counters.swapped_out_tokens += len(copies) * self._batch.pool.block_size

    def _plan_prefills(self) -> None:
        """Plan the next chunk of prompts that are partly computed. They have their blocks since admission."""
        for sequence in self._batch.not_decoding_by_age() if self._batch.not_decoding else ():
            if sequence.is_prefilling and sequence.planned_step != self.step.step:
                count = min(sequence.num_unplanned, self._prompt_tokens_left(sequence))
                if count <= 0:
                    break
                self._add_prompt(sequence, count, ())

    def _draft_tokens_left(self, drafting: DraftPlan, max_seconds: float | None) -> int:
        """Return how many tokens the rows of `drafting` may take in a step of `max_seconds`."""
        tokens_left = self._budget - self.step.num_tokens
        if max_seconds is None:
            return tokens_left
        tokens, kv_tokens = self.step.num_tokens + len(drafting), self.step.kv_tokens + drafting.kv_tokens
        fitting = self._worker.step_time.chunk_within(max_seconds, tokens, kv_tokens, 0, drafting.deepest)
        return min(tokens_left, len(drafting) + int(fitting))

    def _prompt_tokens_left(self, sequence: Sequence | None = None, position: int | None = None) -> int:
        """Return how many tokens of a prompt fit into this step without delaying its decodes.

        They continue `sequence`, or begin at `position` of it; None: an unknown prompt from its beginning on.
        """
        tokens_left = self._budget - self.step.num_tokens
        decodes = self._decode_tokens
        if not decodes or not self._state.limits.policy.target_inter_token_latency_seconds:
            return tokens_left
        if self._max_seconds is None:
            self._max_seconds = self._seconds_beside(decodes, self._decode_kv_tokens, self._num_expecting())
        if position is None:
            position = 0 if sequence is None else sequence.num_planned
        is_scored = sequence is not None and sequence.is_scored_at(position)
        model, step = self._worker.step_time, self.step
        work = step.num_tokens, step.kv_tokens, step.num_scored
        fitting = model.chunk_within(self._max_seconds, *work, position, is_scored=is_scored)
        cost = model.cost_of_score
        free_chunk = min(max(_MIN_CHUNK, decodes), _MAX_FREE_CHUNK) - self._prompt_tokens - (cost - 1) * step.num_scored
        free_tokens = int(free_chunk / cost if is_scored else free_chunk)
        if not self._prompt_tokens:
            free_tokens = max(1, free_tokens)
        return min(tokens_left, max(free_tokens, int(fitting)))

    def _has_prompts(self) -> bool:
        state = self._state
        return bool(state.fresh or state.resuming or any(s.is_prefilling for s in self._batch.not_decoding))

    def _num_expecting(self) -> int:
        """Return the number of requests that wait for their first token, at least 1.

        All scores and embeddings together count as one request: none of them joins the decodes.
        """
        state = self._state
        computing = sum(s.num_unplanned > 1 and s.request.max_tokens > 0 for s in self._batch.not_decoding)
        return max(1, state.fresh.num_with_output + state.resuming.num_with_output + computing)

    def _seconds_beside(self, decodes: int, kv_tokens: int, shares: float) -> float:
        """Return how long this step may take: longer than its decodes alone by `shares` of the surplus that
        `max_prefill_slowdown` allows, and at most the inter-token target.

        The step is planned to be shorter than that by the error of the step-time model.
        """
        policy, model = self._state.limits.policy, self._worker.step_time
        surplus = (policy.max_prefill_slowdown - 1) * shares
        stretch = max(1 + _LEAST_SURPLUS * surplus, (1 + surplus) / model.error_factor)
        return min(policy.target_inter_token_latency_seconds, stretch * model.predict(decodes, kv_tokens))

    def _admit(self) -> None:
        """Admit waiting sequences by queue key."""
        state, worker = self._state, self._worker
        if self._is_short_of_blocks or not (state.fresh or state.resuming) or not state.takes_requests(worker):
            return
        if self._batch.num_free_slots:
            joins_left = worker.strategy.max_joins(state.batching_state(worker, self._now)) if state.fresh else 0
            self._admit_from(QueueWalk(state.resuming, state.fresh), Placement(state, worker, self._now), joins_left)

    def _admit_from(self, queue: QueueWalk, placement: Placement, joins_left: int) -> None:
        """Admit the sequences for which a slot, tokens and blocks are left, and up to `joins_left` that start.

        A sequence that does not fit, waits for a state or is left to another worker may be overtaken a bounded number
        of times; then admission waits for it. One whose prompt begins like an older one in progress starts behind it:
        the older prompt takes the tokens of each step first.
        """
        state, batch = self._state, self._batch
        skipped: list[Sequence] = []
        num_unfit = 0
        while batch.num_free_slots and self._prompt_tokens_left() > 0:
            if num_unfit >= _MAX_UNFIT or len(skipped) >= _MAX_SKIPPED:
                return
            sequence = queue.next(with_fresh=joins_left > 0)
            if sequence is None:
                return
            if not state.may_take(self._worker, sequence):
                continue
            # The values of samples in flight are not known here yet, and no later sequence may overtake this one.
            if sequence.in_flight > 0:
                return
            shared = batch.cached_prefix(sequence)
            if not batch.has_room(sequence, shared, batch.headroom):
                skipped.append(sequence)
                num_unfit += 1
                continue
            if batch.awaits_state(sequence) or placement.leaves(sequence, shared, self.step.num_tokens):
                skipped.append(sequence)
                continue
            donors = batch.find_donors(sequence, shared)
            # A token deep in a context may cost more than this step has left; then the prompt starts in the next step.
            num_cached = len(shared) * batch.pool.block_size + sum(donor.num_positions for donor in donors)
            if self._prompt_tokens_left(sequence, num_cached) <= 0:
                return
            if any(other.overtaken_count >= state.limits.max_queue_overtakes for other in skipped):
                return
            for other in skipped:
                other.overtaken_count += 1
            if sequence in state.fresh:
                joins_left -= 1
                self._worker.strategy.on_join()
                state.refusing = False
            self._start(sequence, shared, donors)

    def _start(self, sequence: Sequence, shared: list[int], donors: list[Donor]) -> None:
        state = self._state
        (state.fresh if sequence in state.fresh else state.resuming).remove(sequence)
        positions = sequence.max_len - 1
        if not sequence.protected:
            positions = min(positions, sequence.num_known)
        if (states := self._batch.pool.states) is not None:
            state.counters.prefix_cache_stateless_tokens += self._batch.set_boundaries(sequence, shared)
        taken = self._batch.admit(sequence, shared, donors, positions)
        self.copies += [BlockCopy(x.block, target, x.num_positions) for x, target in zip(donors, taken, strict=False)]
        if shared and states is not None:
            self.state_copies.append(StateCopy(states.load(shared[-1]), sequence.slot))
        num_swapped = 0
        if sequence.preemptions:
            num_swapped = sum(x.num_positions for x in donors if x.block >= self._batch.pool.num_blocks)
            state.counters.swapped_in_tokens += num_swapped
            state.drop_swapped(sequence)
        sequence.epoch, sequence.wait_until, sequence.resumed_at = self._worker.epoch, None, self._now
        start = sequence.num_planned
        if counts_prompt := not sequence.request.shares_prompt:
            state.counters.prefix_cache_queries += len(sequence.tokens)
            state.counters.prefix_cache_hits += start - num_swapped
        if sequence.started_at is None:
            state.queue_order.on_start(sequence)
            sequence.started_at = self._now
            sequence.cached_tokens = start
            state.counters.prompt_tokens += sequence.prompt_len if counts_prompt else 0
            where = (sequence.slot, self.step.step, start, state.model_fingerprint, sequence.epoch)
            self.events.append(Started(sequence.request.request_id, *where))
        self.inits.append(self._init_of(sequence, shared))
        count = min(sequence.num_unplanned, self._prompt_tokens_left(sequence))
        self._add_prompt(sequence, count, tuple(taken))

    def _init_of(self, sequence: Sequence, shared: list[int]) -> SlotInit:
        request = sequence.request
        return SlotInit(
            sequence.slot,
            tuple(sequence.tokens),
            sequence.prompt_len,
            tuple(shared),
            request.sampling,
            self._state.adapters.index(request.adapter) if request.adapter else 0,
            0 if request.scoring is None else request.scoring.num_top,
            request.pooling,
        )

    def _add_prompt(self, sequence: Sequence, count: int, new_blocks: tuple[int, ...]) -> None:
        before = self.step.num_tokens
        self._add(sequence, count, new_blocks, is_prompt=True)
        self._prompt_tokens += self.step.num_tokens - before

    def _add(
        self,
        sequence: Sequence,
        count: int,
        new_blocks: tuple[int, ...],
        *,
        is_prompt: bool = False,
        num_drafts: int = 0,
    ) -> None:
        assert count > 0, "a row without a position"
        step, start = self.step, sequence.num_planned
        end, output = sequence.next_row(start + count)
        count = end - start
        self.chunks.append(Row(sequence.slot, start, count, output, new_blocks, num_drafts))
        step.chunk_rows.append(ChunkRow(sequence, sequence.admission_count, start, end, output, num_drafts))
        if start < sequence.max_computed_before:
            again = min(end, sequence.max_computed_before) - start
            sequence.recomputed_tokens += again
            self._state.counters.recomputed_tokens += again
        sequence.num_planned = end
        sequence.planned_step = step.step
        self._batch.publish_planned(sequence, step.step, is_prompt=is_prompt)
        if not is_prompt:
            self._batch.keep_answer_state(sequence, end)
        if output is RowOutput.SAMPLE:
            sequence.num_known += 1
        if sequence.num_planned == sequence.max_len - 1:
            self._finishing.append(sequence)
        kv_tokens = count * (start + end + 1) // 2
        step.num_tokens += count
        step.kv_tokens += kv_tokens
        if output is RowOutput.SCORE:
            step.num_scored += count
        if not is_prompt:
            self._decode_tokens += count
            self._decode_kv_tokens += kv_tokens
        if num_drafts:
            sequence.num_drafts, step.has_drafts = num_drafts, True
            step.num_tokens += num_drafts
            step.kv_tokens += kv_of_drafts(end, num_drafts)
