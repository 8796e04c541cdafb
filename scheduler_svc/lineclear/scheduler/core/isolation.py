"""Runs suspects alone on one worker, while the others go on.

The worker for it is the one with the fewest running requests. It takes no further requests, and a suspect runs when
the last of its own has ended; a worker that just joined is free at once. It stays the one for the next suspects, so a
suspect that is cleared pauses until the others are. If only one worker is joined, its requests pause instead.
"""

from __future__ import annotations

from lineclear.scheduler.core.sequence import Sequence, State
from lineclear.scheduler.core.shared_state import SharedState
from lineclear.scheduler.core.worker_state import WorkerState


class Isolation:
    """Chooses suspect and worker."""

    def __init__(self, state: SharedState) -> None:
        self._state = state

    def choose(self) -> Sequence | None:
        """Return the oldest suspect that a joined worker can run alone, and reserve the worker for it.

        None ends the reservation.
        """
        state = self._state
        if not state.poison and state.isolation_epoch is None:
            return None  # in nearly every step
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
        able = [w for w in state.workers.values() if suspect.max_len <= w.max_len and not state.is_leaving(w)]
        reserved = [w for w in able if w.epoch == state.isolation_epoch and state.is_isolating]
        return min(reserved or able, key=lambda w: len(w.batch.running), default=None)

    def is_due(self, worker: WorkerState) -> bool:
        """Return whether the reserved worker runs the suspect now: it has no other requests, or is the only one."""
        state = self._state
        if not state.is_isolating:
            state.is_isolating = len(state.workers) == 1 or not worker.batch.running
        return state.is_isolating
