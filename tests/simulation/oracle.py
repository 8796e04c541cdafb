"""The oracle: an independent model of the scheduler that checks the answer of every call.

It follows the calls and their answers, and reads nothing of the core but `snapshot`. `plan_checks` checks plans; this
file checks admission, results, the ends of requests, and the counters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any

from simulation.invariant_error import InvariantViolated, require
from simulation.model_sequence import ModelSequence
from simulation.model_state import ModelState
from simulation.model_workers import ModelStep, ModelWorker
from simulation.plan_checks import PlanChecks
from simulation.scenario import Scenario, is_bad
from support.events import flat
from support.toy import expected, expected_scores, expected_vector, fingerprint, with_adapter

from lineclear.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    DeadlineUnreachable,
    DeviceOutOfMemory,
    DuplicateRequest,
    InternalError,
    LineclearError,
    NonFiniteLogits,
    PoisonRequest,
    QueueFull,
    ServerDraining,
)
from lineclear.scheduler.core.events import (
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Pooled,
    Preempted,
    Scored,
    TokensReady,
    WorkerJoined,
    WorkerLost,
)
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.core.stats import CoreSnapshot, Counters
from lineclear.wire.messages import Hello, Logprobs, RowOutput, Scores, StepError, StepErrorKind, StepPlan, StepResult

_COUNTERS = [field.name for field in fields(Counters)]


class Oracle:
    """Checks every call of a simulated core and updates the model."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.limits = scenario, scenario.limits
        self.state = ModelState(scenario.limits)
        self.plan_checks = PlanChecks(self.state)

    # --- calls ------------------------------------------------------------------------------------------------------

    def on_submit(self, request: Request, now: float, outcome: list[Event] | LineclearError) -> None:
        """Check the outcome of `submit`."""
        error = self._expected_error(request)
        run_seconds = self.state.wait.pace.run_seconds(request)
        if error is None and self._must_expire(request, self.state.queue.preview(request, now, run_seconds), now):
            error = DeadlineUnreachable
        if error is not None:
            self.state.counters.requests_rejected += 1
            self.state.refusing |= error is QueueFull
            require(type(outcome) is error, "I12", "rejected with the right error")
            return
        require(isinstance(outcome, list), "I12", "admitted if no limit is reached")
        sequence = ModelSequence(request, self.state.queue.key(request, now, run_seconds), now)
        assert isinstance(outcome, list)
        sequence.protected = self.limits.max_preemptions == 0
        self._set_answer(sequence)
        self.state.add(sequence)
        self._check_position(sequence, outcome[0], now)
        self.state.counters.requests_admitted += 1

    def _must_expire(self, request: Request, queue_key: tuple[float, int], now: float) -> bool:
        """Return whether a request is rejected because a third of its wait is longer than its time."""
        if request.deadline is None or not self.limits.reject_unmeetable_deadlines:
            return False
        ahead = sum(other.queue_key < queue_key for other in (*self.state.fresh, *self.state.resuming))
        if ahead < sum(worker.num_slots for worker in self.state.workers.values()):
            return False
        wait = self.state.wait.seconds(queue_key, now, arriving=1)
        return bool(wait) and now + (wait or 0.0) / 3 > request.deadline

    def _check_position(self, sequence: ModelSequence, admitted: Event, now: float) -> None:
        """Check the place in the queue of a request that has arrived."""
        assert isinstance(admitted, Admitted)
        ahead = sum(other.queue_key < sequence.queue_key for other in (*self.state.fresh, *self.state.resuming))
        if not sequence.request.wants_position:
            require(admitted.position is None, "I12", "a place only for requests that ask")
        elif admitted.position is None:
            free = sum(max(0, worker.num_slots - len(worker.running)) for worker in self.state.workers.values())
            require(ahead < free, "I12", "a request without a place finds a free slot")
        else:
            require(admitted.position.requests_ahead == ahead, "I12", "the place counts the requests before")
            seconds, right = admitted.position.seconds, self.state.wait.seconds(sequence.queue_key, now)
            require((seconds is None) == (right is None), "I12", "a wait is predicted from the first answer on")
            close = math.isclose(seconds or 0.0, right or 0.0, rel_tol=1e-6, abs_tol=1e-9)
            require(close, "I12", "the predicted wait is that of the requests before")

    def on_switch(self, limits: CoreLimits) -> None:
        """Follow other limits and policies."""
        before, self.limits = self.limits, limits
        self.state.switch(before, limits)
        self.state.queue.switch(limits, list(self.state.live.values()), self.state.wait.pace.run_seconds)

    def on_cancel(self, request_id: str, error: type[LineclearError], now: float, events: list[Event]) -> None:
        """Check the events of `cancel`."""
        sequence = self.state.live.get(request_id)
        if sequence is None:
            return require(events == [], "I10", "nothing happens to an unknown request")
        self.state.remove(sequence)
        self.state.counters.requests_cancelled += 1
        return self._same(events, [(Failed, request_id, error, sequence.stats(now))])

    def on_finish(self, request_id: str, num_tokens: int, now: float, events: list[Event]) -> None:
        """Check the events of `finish`."""
        sequence = self.state.live.get(request_id)
        if sequence is None:
            return require(events == [], "I10", "nothing happens to an unknown request")
        self.state.wait.pace.observe(sequence)
        self.state.remove(sequence)
        self.state.counters.requests_finished += 1
        stats = sequence.stats(now, num_tokens)
        return self._same(events, [Finished(request_id, FinishReason.STOP_STRING, None, stats)])

    def on_expire(self, now: float, events: list[Event]) -> None:
        """Check the events of `expire`."""
        due = [s for s in self.state.live.values() if s.request.deadline is not None and s.request.deadline <= now]
        wanted = []
        for sequence in sorted(due, key=lambda s: (s.request.deadline, s.queue_key[1])):
            self.state.remove(sequence)
            self.state.counters.requests_expired += 1
            wanted.append((Failed, sequence.request.request_id, DeadlineExceeded, sequence.stats(now)))
        self._same(events, wanted)

    def on_worker_lost(self, epoch: int, now: float, events: list[Event], loss: WorkerLoss) -> None:
        """Check the events of `worker_lost`."""
        worker = self.state.workers.get(epoch)
        if worker is None:
            return require(events == [], "I10", "nothing happens for an unknown worker")
        wanted: list[object] = [WorkerLost(epoch)]
        isolated = self.state.record_crash(worker.inflight) if loss is not WorkerLoss.CLEAN else None
        if isolated is not None and isolated.crash_count > 1:
            isolated.isolated_losses[loss] += 1
            crashes, kills = isolated.isolated_losses[WorkerLoss.CRASHED], isolated.isolated_losses[WorkerLoss.KILLED]
            if crashes / self.limits.max_isolated_crashes + kills / self.limits.max_isolated_kills >= 1.0:
                self.state.remove(isolated)
                self.state.counters.requests_failed += 1
                wanted.append((Failed, isolated.request.request_id, PoisonRequest, isolated.stats(now)))
        self.state.lose(epoch)
        return self._same(events, wanted)

    def on_worker_joined(self, hello: Hello, now: float, events: list[Event]) -> None:
        """Check the events of `worker_joined`."""
        wanted: list[object] = [WorkerJoined(hello.epoch)]
        self.state.join(hello)
        for sequence in list(self.state.live.values()):
            error = self.state.rejection(sequence.request, sequence.started_on)
            if error is None:
                self._set_answer(sequence)
            else:
                self.state.remove(sequence)
                self.state.counters.requests_failed += 1
                wanted.append((Failed, sequence.request.request_id, error, sequence.stats(now)))
        self._same(events, wanted)

    def on_step_error(self, error: StepError, now: float, events: list[Event]) -> None:
        """Check the events of `on_step_error`."""
        wanted: list[object] = []
        worker = self.state.workers[error.epoch]
        if worker.inflight and error.kind is StepErrorKind.OUT_OF_MEMORY:
            rows = worker.inflight[0].rows
            if len(rows) > 1:
                worker.budget.halve()
                self.state.record_crash([worker.inflight[0]])
            elif rows[0][0].is_live:
                sequence = rows[0][0]
                self.state.remove(sequence)
                worker.budget.restore()
                self.state.counters.requests_failed += 1
                wanted.append((Failed, sequence.request.request_id, DeviceOutOfMemory, sequence.stats(now)))
        self._same(events, wanted)

    def on_drain(self) -> None:
        """Note a call of `drain`."""
        self.state.draining = True

    def on_load_adapter(self, key: bytes, index: int | None) -> None:
        """Check the answer of `load_adapter`; None: it was refused."""
        self.state.adapters.on_load(key, index, self.state.live.values())

    def on_unload_adapter(self, key: bytes, num_uses: int) -> None:
        """Check the answer of `unload_adapter`."""
        self.state.adapters.on_unload(key, num_uses, self.state.live.values())

    def on_clear_prefix_cache(self) -> None:
        """Note a call of `clear_prefix_cache`."""
        for worker in self.state.workers.values():
            worker.blocks.clear_cache()

    def on_stop_placing(self, epoch: int) -> None:
        """Note a call of `stop_placing`."""
        if epoch in self.state.workers:
            self.state.workers[epoch].is_stopping = True

    def on_plan(self, epoch: int, plan: StepPlan | None, now: float, events: list[Event]) -> None:
        """Check a plan, or None, and its events."""
        self.plan_checks.on_plan(epoch, plan, now, events)

    # --- a result ---------------------------------------------------------------------------------------------------

    def on_apply(self, result: StepResult, now: float, events: list[Event]) -> None:
        """Check the events of `apply`."""
        worker = self.state.workers[result.epoch]
        step = worker.inflight.popleft()
        require(result.step == step.step, "I9", "results in the order of plans")
        sampling = [i for i, (*_, output) in enumerate(step.outputs) if output is RowOutput.SAMPLE]
        counts = result.counts or (1,) * len(sampling)
        drafted = result.num_drafted or (0,) * len(sampling)
        owners = [i for i, count in zip(sampling, counts, strict=True) for _ in range(count)]
        tokens = zip(owners, result.tokens, strict=True)
        bad_rows = {i for i, token in tokens if not 0 <= token < self.scenario.vocab_size}
        bad_rows |= result.bad_rows
        tainted = {step.outputs[i][:2] for i in bad_rows}
        readers = worker.blocks.readers(tainted)
        wanted: list[object] = self._restart(readers)
        ends = list(accumulate(counts))
        for index, sequence in enumerate(step.samples):
            sequence.in_flight -= 1
            if not sequence.is_live or sequence.num_void:
                self.state.counters.wasted_samples += 1
                if sequence.is_live:
                    sequence.num_void, sequence.num_known = sequence.num_void - 1, sequence.num_known - 1
                continue
            bad = sampling[index] in result.bad_rows
            request_id = sequence.request.request_id
            if sequence in step.drafting:
                self._count_drafts(sequence, drafted[index], counts[index] - 1)
            if sampling[index] in bad_rows:
                worker.blocks.taint(sequence)
                self.state.remove(sequence)
                self.state.counters.requests_failed += 1
                wanted.append((Failed, request_id, NonFiniteLogits if bad else InternalError, sequence.stats(now)))
                continue
            first_output = sequence.num_outputs
            for place in range(ends[index] - counts[index], ends[index]):
                if sequence.num_outputs == len(sequence.answer) > first_output:
                    break  # tokens behind the end of the answer are dropped
                logprobs = result.logprobs[place] if result.logprobs else None
                wanted.append(self._token(sequence, result.tokens[place], logprobs))
            sequence.num_known += sequence.num_outputs - first_output - 1
            if sequence.num_drafts:
                sequence.num_drafts, sequence.num_planned = 0, sequence.num_known - 1
            sequence.first_token_at = now if sequence.first_token_at is None else sequence.first_token_at
            sequence.last_token_at, sequence.last_step = now, step.step
        wanted += self._reports(worker, step, result, now)
        worker.blocks.resolve_pending(step.step, tainted | readers)
        for sequence, admission, end in step.rows:
            if sequence.is_running and sequence.admission_count == admission:
                worker.blocks.publish(sequence, sequence.num_planned if sequence in step.drafting else end)
        # Requests may end in any order, but blocks must be released in that order.
        order = {event.request_id: place for place, event in enumerate(events) if isinstance(event, Finished)}
        owners = [sequence for sequence, *_ in step.outputs]
        by_end = sorted(owners, key=lambda sequence: order.get(sequence.request.request_id, len(order)))
        wanted += [event for sequence in by_end if (event := self._finish(sequence, now)) is not None]
        for sequence in self.state.live.values():
            if sequence.crash_count and sequence.num_computed >= sequence.clear_position:
                sequence.crash_count = sequence.clear_position = 0
                sequence.isolated_losses.clear()
        self._same(_sorted_by_kind(events), _sorted_by_kind(wanted))
        kinds = [_kind(event) for event in flat(events)]
        require(kinds == sorted(kinds), "I10", "the end of a request comes after its tokens")

    def _count_drafts(self, sequence: ModelSequence, num_drafted: int, num_accepted: int) -> None:
        require(num_accepted <= num_drafted, "I20", "no more drafts accepted than verified")
        sequence.drafted_tokens += num_drafted
        sequence.accepted_tokens += num_accepted
        self.state.counters.spec_decode_num_drafts += num_drafted > 0
        self.state.counters.spec_decode_num_draft_tokens += num_drafted
        self.state.counters.spec_decode_num_accepted_tokens += num_accepted

    def _token(self, sequence: ModelSequence, token: int, logprobs: Logprobs | None) -> TokensReady:
        """Check the next token of an answer and return its event."""
        index = sequence.num_outputs
        context = (*sequence.request.prompt, *sequence.answer[:index])
        require(not is_bad(context, self.scenario.bad_per_mille), "I20", "bad logits are found")
        right = index < len(sequence.answer) and token == sequence.answer[index]
        require(right, "I20", "the answer is that of the request alone")
        is_requested = sequence.request.sampling.logprobs >= 0
        require((logprobs is not None) == is_requested, "I24", "logprobs exactly if requested")
        sequence.num_outputs += 1
        self.state.counters.generation_tokens += 1
        return TokensReady(sequence.request.request_id, index, (token,), () if logprobs is None else (logprobs,))

    def _reports(self, worker: ModelWorker, step: ModelStep, result: StepResult, now: float) -> list[object]:
        """Return the events of the scores and vectors of a result, each position once."""
        wanted: list[object] = []
        scores, vectors = iter(result.scores), iter(result.vectors)
        for index, (sequence, admission, start, end, output) in enumerate(step.outputs):
            if output is RowOutput.SAMPLE:
                continue
            value: Scores | bytes = next(scores) if output is RowOutput.SCORE else next(vectors)
            if not sequence.is_live or admission <= sequence.void_admission:
                continue
            request, context = sequence.request, sequence.request.prompt[:end]
            if index in result.bad_rows:
                worker.blocks.taint(sequence)
                self.state.remove(sequence)
                self.state.counters.requests_failed += 1
                wanted.append((Failed, request.request_id, NonFiniteLogits, sequence.stats(now)))
                continue
            sequence.last_step = step.step
            require(not is_bad(context, self.scenario.bad_per_mille), "I20", "values that are not finite are found")
            if isinstance(value, bytes):
                if end == len(request.prompt):
                    require(value == sequence.vector, "I20", "the vector is that of the request alone")
                    sequence.is_pooled = True
                    wanted.append(Pooled(request.request_id, value))
                continue
            right = sequence.scores[start - sequence.first_scored : end - sequence.first_scored]
            require(value == _joined(right), "I20", "the scores are those of the request alone")
            if end > sequence.scored_to:
                first = sequence.scored_to
                sequence.num_scores = end - sequence.first_scored
                wanted.append(Scored(request.request_id, first, _joined(right[first - start :])))
        return wanted

    def _restart(self, readers: Collection[tuple[ModelSequence, int]]) -> list[object]:
        """Restart the requests that share blocks of a bad row: what they computed since then is void."""
        wanted: list[object] = []
        for sequence, admission in sorted(readers, key=lambda entry: entry[0].queue_key):
            if sequence.is_live and sequence.admission_count == admission:
                if sequence.is_running:
                    self.state.preempt(sequence)
                    wanted.append(Preempted(sequence.request.request_id))
                sequence.num_void, sequence.void_admission = sequence.in_flight, admission
                sequence.max_computed_before = min(sequence.max_computed_before, len(sequence.tokens))
        return wanted

    def _finish(self, sequence: ModelSequence, now: float) -> Finished | None:
        if not sequence.request.max_tokens:
            return self._finish_without_output(sequence, now)
        if not sequence.is_live or sequence.num_outputs < len(sequence.answer):
            return None
        require(sequence.is_complete, "I20", "the scores of a prompt come before its answer")
        request, last = sequence.request, sequence.answer[-1]
        self.state.wait.pace.observe(sequence)
        self.state.remove(sequence)
        self.state.counters.requests_finished += 1
        if last in request.sampling.stop_ids and sequence.num_outputs > request.sampling.min_tokens:
            reason = FinishReason.STOP_EOS if last in request.eos_ids else FinishReason.STOP_TOKEN
            return Finished(request.request_id, reason, last, sequence.stats(now))
        require(sequence.num_outputs == request.max_tokens, "I20", "an answer ends by a stop token or by length")
        return Finished(request.request_id, FinishReason.LENGTH, None, sequence.stats(now))

    def _finish_without_output(self, sequence: ModelSequence, now: float) -> Finished | None:
        if not sequence.is_live or not (sequence.is_pooled or sequence.is_complete):
            return None
        self.state.wait.pace.observe(sequence)
        self.state.remove(sequence)
        self.state.counters.requests_finished += 1
        return Finished(sequence.request.request_id, FinishReason.NO_OUTPUT, None, sequence.stats(now))

    # --- after every call -------------------------------------------------------------------------------------------

    def check_snapshot(self, snapshot: CoreSnapshot) -> None:
        """Check counters and gauges between two calls, and note the step-time models."""
        self.plan_checks.placement.observe(snapshot.workers)
        for name in _COUNTERS:
            reported, counted = getattr(snapshot.counters, name), getattr(self.state.counters, name)
            require(reported == counted, "I21", f"{name} is {reported}, {counted} counted")
        self._check_workers(snapshot)
        require(
            snapshot.num_requests_waiting == len(self.state.fresh) + len(self.state.resuming), "I11", "waiting requests"
        )
        waiting = sum(len(s.request.prompt) + s.num_outputs for s in (*self.state.fresh, *self.state.resuming))
        require(snapshot.num_tokens_waiting == waiting, "I12", "tokens of waiting requests")
        require(snapshot.draining == self.state.draining, "I21", "draining is reported")

    def _check_workers(self, snapshot: CoreSnapshot) -> None:
        require([w.epoch for w in snapshot.workers] == list(self.state.workers), "I9", "joined workers, oldest first")
        for shown, worker in zip(snapshot.workers, self.state.workers.values(), strict=True):
            started = len(worker.running) + len(worker.finishing)
            require(shown.num_requests_running == started, "I11", "running requests")
            require(shown.blocks_used == worker.blocks.num_used, "I1", "used blocks are those in block tables")
            require(shown.blocks_cached == worker.blocks.num_cached, "I4", "free blocks that keep a prefix")
            require(shown.steps_in_flight == len(worker.inflight), "I9", "plans without result")
            require((shown.steps, shown.num_slots) == (worker.step, worker.num_slots), "I9", "steps and slots")
            require(shown.is_stopping == worker.is_stopping, "I21", "stopping is reported")
        for name in ("num_requests_running", "steps_in_flight", "num_blocks", "blocks_used", "blocks_cached"):
            total = sum(getattr(worker, name) for worker in snapshot.workers)
            require(getattr(snapshot, name) == total, "I21", f"{name} is the total of all workers")

    def check_next_deadline(self, moment: float | None, now: float, planned_all: bool) -> None:
        """Check the answer of `next_deadline`; `planned_all`: `plan` returned None before."""
        deadlines = [s.request.deadline for s in self.state.live.values() if s.request.deadline is not None]
        if deadlines:
            require(moment is not None and moment <= min(deadlines), "I13", "the next deadline is not missed")
        if planned_all:
            require(moment is None or moment > now, "I13", "no wakeup in the past")
            idle = [w for w in self.state.workers.values() if not w.inflight and self._may_start(w)]
            if idle and self.limits.batching_strategy != "fixed_size":
                require(moment is not None, "I13", "an idle worker wakes up for a request that waits")
                for worker in (worker for worker in idle if not worker.batching.is_open(now)):
                    oldest = min(s.arrival for s in self.state.fresh if self.state.is_possible(s, worker))
                    due = oldest + self.limits.policy.batch_timeout_seconds
                    require((moment or 0) <= due, "I13", "the batch timeout is not missed")
        if moment is not None and not deadlines:
            is_waiting = self.state.fresh or (self.state.resuming and len(self.state.workers) > 1)
            require(bool(is_waiting), "I23", "no wakeup without a waiting request")

    def _may_start(self, worker: ModelWorker) -> bool:
        is_able = self.state.takes_requests(worker) and not worker.running
        return is_able and any(self.state.is_possible(sequence, worker) for sequence in self.state.fresh)

    def max_steps(self) -> int:
        """Return an upper bound of the steps until all live requests end without faults."""
        admissions = 5 + max(1, self.limits.max_preemptions)  # three of them as a suspect
        return sum(s.max_len * admissions for s in self.state.live.values()) + self.limits.pipeline_depth

    def _set_answer(self, sequence: ModelSequence) -> None:
        """Set the expected answer: from the model that the request names, started on, or will start on."""
        request = sequence.request
        joined = next((worker.hello.model_fingerprint for worker in self.state.workers.values()), "")
        model = request.model_fingerprint or sequence.started_on or joined
        sizes = request.max_tokens, self.scenario.vocab_size
        model = with_adapter(model.removeprefix(fingerprint("")), request.adapter)
        sequence.answer = expected(request.prompt, request.sampling, *sizes, model)
        if request.scoring is not None:
            sequence.scores = expected_scores(request.prompt, *request.scoring, self.scenario.vocab_size, model)
        if request.pooling is not None:
            sequence.vector = expected_vector(request.prompt, request.pooling, model)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _expected_error(self, request: Request) -> type[LineclearError] | None:
        places = [s for s in self.state.fresh if not s.request.is_sibling]
        waiting = sum(len(s.tokens) for s in places)
        if self.state.draining:
            return ServerDraining
        if request.request_id in self.state.live:
            return DuplicateRequest
        if not self.state.adapters.is_loaded(request.adapter):
            return AdapterNotFound
        if not request.is_sibling and len(places) >= self.limits.max_queue_size:
            return QueueFull
        num_tokens = len(request.prompt) + len(request.output)
        if not request.is_sibling and places and waiting + num_tokens > self.limits.max_queue_tokens:
            return QueueFull
        return self.state.rejection(request)

    def _same(self, events: Iterable[Event], wanted: Sequence[object]) -> None:
        got = [(Failed, e.request_id, type(e.error), e.stats) if isinstance(e, Failed) else e for e in events]
        if got != list(wanted):
            is_end = any(isinstance(event, Finished | tuple) for event in (*got, *wanted))
            invariant = "I10" if is_end else "I7"
            raise InvariantViolated(invariant, f"events {got} instead of {list(wanted)}")


def _joined(scores: Sequence[Scores]) -> Scores:
    """Return the scores of single positions as one."""
    columns = (tuple(value for row in scores for value in row[field]) for field in range(3))
    return Scores(*columns)


def _kind(event: Any) -> int:
    """Return the place of an event among those of one result: tokens, scores and vectors; failures; ends."""
    return 0 if isinstance(event, TokensReady | Scored | Pooled) else 2 if isinstance(event, Finished) else 1


def _sorted_by_kind(events: Iterable[Any]) -> list[Any]:
    """Return the events of one result in a fixed order; requests are independent of each other."""
    return sorted(flat(events), key=lambda e: (_kind(e), e[1] if type(e) is tuple else e.request_id))
