"""The scheduler's core: the queue, the running sequences, and what becomes of them. Pure: same calls, same plans.

No clock (`now` is an argument), no randomness, no logging, no sockets, no tensors. Only the engine thread calls it.
What happened comes back as events; `plan` leaves its own for `take_events`.

Plans run strictly in order on the worker and results return in that order. So a planned position counts as computed for
every later plan, and a freed block may be handed out at once: a late write always precedes the new owner's.
"""

from __future__ import annotations

import heapq
from collections import deque

from lineclear.errors import (
    Cancelled,
    DeadlineExceeded,
    DeviceOutOfMemory,
    DuplicateRequest,
    InternalError,
    LineclearError,
    NonFiniteLogits,
    PoisonRequest,
    QueueFull,
    ServerDraining,
)
from lineclear.scheduler.core import invariants, limits
from lineclear.scheduler.core.events import Admitted, Event, Failed, Finished, FinishReason, WorkerJoined, WorkerLost
from lineclear.scheduler.core.inflight_step import BadResult, InflightStep, ResultTokens
from lineclear.scheduler.core.planner import PlannerState, StepPlanner
from lineclear.scheduler.core.poison_detector import PoisonDetector, WorkerLoss
from lineclear.scheduler.core.policies import PREEMPTION_POLICIES, QUEUE_ORDERS, STRATEGIES
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.sequence import NOT_DECODING, Request, Sequence, State
from lineclear.scheduler.core.stats import CoreLimits, CoreSnapshot, Counters
from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.wire.messages import Hello, StepError, StepErrorKind, StepPlan, StepResult

__all__ = ["BadResult", "CoreLimits", "CoreSnapshot", "Request", "Scheduler"]

_RECOVERY_STEPS = 200  # until a token budget halved by an out-of-memory step is doubled again


class Scheduler:
    """Takes requests, makes plans, applies results."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self._live: dict[str, Sequence] = {}
        self._fresh = RequestQueue()
        self._resuming = RequestQueue()
        self._batch = RunningBatch(limits.cache_secret, limits.prefix_cache)
        self._poison = PoisonDetector(limits.max_lone_crashes, limits.max_lone_kills)
        self._counters = Counters()
        self._state = PlannerState(
            limits=limits,
            strategy=STRATEGIES[limits.strategy](limits.policy),
            queue_order=QUEUE_ORDERS[limits.order](limits.policy),
            preemption_policy=PREEMPTION_POLICIES[limits.victim],
            fresh=self._fresh,
            resuming=self._resuming,
            batch=self._batch,
            poison=self._poison,
            step_time=StepTimeModel(),
            counters=self._counters,
        )
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._inflight: deque[InflightStep] = deque()
        self._events: list[Event] = []
        self._num_arrivals = 0
        self._hello: Hello | None = None
        self._step = 0
        self._planned_at = float("-inf")
        self._halvings = 0  # of the token budget, by steps that ran out of memory
        self._steps_to_doubling = 0  # while it is halved

    # --- requests come and go --------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def submit(self, request: Request, now: float) -> list[Event]:
        """Put a request into the queue.

        Raises QueueFull, PromptTooLong, CannotFit, ModelChanged, ModelReplaced, DuplicateRequest or Draining, and then
        nothing has changed.
        """
        try:
            assert len(request.output) < request.max_tokens, "nothing is left to do"
            if self._state.draining:
                raise ServerDraining("the server is shutting down", retry_after_seconds=1.0)
            if request.request_id in self._live:
                raise DuplicateRequest("a request with this request_id is in progress")
            limits.check_queue(request, self._fresh, self.limits)
            if self._hello is not None:
                limits.check_model(request, self._hello)
                limits.check_capacity(request, self._hello)
        except LineclearError as error:
            self._counters.requests_rejected += 1
            self._state.refusing = self._state.refusing or isinstance(error, QueueFull)
            raise
        self._num_arrivals += 1
        sequence = Sequence(request, (self._state.queue_order.key(request, now), self._num_arrivals), now)
        sequence.pinned = self.limits.max_preemptions == 0
        self._live[request.request_id] = sequence
        self._fresh.push(sequence)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, self._num_arrivals, sequence))
        self._counters.requests_admitted += 1
        return [Admitted(request.request_id)]

    def cancel(self, request_id: str, error: LineclearError | None, now: float) -> list[Event]:
        """End a request without an answer, with `error` or Cancelled. Nothing happens for an unknown id."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return []
        self._counters.requests_cancelled += 1
        return [self._fail(sequence, error or Cancelled("the caller cancelled the request"), now)]

    def finish(self, request_id: str, num_tokens: int, now: float) -> list[Event]:
        """Complete a request after its first `num_tokens` output tokens: a stop string appeared in their text."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return []
        return [self._complete(sequence, FinishReason.STOP_STRING, None, now, num_tokens)]

    def expire(self, now: float) -> list[Event]:
        """End every request whose deadline has passed."""
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence.state is not State.FINISHED:
                self._counters.requests_expired += 1
                where = "while running" if sequence.state is State.RUNNING else "in the queue"
                events.append(self._fail(sequence, DeadlineExceeded(f"the deadline passed {where}"), now))
        return events

    def next_deadline(self) -> float | None:
        """The next moment at which `expire` or `plan` may have something to do that no message announces."""
        while self._deadlines and self._deadlines[0][2].state is State.FINISHED:
            heapq.heappop(self._deadlines)
        moments = [self._deadlines[0][0]] if self._deadlines else []
        oldest = self._fresh.oldest()
        # While the pipeline is full nobody can join, and the result that makes room will be heard of.
        if oldest is not None and self._hello is not None and len(self._inflight) < self.limits.pipeline_depth:
            # At its own arrival it has not waited yet, so the strategy names the moment that ends the wait. Once plan()
            # was called past that moment, time has no more to add.
            moment = self._state.strategy.next_wakeup(self._state.batching_state(oldest.arrival))
            if moment is not None and moment > self._planned_at:
                moments.append(moment)
        return min(moments, default=None)

    def drain(self, now: float) -> None:
        """Take no new requests; let what is here run to its end, in batches however small."""
        self._state.draining = True

    def drain_events(self) -> list[Event]:
        """Events made by `plan` since the last call."""
        events, self._events = self._events, []
        return events

    # --- the worker comes and goes ---------------------------------------------------------------------------------

    def on_worker_change(self, hello: Hello | None, now: float, loss: WorkerLoss = WorkerLoss.CLEAN) -> list[Event]:
        """A worker joined, or (None) was lost, and `loss` says how: forget blocks and slots, keep every request.

        Running requests wait again, in their old order; plans in flight will get no result. A request that workers die
        of fails (see `suspects`), and so does one that the new worker can never run: an answer that began on another
        model is never continued by this one.
        """
        events: list[Event] = [] if self._hello is None else [WorkerLost(self._hello.epoch)]
        self._batch.dissolve_decode()
        lone = self._poison.record_crash(self._inflight) if loss is not WorkerLoss.CLEAN else None
        if lone is not None and self._poison.is_poison(lone, loss):
            error = PoisonRequest("workers ended whenever they computed this request, at last while they ran it alone")
            self._counters.requests_failed += 1
            events.append(self._fail(lone, error, now))
        self._inflight.clear()
        for sequence in self._batch.remove_all():
            sequence.recoveries += 1
            self._resuming.push(sequence)
        for sequence in self._live.values():
            sequence.num_known = len(sequence.tokens)
            sequence.max_computed_before = min(
                sequence.max_computed_before, sequence.num_known
            )  # samples that are void were never computed
            sequence.block_keys.clear()  # another worker may have another block size
        self._hello = hello
        # The halved token budget stays: after an out-of-memory step the worker joins again with the same memory.
        self._step = 0
        self._state.step_time = StepTimeModel()
        if hello is not None:
            events.append(WorkerJoined(hello.epoch))
            began_on, self._state.model_fingerprint = self._state.model_fingerprint, hello.model_fingerprint
            self._batch.reset(min(self.limits.max_batch_size, hello.num_slots), hello.num_blocks, hello.block_size)
            for sequence in list(self._live.values()):
                try:
                    limits.check_model(sequence.request, hello, began_on if sequence.started_at is not None else "")
                    limits.check_capacity(sequence.request, hello)
                except LineclearError as error:
                    self._counters.requests_failed += 1
                    events.append(self._fail(sequence, error, now))
        return events

    def on_step_error(self, error: StepError, now: float) -> list[Event]:
        """The oldest step in flight ran out of memory: fail its request if it had but one, else halve the budget.

        The budget is halved again by every further such step, and doubled again after 200 steps without one; when
        halving did not help, the requests run one at a time, as after a crash. What is in flight is void; the caller
        has the worker join again, and the requests run again.
        """
        flight = self._inflight[0] if self._inflight else None
        if flight is None or error.step != flight.step or error.kind is not StepErrorKind.OUT_OF_MEMORY:
            return []
        if flight.num_rows > 1:
            self._halvings += 1
            self._steps_to_doubling = _RECOVERY_STEPS
            self._batch.dissolve_decode()
            self._poison.record_crash([flight])
            return []
        sequence = next(flight.sequences())
        if sequence.state is State.FINISHED:
            return []
        self._halvings = 0  # it was not the size of the batch
        self._counters.requests_failed += 1
        return [self._fail(sequence, DeviceOutOfMemory("the device has too little memory for this request alone"), now)]

    # --- planning and results --------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None while the pipeline is full or nothing can run. Call until None."""
        if self._hello is None or len(self._inflight) >= self.limits.pipeline_depth or not self._live:
            return None
        self._planned_at = now
        alone = self._poison.next_isolated()
        if alone is not None and any(other is not alone for flight in self._inflight for other in flight.sequences()):
            return None  # a loss now would say nothing about it
        step = self._step + 1
        most = self._hello.max_step_tokens
        budget = min(self.limits.target_batch_tokens or most, most)
        planning = StepPlanner(self._state, step, max(1, budget >> self._halvings), now)
        if alone is not None:
            planning.run_isolated(alone)
        else:
            planning.run()
        self._events.extend(planning.events)
        if not (planning.decodes.slots or planning.chunks):
            return None
        self._step = step
        if self._halvings:
            self._steps_to_doubling -= 1
            if self._steps_to_doubling == 0:
                self._halvings -= 1
                self._steps_to_doubling = _RECOVERY_STEPS
        flight = InflightStep(
            step,
            self._batch.decode_batch.beat,
            planning.decode_rows,
            planning.completing_block,
            planning.owners,
            planning.samples,
            planning.num_tokens,
            planning.kv_tokens,
        )
        self._inflight.append(flight)
        self._counters.steps += 1
        self._counters.rows += flight.num_rows
        chunks, inits = tuple(planning.chunks), tuple(planning.inits)
        zero_blocks = self._batch.pool.drain_to_zero()
        return StepPlan(self._hello.epoch, step, chunks, inits, zero_blocks, planning.decodes)

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Take in the result of the oldest step in flight. Raises BadResult, and then nothing was applied."""
        flight = self._inflight[0] if self._inflight else None
        if flight is None or self._hello is None or (result.epoch, result.step) != (self._hello.epoch, flight.step):
            raise BadResult(f"step {result.step} is not the oldest in flight")
        flight.check(result)
        self._inflight.popleft()
        self._state.step_time.observe(flight.num_tokens, flight.kv_tokens, result.step_seconds)
        tokens, failures = ResultTokens(result), list[Event]()
        bad = _bad_samples(result, self._hello.vocab_size)
        over = self._append_tokens(result, flight, bad, tokens, failures, now)
        for sequence in flight.completing_block:
            if sequence.state is State.RUNNING:
                if sequence.decode_joined_at != NOT_DECODING:
                    self._batch.decode_batch.sync(sequence)
                self._batch.publish(sequence)
        for sequence, residence, end in flight.owners:
            if sequence.admission_count == residence and sequence.state is State.RUNNING:
                sequence.num_computed = end
                self._batch.publish(sequence)
        gone = {sequence for row, sequence in enumerate(flight.sampled()) if row in bad} if bad else ()
        self._batch.resolve_pending(flight.step, gone)
        events = [*tokens.event(), *failures, *self._finish_complete(over, now)]
        if self._poison:
            for sequence in self._poison:
                if sequence.decode_joined_at != NOT_DECODING:
                    self._batch.decode_batch.sync(sequence)
            self._poison.clear_passed()
        return events

    def _append_tokens(
        self,
        result: StepResult,
        flight: InflightStep,
        bad: frozenset[int],
        tokens: ResultTokens,
        failures: list[Event],
        now: float,
    ) -> list[Sequence]:
        """Append the sampled tokens. Returns whose answer they may have completed.

        Whoever has taken part in all beats since this one needs no more than that, and is dealt with in one go. Others
        left in between, and for them it is as with chunks; a token sampled for a sequence that was preempted meanwhile
        is as good as any.
        """
        crew, beat = flight.decode_rows.sequences, flight.decode_offset
        for row in bad:
            if row < len(crew) and crew[row].decode_joined_at != NOT_DECODING:
                self._batch.leave_decode(crew[row])  # before the beat is heard: this sample is none of its tokens
        apart = [row for row, sequence in enumerate(crew) if sequence.decode_joined_at > beat]
        over = []
        if crew:
            self._batch.decode_batch.on_result(beat, flight.step, now)
            over = tokens.add_decode_rows(flight, apart)
            self._counters.output_tokens += len(crew) - len(apart)
        singles = [(row, crew[row]) for row in apart]
        for row, sequence in (*singles, *enumerate(flight.samples, len(crew))):
            if sequence.state is State.FINISHED:
                self._counters.wasted_samples += 1
            elif row in bad:
                self._counters.requests_failed += 1
                failures.append(self._fail(sequence, _bad_row(row in result.bad_rows), now, dirty=True))
            else:
                tokens.add(sequence, row)
                self._append_one(sequence, flight.step, now)
                over.append(sequence)
        return over

    def _append_one(self, sequence: Sequence, step: int, now: float) -> None:
        """A token more, to a sequence that does not take part in beats, or did not when the token was planned."""
        if sequence.state is State.WAITING:
            self._resuming.grow(sequence)
        else:
            sequence.num_computed = len(sequence.tokens) - 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        sequence.last_token_at = now
        sequence.last_step = step
        self._counters.output_tokens += 1

    def _finish_complete(self, over: list[Sequence], now: float) -> list[Event]:
        """The ends of answers that are complete."""
        events: list[Event] = []
        for sequence in over:
            request, token = sequence.request, sequence.tokens[-1]
            if token in sequence.stop_token_ids and sequence.num_outputs > request.sampling.min_tokens:
                reason = FinishReason.STOP_EOS if token in request.eos_ids else FinishReason.STOP_TOKEN
                events.append(self._complete(sequence, reason, token, now))
            elif len(sequence.tokens) >= sequence.max_len:
                events.append(self._complete(sequence, FinishReason.LENGTH, None, now))
        return events

    # --- the ends of a request -------------------------------------------------------------------------------------

    def _complete(
        self, sequence: Sequence, reason: FinishReason, matched: int | None, now: float, num_tokens: int | None = None
    ) -> Finished:
        self._remove(sequence)
        self._counters.requests_finished += 1
        return Finished(sequence.request.request_id, reason, matched, sequence.stats(now, num_tokens))

    def _fail(self, sequence: Sequence, error: LineclearError, now: float, *, dirty: bool = False) -> Failed:
        self._remove(sequence, dirty=dirty)
        return Failed(sequence.request.request_id, error, sequence.stats(now))

    def _remove(self, sequence: Sequence, *, dirty: bool = False) -> None:
        """Any state -> FINISHED, once."""
        self._poison.remove(sequence)
        self._state.queue_order.on_finish(sequence)
        if sequence.state is State.RUNNING:
            self._batch.remove(sequence, State.FINISHED, dirty=dirty)
        else:
            assert sequence.state is State.WAITING
            (self._fresh if sequence in self._fresh else self._resuming).remove(sequence)
            sequence.state = State.FINISHED
        del self._live[sequence.request.request_id]
        if len(self._deadlines) > 2 * len(self._live) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not State.FINISHED]
            heapq.heapify(self._deadlines)

    # --- looking in ------------------------------------------------------------------------------------------------

    def snapshot(self) -> CoreSnapshot:
        """Counters and gauges of now; a copy."""
        pool = self._batch.pool
        return CoreSnapshot(
            counters=self._counters.copy(),
            requests_waiting=len(self._fresh) + len(self._resuming),
            tokens_waiting=self._fresh.num_tokens + self._resuming.num_tokens,
            requests_running=len(self._batch.running),
            steps_in_flight=len(self._inflight),
            blocks_total=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            draining=self._state.draining,
            step_time=self._state.step_time.coefficients,
        )

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self._batch.pool.clear_cache()

    def check(self, *, with_waiting_prompts: bool = True) -> None:
        """Check every invariant that holds between two calls. AssertionError on a breach."""
        invariants.check(self, with_waiting_prompts=with_waiting_prompts)


def _bad_samples(result: StepResult, vocab_size: int) -> frozenset[int]:
    """Samples whose token is none."""
    tokens = result.tokens
    if not tokens or 0 <= min(tokens) <= max(tokens) < vocab_size:
        return result.bad_rows
    return result.bad_rows | {row for row, token in enumerate(tokens) if not 0 <= token < vocab_size}


def _bad_row(non_finite: bool) -> LineclearError:
    if non_finite:
        return NonFiniteLogits("the model produced a value that is not finite for this request")
    return InternalError("the worker sampled a token that is not in the vocabulary")
