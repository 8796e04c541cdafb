"""The scheduler's core: requests in; plans, results and events out. Pure, like etcd's raft and h11.

The core has no clock (`now` is an argument), no randomness, no logging and no I/O, so the same calls give the same
plans. Only the engine thread calls it. Calls return what happened as events; `plan` leaves its events for
`drain_events`.

Plans run strictly in order on the worker, and results return in that order. So a planned position counts as computed
for every later plan, and a freed block may be handed out at once: a late write always precedes the new owner's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

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
from lineclear.scheduler.core import limits
from lineclear.scheduler.core.block_pool import BlockHash, BlockHasher
from lineclear.scheduler.core.events import Admitted, Event, Failed, Finished, FinishReason, WorkerJoined, WorkerLost
from lineclear.scheduler.core.inflight_step import BadResult, InflightStep, ResultTokens
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.planner import PlannerState, StepPlanner
from lineclear.scheduler.core.poison_detector import PoisonDetector, WorkerLoss
from lineclear.scheduler.core.policies import PREEMPTION_POLICIES, QUEUE_ORDERS, STRATEGIES
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.running_batch import RunningBatch
from lineclear.scheduler.core.sequence import Request, Sequence, State
from lineclear.scheduler.core.stats import CoreSnapshot, Counters
from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.wire.messages import Hello, StepError, StepErrorKind, StepPlan, StepResult

_RECOVERY_STEPS = 200  # until a token budget halved by an out-of-memory step is doubled again


class Scheduler:
    """Takes requests, makes plans, applies results.

    `block_hash` replaces the function that makes prefix-cache keys.
    """

    def __init__(self, limits: CoreLimits, block_hash: BlockHash | None = None) -> None:
        self.limits = limits
        self._live: dict[str, Sequence] = {}
        self._fresh = RequestQueue()
        self._resuming = RequestQueue()
        self._batch = RunningBatch(block_hash or BlockHasher(limits.cache_secret), limits.prefix_cache)
        self._poison = PoisonDetector(limits.max_isolated_crashes, limits.max_isolated_kills)
        self._counters = Counters()
        self._state = PlannerState(
            limits=limits,
            strategy=STRATEGIES[limits.batching_strategy](limits.policy),
            queue_order=QUEUE_ORDERS[limits.scheduling_policy](limits.policy),
            preemption_policy=PREEMPTION_POLICIES[limits.preemption_policy],
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
        self._halvings = 0  # of the token budget, by out-of-memory steps
        self._steps_to_doubling = 0  # while it is halved

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return len(self._live)

    def submit(self, request: Request, now: float) -> list[Event]:
        """Queue a request.

        Raises QueueFull, PromptTooLong, KvCapacityExceeded, ModelChanged, ModelReplaced, DuplicateRequest or
        ServerDraining, and then changes nothing.
        """
        try:
            assert len(request.output) < request.max_tokens, "the answer of the request is complete already"
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
        sequence.protected = self.limits.max_preemptions == 0
        self._live[request.request_id] = sequence
        self._fresh.push(sequence)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, self._num_arrivals, sequence))
        self._counters.requests_admitted += 1
        return [Admitted(request.request_id)]

    def cancel(self, request_id: str, error: LineclearError | None, now: float) -> list[Event]:
        """Fail a request with `error` or Cancelled. An unknown id does nothing."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return []
        self._counters.requests_cancelled += 1
        return [self._fail(sequence, error or Cancelled("the caller cancelled the request"), now)]

    def finish_at_stop_string(self, request_id: str, num_tokens: int, now: float) -> list[Event]:
        """Complete a request after its first `num_tokens` output tokens, in whose text a stop string appeared."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return []
        return [self._complete(sequence, FinishReason.STOP_STRING, None, now, num_tokens)]

    def expire(self, now: float) -> list[Event]:
        """Fail every request whose deadline has passed."""
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if sequence.state is not State.FINISHED:
                self._counters.requests_expired += 1
                where = "while running" if sequence.state is State.RUNNING else "in the queue"
                events.append(self._fail(sequence, DeadlineExceeded(f"the deadline passed {where}"), now))
        return events

    def next_deadline(self) -> float | None:
        """Return the next time at which `expire` or `plan` may act without any other call before; None: never."""
        while self._deadlines and self._deadlines[0][2].state is State.FINISHED:
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        oldest = self._fresh.oldest()
        # With a full pipeline no request can join before the next result arrives.
        if oldest is not None and self._hello is not None and len(self._inflight) < self.limits.pipeline_depth:
            # At its arrival the oldest has not waited yet, so the strategy returns the end of its wait. A time at or
            # before the last call of plan() has had its effect.
            wakeup = self._state.strategy.next_wakeup(self._state.batching_state(oldest.arrival))
            if wakeup is not None and wakeup > self._planned_at:
                times.append(wakeup)
        return min(times, default=None)

    def drain(self, now: float) -> None:
        """Reject new requests from now on, and run the others to their end in batches of any size."""
        self._state.draining = True

    def drain_events(self) -> list[Event]:
        """Return the events of `plan` since the last call."""
        events, self._events = self._events, []
        return events

    # --- the worker -------------------------------------------------------------------------------------------------

    def on_worker_change(self, hello: Hello | None, now: float, loss: WorkerLoss = WorkerLoss.CLEAN) -> list[Event]:
        """Handle a worker that joined, or, with None, was lost as `loss` says. Every request is kept.

        Running requests wait again, in their old order, and plans in flight get no result. A request fails if it is the
        poison of this loss, or if the new worker can never run it: another model never continues an answer.
        """
        events: list[Event] = [] if self._hello is None else [WorkerLost(self._hello.epoch)]
        self._batch.dissolve_decode()
        isolated = self._poison.record_crash(self._inflight) if loss is not WorkerLoss.CLEAN else None
        if isolated is not None and self._poison.is_poison(isolated, loss):
            error = PoisonRequest("workers ended whenever they computed this request, at last while they ran it alone")
            self._counters.requests_failed += 1
            events.append(self._fail(isolated, error, now))
        self._inflight.clear()
        for sequence in self._batch.remove_all():
            sequence.recoveries += 1
            self._resuming.push(sequence)
        for sequence in self._live.values():
            sequence.num_known = len(sequence.tokens)  # samples in flight are void, and were never computed
            sequence.max_computed_before = min(sequence.max_computed_before, sequence.num_known)
            sequence.block_keys.clear()  # another worker may have another block size
        self._hello = hello
        # The halved token budget stays: after an out-of-memory step the worker joins again with the same memory.
        self._step = 0
        self._state.step_time = StepTimeModel()
        if hello is not None:
            events.append(WorkerJoined(hello.epoch))
            started_on, self._state.model_fingerprint = self._state.model_fingerprint, hello.model_fingerprint
            self._batch.reset(min(self.limits.max_batch_size, hello.num_slots), hello.num_blocks, hello.block_size)
            for sequence in list(self._live.values()):
                try:
                    limits.check_model(sequence.request, hello, started_on if sequence.started_at is not None else "")
                    limits.check_capacity(sequence.request, hello)
                except LineclearError as error:
                    self._counters.requests_failed += 1
                    events.append(self._fail(sequence, error, now))
        return events

    def on_step_error(self, error: StepError, now: float) -> list[Event]:
        """Handle an out-of-memory error of the oldest step in flight; other errors do nothing.

        A step of one request fails the request. A larger step halves the token budget; 200 steps without such an error
        double it again. If halving does not help, requests run one at a time, as after a crash. Steps in flight are
        void: the caller has the worker join again, and the requests run again.
        """
        inflight = self._inflight[0] if self._inflight else None
        if inflight is None or error.step != inflight.step or error.kind is not StepErrorKind.OUT_OF_MEMORY:
            return []
        if inflight.num_rows > 1:
            self._halvings += 1
            self._steps_to_doubling = _RECOVERY_STEPS
            self._batch.dissolve_decode()
            self._poison.record_crash([inflight])
            return []
        sequence = next(inflight.sequences())
        if sequence.state is State.FINISHED:
            return []
        self._halvings = 0  # the size of the batch was not the cause
        self._counters.requests_failed += 1
        return [self._fail(sequence, DeviceOutOfMemory("the device has too little memory for this request alone"), now)]

    # --- plans and results ------------------------------------------------------------------------------------------

    @property
    def can_plan(self) -> bool:
        """Whether a worker is joined, the pipeline is not full and requests are live."""
        return self._hello is not None and len(self._inflight) < self.limits.pipeline_depth and bool(self._live)

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step; None while the pipeline is full or nothing can run. Call it until None."""
        if self._hello is None or not self.can_plan:
            return None
        self._planned_at = now
        isolated = self._poison.next_isolated()
        if isolated is not None and any(s is not isolated for inflight in self._inflight for s in inflight.sequences()):
            return None  # a loss now would prove nothing about it
        step = self._step + 1
        max_tokens = self._hello.max_step_tokens
        budget = min(self.limits.target_batch_tokens or max_tokens, max_tokens)
        planner = StepPlanner(self._state, step, max(1, budget >> self._halvings), now)
        if isolated is not None:
            planner.run_isolated(isolated)
        else:
            planner.run()
        self._events.extend(planner.events)
        if not (planner.decodes.slots or planner.chunks):
            return None
        self._step = step
        if self._halvings:
            self._steps_to_doubling -= 1
            if self._steps_to_doubling == 0:
                self._halvings -= 1
                self._steps_to_doubling = _RECOVERY_STEPS
        inflight = InflightStep(
            step,
            self._batch.decode_batch.decode_step,
            planner.decode_rows,
            planner.completing_block,
            planner.chunk_rows,
            planner.chunk_samples,
            planner.num_tokens,
            planner.kv_tokens,
        )
        self._inflight.append(inflight)
        self._counters.steps += 1
        self._counters.rows += inflight.num_rows
        chunks, inits = tuple(planner.chunks), tuple(planner.inits)
        zero_blocks = self._batch.pool.drain_to_zero()
        return StepPlan(self._hello.epoch, step, chunks, inits, zero_blocks, planner.decodes)

    def apply(self, result: StepResult, now: float) -> list[Event]:
        """Apply the result of the oldest step in flight. Raises BadResult, and then nothing was applied."""
        inflight = self._inflight[0] if self._inflight else None
        if inflight is None or self._hello is None or (result.epoch, result.step) != (self._hello.epoch, inflight.step):
            raise BadResult(f"step {result.step} is not the oldest in flight")
        inflight.check(result)
        self._inflight.popleft()
        self._state.step_time.observe(inflight.num_tokens, inflight.kv_tokens, result.step_seconds)
        tokens, failures = ResultTokens(result), list[Event]()
        bad = _bad_samples(result, self._hello.vocab_size)
        candidates = self._append_tokens(result, inflight, bad, tokens, failures, now)
        for sequence in inflight.completing_block:
            if sequence.state is State.RUNNING:
                if sequence.in_decode_batch:
                    self._batch.decode_batch.sync(sequence)
                self._batch.publish(sequence)
        for sequence, admission, end in inflight.chunk_rows:
            if sequence.admission_count == admission and sequence.state is State.RUNNING:
                sequence.num_computed = end
                self._batch.publish(sequence)
        failed = {sequence for row, sequence in enumerate(inflight.sampled()) if row in bad} if bad else ()
        self._batch.resolve_pending(inflight.step, failed)
        events = [*tokens.event(), *failures, *self._finish_complete(candidates, now)]
        if self._poison:
            for sequence in self._poison:
                if sequence.in_decode_batch:
                    self._batch.decode_batch.sync(sequence)
            self._poison.clear_passed()
        return events

    def _append_tokens(
        self,
        result: StepResult,
        inflight: InflightStep,
        bad: frozenset[int],
        tokens: ResultTokens,
        failures: list[Event],
        now: float,
    ) -> list[Sequence]:
        """Append the sampled tokens; return the sequences whose answer may be complete.

        Sequences that stayed in the decode batch since this step are appended in bulk. Sequences that left it are
        handled one by one, like prefill chunks. Tokens of sequences preempted in the meantime are valid.
        """
        rows, decode_batch = inflight.decode_rows.sequences, self._batch.decode_batch
        for row in bad:
            if row < len(rows) and rows[row].in_decode_batch:
                self._batch.leave_decode(rows[row])  # before on_result: this sample is not one of its tokens
        left = decode_batch.left_since(inflight.decode_rows, inflight.decode_step)
        candidates = []
        if rows:
            decode_batch.on_result(inflight.decode_step, inflight.step, now)
            candidates = tokens.add_decode_rows(inflight, left)
            self._counters.generation_tokens += len(rows) - len(left)
        singles = [(row, rows[row]) for row in left]
        for row, sequence in (*singles, *enumerate(inflight.chunk_samples, len(rows))):
            if sequence.state is State.FINISHED:
                self._counters.wasted_samples += 1
            elif row in bad:
                self._counters.requests_failed += 1
                failures.append(self._fail(sequence, _bad_row(row in result.bad_rows), now, tainted=True))
            else:
                tokens.add(sequence, row)
                self._append_one(sequence, inflight.step, now)
                candidates.append(sequence)
        return candidates

    def _append_one(self, sequence: Sequence, step: int, now: float) -> None:
        """Account for a token of a sequence that is not in the decode batch, or was not when the token was planned."""
        if sequence.state is State.WAITING:
            self._resuming.grow(sequence)
        else:
            sequence.num_computed = len(sequence.tokens) - 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        sequence.last_token_at = now
        sequence.last_step = step
        self._counters.generation_tokens += 1

    def _finish_complete(self, candidates: list[Sequence], now: float) -> list[Event]:
        """Finish the sequences whose last token completes the answer."""
        events: list[Event] = []
        for sequence in candidates:
            request, token = sequence.request, sequence.tokens[-1]
            if token in sequence.stop_token_ids and sequence.num_outputs > request.sampling.min_tokens:
                reason = FinishReason.STOP_EOS if token in request.eos_ids else FinishReason.STOP_TOKEN
                events.append(self._complete(sequence, reason, token, now))
            elif len(sequence.tokens) >= sequence.max_len:
                events.append(self._complete(sequence, FinishReason.LENGTH, None, now))
        return events

    def expected_samples(self) -> list[str]:
        """Return the request ids of the oldest step in flight, in the order of its result's tokens."""
        return [s.request.request_id for s in self._inflight[0].sampled()] if self._inflight else []

    # --- the end of a request ---------------------------------------------------------------------------------------

    def _complete(
        self, sequence: Sequence, reason: FinishReason, matched: int | None, now: float, num_tokens: int | None = None
    ) -> Finished:
        self._free(sequence)
        self._counters.requests_finished += 1
        return Finished(sequence.request.request_id, reason, matched, sequence.stats(now, num_tokens))

    def _fail(self, sequence: Sequence, error: LineclearError, now: float, *, tainted: bool = False) -> Failed:
        self._free(sequence, tainted=tainted)
        return Failed(sequence.request.request_id, error, sequence.stats(now))

    def _free(self, sequence: Sequence, *, tainted: bool = False) -> None:
        """Any state -> FINISHED."""
        self._poison.remove(sequence)
        self._state.queue_order.on_finish(sequence)
        if sequence.state is State.RUNNING:
            self._batch.free(sequence, State.FINISHED, tainted=tainted)
        else:
            assert sequence.state is State.WAITING
            (self._fresh if sequence in self._fresh else self._resuming).remove(sequence)
            sequence.state = State.FINISHED
        del self._live[sequence.request.request_id]
        if len(self._deadlines) > 2 * len(self._live) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not State.FINISHED]
            heapq.heapify(self._deadlines)

    # --- state ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> CoreSnapshot:
        """Return a copy of counters and gauges."""
        pool = self._batch.pool
        return CoreSnapshot(
            counters=self._counters.copy(),
            num_requests_waiting=len(self._fresh) + len(self._resuming),
            num_tokens_waiting=self._fresh.num_tokens + self._resuming.num_tokens,
            num_requests_running=len(self._batch.running),
            steps_in_flight=len(self._inflight),
            num_blocks=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            draining=self._state.draining,
            step_time=self._state.step_time.coefficients,
        )

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self._batch.pool.clear_cache()

    def dump(self) -> dict[str, Any]:
        """Return a copy of the state without content, about a microsecond per live request.

        Of tokens it has only the number, of requests the number of arrival in place of the id. It lacks the limits and
        events that were not drained.
        """
        return {
            "hello": None if self._hello is None else asdict(self._hello),
            "core": [self._step, self._planned_at, self._halvings, self._steps_to_doubling, self._num_arrivals],
            "counters": asdict(self._counters),
            "planner": self._state.dump(),
            "sequences": [s.dump() for s in dict.fromkeys(self._all_sequences())],
            "live": [s.number for s in self._live.values()],
            "fresh": self._fresh.dump(),
            "resuming": self._resuming.dump(),
            "deadlines": [[at, s.number] for at, _, s in self._deadlines if s.state is not State.FINISHED],
            "suspects": self._poison.dump(),
            "batch": self._batch.dump(),
            "inflight": [inflight.dump() for inflight in self._inflight],
        }

    def _all_sequences(self) -> Iterator[Sequence]:
        yield from self._live.values()
        for inflight in self._inflight:
            yield from inflight.sequences()
            yield from inflight.chunk_samples
        yield from self._batch.pending_sequences()

    def load(self, state: dict[str, Any]) -> None:
        """Restore a dump that went through JSON into a new core of the same limits; all tokens are blank."""
        self._hello = None if state["hello"] is None else load_hello(state["hello"])
        self._step, self._planned_at, self._halvings, self._steps_to_doubling, self._num_arrivals = state["core"]
        self._counters = self._state.counters = Counters(**state["counters"])
        self._state.load(state["planner"])
        sequences = {s.number: s for s in map(Sequence.load, state["sequences"])}
        self._live = {str(number): sequences[number] for number in state["live"]}
        self._fresh.load(state["fresh"], sequences)
        self._resuming.load(state["resuming"], sequences)
        self._deadlines = [(at, number, sequences[number]) for at, number in state["deadlines"]]
        heapq.heapify(self._deadlines)
        self._poison.load(state["suspects"], sequences)
        self._batch.load(state["batch"], sequences)
        self._inflight = deque(InflightStep.load(entry, sequences) for entry in state["inflight"])


def load_hello(fields: dict[str, Any]) -> Hello:
    """Return the Hello of fields that went through JSON."""
    return replace(Hello(**fields), eos_token_ids=tuple(fields["eos_token_ids"]))


def _bad_samples(result: StepResult, vocab_size: int) -> frozenset[int]:
    """Return the samples whose logits were not finite or whose token is not in the vocabulary."""
    tokens = result.tokens
    if not tokens or 0 <= min(tokens) <= max(tokens) < vocab_size:
        return result.bad_rows
    return result.bad_rows | {row for row, token in enumerate(tokens) if not 0 <= token < vocab_size}


def _bad_row(non_finite: bool) -> LineclearError:
    if non_finite:
        return NonFiniteLogits("the model produced a value that is not finite for this request")
    return InternalError("the worker sampled a token that is not in the vocabulary")
