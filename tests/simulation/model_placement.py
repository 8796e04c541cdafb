"""Model of placement: when a worker may leave a waiting request to another one, and when it must.

The costs of architecture.md: tokens that are queued on a worker and those of the prompt that its cache lacks, in
seconds if the step-time models of all workers in question are fitted. The models' coefficients are read from the
snapshot of the core.
"""

from __future__ import annotations

from collections.abc import Iterable

from simulation.invariant_error import require
from simulation.model_sequence import ModelSequence
from simulation.model_state import ModelState
from simulation.model_workers import ModelWorker

from lineclear.scheduler.core.stats import WorkerSnapshot

_MIN_WAIT_SECONDS = 0.001


class ModelPlacement:
    """Checks the choices of plans."""

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self._snapshots: dict[int, WorkerSnapshot] = {}
        self._open: set[int] = set()  # workers that requests may join; the core asks once a plan, at its first choice

    def observe(self, snapshots: Iterable[WorkerSnapshot]) -> None:
        self._snapshots = {snapshot.epoch: snapshot for snapshot in snapshots}

    def measured(self, worker: ModelWorker) -> WorkerSnapshot:
        return self._snapshots[worker.epoch]

    def begin_plan(self, now: float) -> None:
        """Note before a plan which workers requests that have not started may join."""
        self._open = self._open_workers(now)

    def _open_workers(self, now: float) -> set[int]:
        if len(self._state.workers) < 2 or self._state.limits.batching_strategy not in ("continuous", "adaptive"):
            return set()
        return {epoch for epoch, worker in self._state.workers.items() if worker.batching.is_open(now)}

    def note_passed(self, worker: ModelWorker, now: float) -> None:
        """Note after a plan which requests it did not take: they may have been left to another worker."""
        for sequence in (*self._state.fresh, *self._state.resuming):
            if self._is_placed(sequence) and self._state.is_possible(sequence, worker):
                sequence.passed_at = now if sequence.passed_at is None else sequence.passed_at
                if not sequence.is_left:
                    self._extend(sequence, worker, now)

    def check_taken(self, sequence: ModelSequence, worker: ModelWorker, planned: int, now: float) -> None:
        """Check that no other worker is better for the head of the queue, which `worker` takes."""
        state = self._state
        if not self._is_placed(sequence) or (sequence.passed_at is not None and now > sequence.passed_at):
            return
        ahead = (s for s in (*state.fresh, *state.resuming) if state.is_possible(s, worker))
        if any(s.queue_key < sequence.queue_key for s in ahead):
            return  # a sequence that was left before counts as work of another worker
        if sequence.started_at is None and state.limits.batching_strategy == "adaptive":
            return
        if sequence.overtaken_count + sequence.num_resumed_before >= state.limits.max_queue_overtakes:
            return
        changed = self._open ^ self._open_workers(now)
        if any(state.is_possible(sequence, state.workers[epoch]) for epoch in changed):
            return  # a request of this plan closed the batch of an idle worker, before or after the core asked
        slack = 2 * worker.num_slots
        for other in self._choices(sequence, worker):
            in_seconds = self._in_seconds(sequence, worker)
            own = self._cost(worker, worker.queued_tokens() + planned + worker.uncached(sequence) - slack, in_seconds)
            cost = self._cost(other, other.queued_tokens() + other.uncached(sequence), in_seconds)
            require(own <= cost, "I26", "a request goes to the worker that has computed its prompt first")

    def may_leave(self, sequence: ModelSequence, worker: ModelWorker, now: float) -> bool:
        """Return whether `worker`, which has room for the head of the queue, may leave it to another one."""
        if not self._is_placed(sequence):
            return False
        if not sequence.is_left:
            self._extend(sequence, worker, now)
        sequence.is_left = True  # the bound is that of the first plan that certainly left it, or of one before
        in_seconds = self._in_seconds(sequence, worker)
        return self._saved(sequence, worker, in_seconds) > 0.0 and now < sequence.left_until

    def _extend(self, sequence: ModelSequence, worker: ModelWorker, now: float) -> None:
        """A plan may have left a sequence to another worker: for as many seconds as this saves."""
        is_timed = sequence.started_at is None and self._in_seconds(sequence, worker)
        saved = self._saved(sequence, worker, in_seconds=True) if is_timed else 0.0
        sequence.left_until = max(sequence.left_until, now + max(_MIN_WAIT_SECONDS, saved))

    def _saved(self, sequence: ModelSequence, worker: ModelWorker, in_seconds: bool) -> float:
        """Return how much earlier, in seconds or tokens, another worker has computed the prompt; 0.0: none does."""
        # During the plan, sequences with their last row in it counted as work.
        queued = worker.queued_tokens() + len(worker.finishing)
        own = self._cost(worker, queued + worker.uncached(sequence), in_seconds)
        choices = self._choices(sequence, worker)
        best = min((self._cost(w, w.queued_tokens() + w.uncached(sequence), in_seconds) for w in choices), default=own)
        return max(0.0, own - best)

    def _is_placed(self, sequence: ModelSequence) -> bool:
        limits = self._state.limits
        return (
            len(self._state.workers) > 1
            and limits.batching_strategy in ("continuous", "adaptive")
            and sequence.overtaken_count < limits.max_queue_overtakes
        )

    def _candidates(self, sequence: ModelSequence, worker: ModelWorker) -> list[ModelWorker]:
        return [
            other
            for other in self._state.workers.values()
            if other is not worker
            and self._state.takes_requests(other)
            and self._state.is_possible(sequence, other)
            and other.has_room(sequence)
            and (sequence.started_at is not None or other.epoch in self._open)
        ]

    def _in_seconds(self, sequence: ModelSequence, worker: ModelWorker) -> bool:
        workers = (worker, *self._candidates(sequence, worker))
        return all(self._snapshots[other.epoch].is_fitted for other in workers)

    def _choices(self, sequence: ModelSequence, worker: ModelWorker) -> list[ModelWorker]:
        """Return the other workers to which the request may be left: without step-time models, only ready ones."""
        may_wait = self._in_seconds(sequence, worker) and sequence.started_at is None
        return [other for other in self._candidates(sequence, worker) if may_wait or not other.is_full]

    def _cost(self, worker: ModelWorker, tokens: int, in_seconds: bool) -> float:
        base, per_token, _ = self._snapshots[worker.epoch].step_time
        return base + per_token * tokens if in_seconds else tokens
