"""Checks of a plan: which sequences have a row, how many positions it computes, and which blocks it takes.

Each plan is checked and then applied to the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import takewhile

from simulation.invariant_error import require
from simulation.model_placement import ModelPlacement
from simulation.model_sequence import ModelSequence
from simulation.model_state import ModelState, must_isolate
from simulation.model_workers import ModelStep, ModelWorker

from lineclear.scheduler.core.events import Event, Preempted, Started
from lineclear.wire.messages import BlockCopy, Row, RowOutput, SlotInit, StepPlan


class PlanChecks:
    """Checks each plan against the model and applies it."""

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self.placement = ModelPlacement(state)
        self.worker: ModelWorker  # that the plan is for
        self.grown: set[ModelSequence] = set()  # sequences that take a block in the plan
        self.num_released = 0  # slots whose owners have their last row in the last plan
        self.has_tokens_left = False  # after a plan: certainly enough to admit another request

    def on_plan(self, epoch: int, plan: StepPlan | None, now: float, events: list[Event]) -> None:
        """Check a plan of a worker, or None, and the events that `drain_events` returned after it."""
        if plan is None:
            require(events == [], "I13", "without a plan no request starts or is preempted")
        worker = self.state.workers.get(epoch)
        if worker is None:
            return require(plan is None, "I9", "no plan for a worker that is lost")
        self.worker = worker
        self.placement.begin_plan(now)
        require(plan is None or not worker.is_full, "I9", "within the pipeline depth")
        if worker.is_full or not self.state.live:
            return None
        isolated = self._isolated()
        if plan is None:
            self._check_no_plan(isolated, now)
        else:
            self._check_plan(plan, isolated, now, events)
        if self.state.takes_requests(worker):
            self._check_head(plan, isolated, now)
        return self.placement.note_passed(worker, now)

    def _isolated(self) -> ModelSequence | None:
        """Return the suspect that this worker must run alone, if any, and keep track of the worker that does so."""
        reserved = self.state.next_isolated()
        if reserved is None or reserved[1].epoch != self.state.isolating:
            self.state.isolating = None
        if reserved is None or reserved[1] is not self.worker:
            return None
        if self.state.isolating is None:
            if self.worker.running and len(self.state.workers) > 1:
                return None  # its own requests go on to their end
            self.state.isolating = self.worker.epoch
        return reserved[0]

    def _check_plan(self, plan: StepPlan, isolated: ModelSequence | None, now: float, events: list[Event]) -> None:
        hello = self.worker.hello
        require((plan.epoch, plan.step) == (hello.epoch, self.worker.step + 1), "I9", "steps of an epoch in order")
        self.worker.step += 1
        budget = self.worker.budget.tokens(hello)
        running = sorted(self.worker.running.values(), key=lambda s: s.queue_key)
        ready = [s for s in running if s.num_unplanned == 1 and s.max_tokens]
        partial = [s for s in running if s.num_unplanned > 0 and s not in ready]
        self._check_cadence(plan, ready, partial, isolated, events, budget)
        slots = {row.slot for row in plan.rows}
        require(0 < len(slots) == len(plan.rows), "I6", "each slot once in a step, and a step with rows")
        started = self._started(events)
        victims = deque(self.state.live[e.request_id] for e in events if isinstance(e, Preempted))
        num_preempted = len(victims)
        prompts_first = self.state.limits.scheduling_policy == "prefill_first"
        waiting = deque(ready)  # decodes without a row so far, oldest first
        is_open = isolated is None and self.worker.batching.is_open(now)
        step = ModelStep(plan.step)
        self.worker.states.begin_plan(plan.copy_states)
        within = self.worker.swap.begin_plan(plan.copy_blocks)
        copies = {copy.target: copy for copy in within}
        require(len(copies) == len(within), "I4", "each block is the target of one copy")
        if isolated is not None:
            self._preempt_for_suspect(victims, isolated)
        inits = {init.slot: init for init in plan.inits}
        require(len(inits) == len(plan.inits), "I6", "each slot initialised once")
        zeroed = set(plan.zero_blocks)
        require(len(zeroed) == len(plan.zero_blocks), "I18", "each block zeroed once")
        self.grown.clear()
        total = num_decodes = 0
        # In the order of planning, which is the order in which blocks were handed out.
        rows = plan.rows
        if prompts_first:
            is_decode = [r.slot not in inits and self.worker.running.get(r.slot) in ready for r in plan.chunks]
            prompts = [r for r, late in zip(plan.chunks, is_decode, strict=True) if not late]
            rows = (*prompts, *plan.decodes.rows(), *(r for r in plan.chunks if r not in prompts))
        for row in rows:
            joins, num_running, copied = row.slot in inits, len(self.worker.running), list[BlockCopy]()
            if victims and self.worker.running.get(row.slot) in waiting:
                self._preempt_for_decodes(victims, waiting, step, until=self.worker.running[row.slot])
            if joins:
                copied = [copies.pop(block) for block in takewhile(copies.__contains__, row.new_blocks)]
                self._apply_init(inits.pop(row.slot), copied, step, started, is_open, now, isolated)
            # So a request that ended costs only the steps in flight at its end.
            require(row.slot in self.worker.running, "I16", "every row belongs to a live request")
            sequence = self.worker.running[row.slot]
            deadline = sequence.request.deadline
            require(deadline is None or deadline > now, "I16", "no plan has a request whose deadline has passed")
            self._apply_row(sequence, row, step, zeroed, num_copied=len(copied))
            if row in plan.chunks:
                is_prompt = joins or sequence in partial
                self.worker.blocks.publish_planned(sequence, plan.step, is_prompt=is_prompt)
            if row not in plan.chunks or not is_prompt:
                self.worker.blocks.keep_answer_state(sequence, sequence.num_planned, len(self.worker.running))
            if joins and isolated is None:
                free = self.worker.blocks.num_free
                require(free >= -(-num_running // 4), "I5", "admission leaves headroom for running sequences")
            total += row.num_tokens + row.num_drafts
            step.num_tokens = total
            num_decodes += sequence in ready
        self._preempt_for_decodes(victims, waiting, step)
        require(not victims, "I15", "a victim is younger than a sequence that is short of a block")
        place = {row.slot: index for index, row in enumerate(plan.rows)}
        step.rows.sort(key=lambda entry: place[entry[0].slot])
        step.samples.sort(key=lambda sequence: place[sequence.slot])
        step.outputs.sort(key=lambda entry: place[entry[0].slot])
        require(not inits and not started, "I6", "a request that starts has a row")
        require(not zeroed, "I18", "only tainted blocks that are handed out are zeroed")
        require(not copies, "I4", "only requests that start get copies")
        self.worker.swap.end_plan()
        self.worker.states.end_plan()
        self.worker.blocks.end_plan()
        require(total <= budget, "I6", "no more tokens than the budget")
        fits = len(self.worker.running) <= self.worker.num_slots or not plan.inits
        require(fits, "I6", "no more sequences than slots, but for those that a smaller number of slots finds running")
        is_waiting = any(s.is_running and s.slot not in slots and not s.may_wait_for_drafts for s in ready)
        is_short = num_preempted > 0 or is_waiting
        drafts = sum(row.num_drafts for row in plan.chunks)
        require(not (drafts and num_preempted), "I15", "nothing is preempted for drafts")
        require(not drafts or isolated is None, "isolation", "a suspect decodes plainly")
        has_prompts = bool(plan.inits) or any(sequence.slot in slots for sequence in partial)
        # Beside decodes, the inter-token target may leave a prompt fewer tokens than the budget. And each of several
        # workers counts the prompts of its plan as work.
        is_exact = num_decodes == 0 or self.state.limits.policy.target_inter_token_latency_seconds == 0
        is_exact = is_exact and len(self.state.workers) == 1 and self.state.limits.batching_strategy == "continuous"
        self.has_tokens_left = total < budget and not is_short and (is_exact or not has_prompts)
        if isolated is None:
            self._check_age_order(slots, ready, partial, budget, num_decodes)
        else:
            rows = [row for other in (*self.worker.inflight, step) for row in other.rows]
            require(all(row[0] is isolated for row in rows), "isolation", "a suspect runs alone")
        self.num_released = self.worker.release_slots()
        self.worker.inflight.append(step)
        self.state.counters.steps += 1
        self.state.counters.rows += len(plan.rows)
        self.state.counters.step_tokens += total
        held = (*self.worker.running.values(), *self.worker.finishing)
        self.state.counters.step_positions += sum(sequence.num_planned for sequence in held)
        self.worker.budget.count_step()

    def _check_cadence(
        self,
        plan: StepPlan,
        ready: Collection[ModelSequence],
        partial: Collection[ModelSequence],
        isolated: ModelSequence | None,
        events: list[Event],
        budget: int,
    ) -> None:
        """Check how long the plan takes, where prompts come behind decodes and nothing is preempted."""
        is_preempting = any(isinstance(event, Preempted) for event in events)
        if isolated is None and not is_preempting and self.state.limits.scheduling_policy != "prefill_first":
            waiting = (*self.state.fresh, *self.state.resuming)
            self.worker.cadence.check(plan, self.state, self.worker, ready, partial, waiting, budget)

    def _started(self, events: list[Event]) -> dict[str, Started]:
        started: dict[str, Started] = {}
        for event in events:
            if isinstance(event, Started):
                require(event.request_id not in started, "I11", "started twice")
                started[event.request_id] = event
            else:
                require(isinstance(event, Preempted), "I11", "planning only starts and preempts")
        return started

    def _preempt_for_suspect(self, victims: deque[ModelSequence], suspect: ModelSequence) -> None:
        """Check and preempt the victims of a plan for `suspect` alone."""
        while victims:
            victim = victims.popleft()
            others = [s for s in self.worker.running.values() if s is not suspect]
            require(victim is max(others, key=lambda s: s.queue_key), "isolation", "a suspect preempts the youngest")
            self._preempt(victim)

    def _preempt(self, victim: ModelSequence) -> None:
        """Preempt a sequence, and check which of its blocks are swapped out."""
        worker = self.worker
        first, wanted = worker.swap.wanted(victim, worker.blocks, self.placement.measured(worker))
        self.state.preempt(victim)
        worker.swap.swap_out(victim, first, wanted, worker.blocks.size)
        self.state.counters.swapped_out_tokens += len(wanted) * worker.blocks.size

    def _preempt_for_decodes(
        self,
        victims: deque[ModelSequence],
        waiting: deque[ModelSequence],
        step: ModelStep,
        until: ModelSequence | None = None,
    ) -> None:
        """Check and preempt victims where the `waiting` decodes, oldest first, lack a block: those up to `until`.

        What a row publishes and which blocks it takes depends on whether a victim still has its blocks.
        """
        planned = {sequence for sequence, _, _ in step.rows}
        while waiting:
            sequence = waiting.popleft()
            is_short = sequence.num_planned == len(sequence.blocks) * self.worker.blocks.size
            while victims and sequence.is_running and is_short and self.worker.blocks.num_free == 0:
                victim = victims.popleft()
                self._check_preemption(victim, sequence, planned)
                self._preempt(victim)
            if sequence is until:
                return

    def _check_preemption(
        self, victim: ModelSequence, older: ModelSequence, planned: Collection[ModelSequence]
    ) -> None:
        """Check that `older` may preempt `victim` while the sequences `planned` have a row in the step."""
        require(victim.is_running, "I15", "only a running sequence is preempted")
        require(victim not in planned, "I15", "a sequence with a row in the step is not preempted")
        require(not victim.protected, "I15", "a protected sequence is never preempted")
        require(not older.protected, "I15", "a protected sequence has all blocks")
        require(victim.queue_key > older.queue_key, "I15", "a victim is younger than a sequence short of a block")
        younger = [s for s in self.worker.running.values() if s.queue_key > older.queue_key and not s.protected]
        younger = [s for s in younger if s not in planned]
        if self.state.limits.preemption_policy == "newest":
            chosen = max(younger, key=lambda s: s.queue_key)
        else:
            lost = self.worker.blocks.num_lost_positions
            chosen = min(younger, key=lambda s: (lost(s), -s.queue_key[0], -s.queue_key[1]))
        require(victim is chosen, "I15", "the victim is the one that the policy chooses")

    def _apply_init(
        self,
        init: SlotInit,
        copies: list[BlockCopy],
        step: ModelStep,
        started: dict[str, Started],
        is_open: bool,
        now: float,
        isolated: ModelSequence | None,
    ) -> None:
        sequence = self.state.owner(init)
        is_free = 0 <= init.slot < self.worker.hello.num_slots and init.slot not in self.worker.running
        require(is_free, "I6", "a slot that is free")
        is_lowest = all(slot in self.worker.running for slot in range(init.slot))
        require(is_lowest, "I6", "the lowest slot that is free, from the plan after its owner's last row")
        require(
            sequence in self.state.fresh or sequence in self.state.resuming,
            "I11",
            "only waiting sequences are admitted",
        )
        require(sequence.in_flight == 0, "I9", "no sequence is admitted with samples in flight")
        require(init.tokens == sequence.tokens, "I7", "the worker gets exactly the confirmed tokens")
        require(init.prompt_len == len(sequence.request.prompt), "I7", "the prompt's length")
        require(init.sampling == sequence.request.sampling, "I7", "the sampling parameters of the request")
        adapter, scoring = self.state.adapters.index(sequence.request.adapter), sequence.request.scoring
        require(init.adapter == adapter, "I25", "the adapter of the request")
        require(init.num_top_scores == (scoring.num_top if scoring else 0), "I7", "the top scores of the request")
        require(init.pooling == sequence.request.pooling, "I7", "the pooling of the request")
        hits = self.worker.blocks.cached_prefix(sequence)
        require(list(init.blocks) == hits, "I4", "exactly the longest cached prefix of the salt is shared")
        self.worker.states.check_init(init)
        require(sequence.max_len <= self.worker.max_len, "I25", "a request runs only where it fits")
        require(must_isolate(sequence) == (isolated is sequence), "isolation", "a suspect starts only to run alone")
        if isolated is None:
            require(self.state.takes_requests(self.worker), "I25", "this worker takes no further requests")
            self.placement.check_taken(sequence, self.worker, step.num_tokens, now)
            require(not self.worker.awaits_state(sequence), "I34", "a request waits for the state that the plan leaves")
            is_fresh = sequence in self.state.fresh
            waiting = [*self.state.resuming, *self.state.fresh] if is_fresh else self.state.resuming
            waiting = [other for other in waiting if self.state.is_possible(other, self.worker)]
            self.state.queue.on_overtake(sequence, waiting)
            for other in () if is_fresh else self.state.fresh:
                other.num_resumed_before += other.queue_key < sequence.queue_key
        if sequence in self.state.fresh:
            require(is_open, "strategy", "no request joins before the strategy allows it")
            self.worker.batching.on_join()
            self.state.queue.on_start(sequence, self.state.fresh, isolated=isolated is not None)
            del self.state.fresh[sequence]
        else:
            del self.state.resuming[sequence]
        sequence.is_running, sequence.slot = True, init.slot
        sequence.passed_at, sequence.is_left, sequence.left_until = None, False, float("-inf")
        sequence.admission_count += 1
        self.worker.running[init.slot] = sequence
        size, whole = self.worker.blocks.size, self.worker.blocks.whole_prefix(sequence)
        sequence.num_shared = sequence.num_published = len(hits) * size
        sequence.num_offered = sequence.state_at = len(hits) * size
        counts = self.worker.states.boundaries(len(hits), len(whole), sequence.num_cacheable // size)
        sequence.boundaries = [count * size for count in counts]
        self.state.counters.prefix_cache_stateless_tokens += (len(whole) - len(hits)) * size
        swapped = self.worker.swap.find(sequence, len(hits))
        num_swapped = len(swapped) * self.worker.blocks.size
        if swapped:
            require([copy.source for copy in copies] == swapped, "I31", "exactly its own blocks are swapped in")
            is_whole = all(copy.num_positions == self.worker.blocks.size for copy in copies)
            require(is_whole, "I31", "whole blocks are swapped in")
        else:
            require(len(copies) < 2, "I4", "one block is copied")
        copied = None if swapped else self.worker.blocks.check_copy(sequence, copies[0] if copies else None)
        self.state.drop_swapped(sequence)
        sequence.epoch, sequence.resumed_at = self.worker.epoch, now
        self.worker.blocks.share(init.blocks, sequence, copied)
        num_copied = sum(copy.num_positions for copy in copies)
        sequence.num_planned = sequence.num_computed = sequence.num_shared + num_copied
        sequence.num_known = len(init.tokens)
        own_prompt = not sequence.request.is_sibling or not sequence.request.max_tokens
        self.state.counters.prefix_cache_queries += own_prompt * len(init.tokens)
        self.state.counters.prefix_cache_hits += own_prompt * (sequence.num_planned - num_swapped)
        self.state.counters.swapped_in_tokens += num_swapped
        self.worker.check_sharing(sequence)
        if sequence.started_at is None:
            sequence.started_at, sequence.cached_tokens = now, sequence.num_planned
            self.state.counters.prompt_tokens += own_prompt * init.prompt_len
            sequence.started_on = self.worker.hello.model_fingerprint
            where = (init.slot, step.step, sequence.num_planned, sequence.started_on, self.worker.hello.epoch)
            event = Started(sequence.request.request_id, *where)
            require(started.pop(sequence.request.request_id, None) == event, "I11", "the first start has an event")

    def _apply_row(
        self, sequence: ModelSequence, row: Row, step: ModelStep, zeroed: set[int], *, num_copied: int
    ) -> None:
        size, end = self.worker.blocks.size, row.start + row.num_tokens
        require(row.start == sequence.num_planned and row.num_tokens > 0, "I6", "positions follow one another")
        require(end <= min(sequence.num_known, sequence.max_len - 1), "I6", "only known positions below max_len")
        outputs = {sequence.output_of(position) for position in range(row.start, end)}
        if len(outputs) == 2 and row.output is not RowOutput.SCORE:
            outputs.discard(RowOutput.NONE)  # a sample and the vector of the last token: at the end of a row
            require(sequence.output_of(end - 1) is row.output, "I6", "samples at the last known token")
        require(outputs == {row.output}, "I6", "each position is reported, once")
        require(end <= min(sequence.boundaries, default=end), "I33", "a row ends where the state is kept")
        require(not (row.num_drafts and self.worker.states.is_recurrent), "I33", "no drafts with recurrent state")
        new_end = (len(sequence.blocks) + len(row.new_blocks)) * size
        needed = min(sequence.num_known, sequence.max_len - 1)
        is_first = len(sequence.blocks) * size == sequence.num_shared and new_end >= needed
        for index, block in enumerate(row.new_blocks):
            self.worker.blocks.take(block, sequence, zeroed, is_copied=index < num_copied)
        self.grown |= {sequence} if row.new_blocks else set()
        end_of_drafts = end + row.num_drafts
        if row.num_drafts:
            self._check_drafts(sequence, row)
        elif row.new_blocks and not is_first:
            is_next = len(row.new_blocks) == 1 and row.start == (len(sequence.blocks) - 1) * size
            require(is_next, "I5", "one block when needed")
        longest = sequence.max_len - 1 if sequence.protected else max(end, sequence.num_known)
        # Blocks of rejected drafts and void rows stay.
        num_void = self.state.limits.pipeline_depth if sequence.request.sampling.grammar else 0
        longest = min(longest + sequence.request.max_drafts + num_void, sequence.max_len - 1)
        require(
            -(-end_of_drafts // size) <= len(sequence.blocks) <= -(-longest // size), "I5", "as many blocks as needed"
        )
        self.worker.blocks.check_write(sequence, row.start, end_of_drafts)
        if row.start < sequence.max_computed_before:
            again = min(end, sequence.max_computed_before) - row.start
            sequence.recomputed_tokens += again
            self.state.counters.recomputed_tokens += again
        sequence.num_planned, sequence.planned_step = end, step.step
        step.rows.append((sequence, sequence.admission_count, end))
        step.planned.append((sequence, row))
        if row.output is not RowOutput.NONE:
            step.outputs.append((sequence, sequence.admission_count, row.start, end, row.output))
        if row.num_drafts:
            step.drafting.add(sequence)
            sequence.num_drafts = row.num_drafts
        if row.sample:
            num_sampled = sequence.num_outputs + sequence.in_flight
            require(num_sampled < sequence.request.max_tokens, "I6", "no sample past max_tokens")
            step.samples.append(sequence)
            sequence.in_flight += 1
            sequence.num_known += 1

    def _check_drafts(self, sequence: ModelSequence, row: Row) -> None:
        """Check a row with drafts, whose new blocks are taken."""
        size, blocks = self.worker.blocks.size, self.worker.blocks
        require(row.num_tokens == 1 and row.sample, "I6", "drafts are verified behind the last known token")
        require(0 < row.num_drafts <= sequence.request.max_drafts, "I6", "no more drafts than the request allows")
        require(sequence.in_flight == 0, "I6", "no other row in flight beside drafts")
        last = sequence.num_outputs + 1 + row.num_drafts
        require(last <= sequence.request.max_tokens, "I6", "no draft whose token exceeds max_tokens")
        if row.new_blocks:
            end = row.start + 1 + row.num_drafts
            require((len(sequence.blocks) - 1) * size < end, "I5", "no more blocks than drafts fill")
            is_needed = len(row.new_blocks) == 1 and row.start == (len(sequence.blocks) - 1) * size
            has_headroom = blocks.num_free >= -(-len(self.worker.running) // 4)
            require(is_needed or has_headroom, "I5", "drafts leave headroom for running sequences")

    def _check_age_order(
        self, slots: set[int], ready: list[ModelSequence], partial: list[ModelSequence], budget: int, num_decodes: int
    ) -> None:
        """Check that decodes go first, oldest first, then the oldest prompt; with `prefill_first` only the latter."""
        if self.state.limits.scheduling_policy != "prefill_first":
            for sequence in ready:
                if sequence.is_running and sequence.slot not in slots and not sequence.may_wait_for_drafts:
                    if sequence.num_planned < len(sequence.blocks) * self.worker.blocks.size:
                        require(num_decodes == budget, "I6", "a decode waits only for decodes")
                    younger = [s for s in ready if s.queue_key > sequence.queue_key and s.slot in slots]
                    if sequence.num_planned == len(sequence.blocks) * self.worker.blocks.size:
                        younger = [s for s in younger if s in self.grown]
                    require(not younger, "I14", "no younger decode overtakes a waiting one or takes a block")
            has_tokens_left = num_decodes < budget
        else:
            has_tokens_left = True
        prompts = [s for s in partial if s.is_running]
        require(not prompts or not has_tokens_left or prompts[0].slot in slots, "I14", "the oldest prompt continues")

    def _check_no_plan(self, isolated: ModelSequence | None, now: float) -> None:
        if self.worker.inflight:
            return
        if isolated is not None:
            require(isolated.in_flight > 0, "I13", "a suspect runs if the worker is idle")
        else:
            is_empty = not self.worker.running and not self.worker.finishing
            require(is_empty, "I13", "an idle worker has no running requests")

    def _check_head(self, plan: StepPlan | None, isolated: ModelSequence | None, now: float) -> None:
        """Check that the plan has the head of the queue if it fits, unless another worker is better for it."""
        state, worker = self.state, self.worker
        is_idle = plan is None and not worker.inflight
        if isolated is not None or not (is_idle or (plan is not None and self.has_tokens_left)):
            return
        resuming = [s for s in state.resuming if state.is_possible(s, worker)]
        fresh = [s for s in state.fresh if state.is_possible(s, worker) and worker.batching.is_open(now)]
        head = min((*resuming, *fresh), key=lambda s: s.queue_key, default=None)
        if head in fresh and not is_idle and state.limits.batching_strategy == "adaptive":
            return  # how many may join follows from step times
        num_released = 0 if plan is None else self.num_released
        shares = plan is None or not worker.states.is_recurrent  # the states that the plan leaves are for the next one
        if head is None or head.in_flight or not worker.has_room(head, num_released, shares=shares):
            return
        if plan is not None and worker.may_have_awaited(head):
            return
        require(self.placement.may_leave(head, worker, now), "I13", "a worker with room takes the head of the queue")
