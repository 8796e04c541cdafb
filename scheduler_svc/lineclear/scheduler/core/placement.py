"""Chooses workers: which takes a waiting request while one of them plans, and which runs a suspect of a crash alone.

A request goes to the worker that will have computed its prompt first: the work queued on a worker and the prompt's
tokens that its prefix cache and host blocks lack, in seconds by the step-time models, or in tokens until all of them
are fitted. So a request follows its cached prefix unless the queue of work there is longer by more than the hit saves
(as the cache-aware routers of SGLang and Preble do).

The worker that plans leaves a request to a better one, at most for the seconds that this saves. Then, and after
`max_queue_overtakes` later requests went first, the next worker with a free slot and blocks takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lineclear.scheduler.core.core_state import SharedState, WorkerState
from lineclear.scheduler.core.sequence import Sequence, State

_MIN_WAIT_SECONDS = 0.001
"""A request is left to another worker for at least this long, so that the worker can plan in the meantime."""


@dataclass(slots=True)
class _Other:
    """Another worker, with the requests that were left to it during this plan."""

    worker: WorkerState
    queued_tokens: int
    num_slots: int
    """Free slots."""
    joins_left: int
    """Requests that have not started that its batching strategy lets join."""
    blocks_left: int = 0
    """Blocks that the requests left to it need."""


class Placement:
    """The choices during one plan of `worker`."""

    def __init__(self, state: SharedState, worker: WorkerState, now: float) -> None:
        self._state, self._worker, self._now = state, worker, now
        self._others: list[_Other] | None = None  # made when first needed
        self._may_leave = len(state.workers) > 1 and not worker.strategy.fills_batches
        worker.left.clear()

    def leaves(self, sequence: Sequence, shared: list[int], planned_tokens: int) -> bool:
        """Return whether another worker should take a sequence for which this one has a slot and blocks.

        `shared` are the blocks of its cached prefix here, `planned_tokens` the tokens of the plan so far.
        """
        if not self._may_leave or sequence.overtaken_count >= self._state.limits.max_queue_overtakes:
            return False
        if sequence.wait_until is not None and self._now >= sequence.wait_until:
            return False
        choices = self._choices(sequence)
        in_seconds = all(other.worker.step_time.is_fitted for other, _ in choices) and self._worker.step_time.is_fitted
        if not in_seconds or sequence.started_at is not None:
            # A started request pauses no longer than until the next plan of a worker that is ready.
            choices = [(other, uncached) for other, uncached in choices if not other.worker.is_full]
        own = self._worker.queued_tokens() + planned_tokens + _uncached(self._worker, sequence, shared)
        own_cost = _cost(self._worker, own, in_seconds=in_seconds)
        best, cost = None, own_cost
        for other, uncached in choices:
            other_cost = _cost(other.worker, other.queued_tokens + uncached, in_seconds=in_seconds)
            if other_cost < cost:
                best, best_uncached, cost = other, uncached, other_cost
        if best is None:
            return False
        best.queued_tokens += best_uncached
        best.num_slots -= 1
        best.joins_left -= sequence.started_at is None
        best.blocks_left += -(-best_uncached // best.worker.batch.pool.block_size)
        if sequence.wait_until is None:
            saved_seconds = own_cost - cost if in_seconds and sequence.started_at is None else 0.0
            sequence.wait_until = self._now + max(_MIN_WAIT_SECONDS, saved_seconds)
        self._worker.left.append(sequence)
        return True

    def _choices(self, sequence: Sequence) -> list[tuple[_Other, int]]:
        """Return the other workers with a slot and blocks for `sequence`, and how many of its tokens each computes."""
        if self._others is None:
            self._others = self._find_others()
        found = []
        for other in self._others:
            has_place = other.num_slots > 0 and (sequence.started_at is not None or other.joins_left > 0)
            if has_place and sequence.max_len <= other.worker.max_len:
                batch = other.worker.batch
                shared = batch.cached_prefix(sequence)
                if batch.has_room(sequence, shared, headroom=batch.headroom + other.blocks_left):
                    found.append((other, _uncached(other.worker, sequence, shared)))
        return found

    def _find_others(self) -> list[_Other]:
        others = []
        for worker in self._state.workers.values():
            if worker is not self._worker and self._state.takes_requests(worker):
                joins_left = worker.strategy.max_joins(self._state.batching_state(worker, self._now))
                free_slots = worker.batch.num_free_slots
                others.append(_Other(worker, worker.queued_tokens(), free_slots, joins_left))
        return others


def _uncached(worker: WorkerState, sequence: Sequence, shared: list[int]) -> int:
    swap = worker.batch.swap
    num_kept = len(shared) + (0 if swap is None else len(swap.find(sequence, len(shared))))
    return len(sequence.tokens) - num_kept * worker.batch.pool.block_size


def _cost(worker: WorkerState, tokens: int, *, in_seconds: bool) -> float:
    return worker.step_time.predict(tokens, 0) if in_seconds else tokens


class Isolation:
    """Chooses a suspect and the worker that it runs on alone, while the other workers go on.

    That is the worker with the fewest running requests. It takes no further requests, and a suspect runs when the last
    of its own has ended; a worker that just joined is free at once. It stays the one for the next suspects, so a
    suspect that is cleared pauses until the others are. If only one worker is joined, its requests pause instead.
    """

    def __init__(self, state: SharedState) -> None:
        self._state = state

    def choose(self) -> Sequence | None:
        """Return the oldest suspect that a joined worker can run alone, and reserve the worker for it.

        None ends the reservation.
        """
        state = self._state
        for suspect in state.poison.isolated_by_age():
            if (worker := self._worker_for(suspect)) is not None:
                state.is_isolating = state.is_isolating and worker.epoch == state.isolation_epoch
                state.isolation_epoch = worker.epoch
                return suspect
        state.isolation_epoch, state.is_isolating = None, False
        return None

    def _worker_for(self, suspect: Sequence) -> WorkerState | None:
        state = self._state
        if suspect.state is State.RUNNING:
            return state.workers[suspect.epoch]
        able = [worker for worker in state.workers.values() if suspect.max_len <= worker.max_len]
        reserved = [w for w in able if w.epoch == state.isolation_epoch and state.is_isolating]
        return min(reserved or able, key=lambda w: len(w.batch.running), default=None)

    def is_due(self, worker: WorkerState) -> bool:
        """Return whether the reserved worker runs the suspect now: it has no other requests, or is the only one."""
        state = self._state
        if not state.is_isolating:
            state.is_isolating = len(state.workers) == 1 or not worker.batch.running
        return state.is_isolating
