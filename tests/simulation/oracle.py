"""The oracle: an independent model of the scheduler that checks the answer of every call.

It follows the calls and their answers, and reads nothing of the core but `snapshot`. `plan_checks` checks plans; this
file checks admission, results, the ends of requests, and the counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields

from simulation.invariant_error import require
from simulation.model_sequence import ModelSequence
from simulation.model_state import ModelState
from simulation.model_workers import ModelWorker
from simulation.plan_checks import PlanChecks
from simulation.result_checks import ResultChecks, require_same
from simulation.scenario import Scenario
from support.counters import check_counters
from support.toy import expected, expected_scores, expected_vector, fingerprint, with_adapter

from lineclear import errors
from lineclear.scheduler.core.events import Admitted, Event, Failed, Finished, FinishReason, WorkerJoined, WorkerLost
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.core.stats import CoreSnapshot, Counters
from lineclear.wire.messages import Hello, StepError, StepErrorKind

_COUNTERS = [field.name for field in fields(Counters)]


class Oracle:
    """Checks every call of a simulated core and updates the model."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.limits = scenario, scenario.limits
        self.state = ModelState(scenario.limits)
        self.plan_checks = PlanChecks(self.state)
        self.result_checks = ResultChecks(self.state, scenario.vocab_size, scenario.bad_per_mille)

    # --- calls ------------------------------------------------------------------------------------------------------

    def on_submit(self, request: Request, now: float, outcome: list[Event] | errors.LineclearError) -> None:
        error = self._expected_error(request)
        run_seconds = self.state.wait.pace.run_seconds(request)
        since = now if request.queued_since is None else request.queued_since
        if error is None and self._must_expire(request, self.state.queue.preview(request, now, run_seconds), now):
            error = errors.DeadlineUnreachable
        if error is not None:
            self.state.counters.requests_rejected += 1
            self.state.refusing |= error is errors.QueueFull
            require(type(outcome) is error, "I12", "rejected with the right error")
            return
        require(isinstance(outcome, list), "I12", "admitted if no limit is reached")
        sequence = ModelSequence(request, self.state.queue.key(request, since, run_seconds), now)
        assert isinstance(outcome, list)
        sequence.protected = self.limits.max_preemptions == 0
        self._set_answer(sequence)
        self.state.add(sequence)
        self._check_position(sequence, outcome[0], now)
        self.state.counters.requests_admitted += 1

    def _must_expire(self, request: Request, queue_key: tuple[float, int], now: float) -> bool:
        """Return whether a request is rejected because a third of its wait is longer than its time."""
        if request.deadline is None or request.is_sibling or not self.limits.reject_unmeetable_deadlines:
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

    def on_siblings(self, request_ids: Iterable[str]) -> None:
        """Note the outputs of one request, which have just been admitted."""
        siblings = tuple(self.state.live[request_id] for request_id in request_ids)
        for sequence in siblings:
            sequence.siblings = siblings

    def on_switch(self, limits: CoreLimits) -> None:
        before, self.limits = self.limits, limits
        self.state.switch(before, limits)
        self.state.queue.switch(limits, list(self.state.live.values()), self.state.wait.pace.run_seconds)

    def on_cancel(self, request_id: str, error: type[errors.LineclearError], now: float, events: list[Event]) -> None:
        sequence = self.state.live.get(request_id)
        if sequence is None:
            return require(events == [], "I10", "nothing happens to an unknown request")
        self.state.remove(sequence)
        self.state.counters.requests_cancelled += 1
        return require_same(events, [(Failed, request_id, error, sequence.stats(now))])

    def on_finish(self, request_id: str, num_tokens: int, now: float, events: list[Event]) -> None:
        sequence = self.state.live.get(request_id)
        if sequence is None:
            return require(events == [], "I10", "nothing happens to an unknown request")
        self.state.wait.pace.observe(sequence)
        self.state.remove(sequence)
        self.state.counters.requests_finished += 1
        stats = sequence.stats(now, num_tokens)
        return require_same(events, [Finished(request_id, FinishReason.STOP_STRING, None, stats)])

    def on_expire(self, now: float, events: list[Event]) -> None:
        due = [s for s in self.state.live.values() if s.request.deadline is not None and s.request.deadline <= now]
        wanted = []
        for sequence in sorted(due, key=lambda s: (s.request.deadline, s.queue_key[1])):
            self.state.remove(sequence)
            self.state.counters.requests_expired += 1
            wanted.append((Failed, sequence.request.request_id, errors.DeadlineExceeded, sequence.stats(now)))
        require_same(events, wanted)

    def on_worker_lost(self, epoch: int, now: float, events: list[Event], loss: WorkerLoss) -> None:
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
                wanted.append((Failed, isolated.request.request_id, errors.PoisonRequest, isolated.stats(now)))
        self.state.lose(epoch)
        return require_same(events, wanted)

    def on_worker_joined(self, hello: Hello, now: float, events: list[Event]) -> None:
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
        require_same(events, wanted)

    def on_step_error(self, error: StepError, now: float, events: list[Event]) -> None:
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
                wanted.append((Failed, sequence.request.request_id, errors.DeviceOutOfMemory, sequence.stats(now)))
        require_same(events, wanted)

    def on_drain(self) -> None:
        self.state.draining = True

    def on_clear_prefix_cache(self) -> None:
        for worker in self.state.workers.values():
            worker.blocks.clear_cache()

    # --- after every call -------------------------------------------------------------------------------------------

    def check_snapshot(self, snapshot: CoreSnapshot) -> None:
        """Check counters and gauges between two calls, and note the step-time models."""
        self.plan_checks.placement.observe(snapshot.workers)
        for name in _COUNTERS:
            reported, counted = getattr(snapshot.counters, name), getattr(self.state.counters, name)
            require(reported == counted, "I21", f"{name} is {reported}, {counted} counted")
        check_counters(snapshot.counters)
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
            require(shown.state_snapshots_used == worker.states.num_kept, "I32", "snapshots that keep a state")
            require(shown.state_snapshot_hits == worker.states.num_hits, "I32", "requests that began with a state")
            require(shown.blocks_cached == worker.blocks.num_cached, "I4", "free blocks that keep a prefix")
            require(shown.steps_in_flight == len(worker.inflight), "I9", "plans without result")
            require((shown.steps, shown.num_slots) == (worker.step, worker.num_slots), "I9", "steps and slots")
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
        sequence.answer = expected(request.prompt, request.sampling, *sizes, model, request.output)
        if request.scoring is not None:
            sequence.scores = expected_scores(request.prompt, *request.scoring, self.scenario.vocab_size, model)
        if request.pooling is not None:
            sequence.vector = expected_vector(request.prompt, request.pooling, model)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _expected_error(self, request: Request) -> type[errors.LineclearError] | None:
        places = [s for s in self.state.fresh if not s.request.is_sibling]
        waiting = sum(len(s.tokens) for s in places)
        if self.state.draining and not request.is_sibling:
            return errors.ServerDraining
        if request.request_id in self.state.live:
            return errors.DuplicateRequest
        if not self.state.adapters.is_loaded(request.adapter):
            return errors.AdapterNotFound
        if not request.is_sibling and len(places) >= self.limits.max_queue_size:
            return errors.QueueFull
        num_tokens = len(request.prompt) + len(request.output)
        if not request.is_sibling and places and waiting + num_tokens > self.limits.max_queue_tokens:
            return errors.QueueFull
        return self.state.rejection(request)
