"""Model of the batching strategies: when requests that have not started may join."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.invariant_error import require

if TYPE_CHECKING:
    from simulation.model_state import ModelState
    from simulation.model_workers import ModelWorker


class ModelBatching:
    """Tracks the batch that a strategy is filling on a worker."""

    def __init__(self, state: ModelState, worker: ModelWorker) -> None:
        self.state = state
        self.worker = worker
        self.joins_left, self.batch_started_at = 0, float("-inf")

    def is_open(self, now: float) -> bool:
        """Return whether requests may join the step that is planned now."""
        fitting = [s for s in self.state.fresh if self.state.is_possible(s, self.worker)]
        if not fitting:
            return False
        policy, waiting = self.state.limits.policy, len(fitting)
        # Those with rows in later steps.
        resuming = sum(self.state.is_possible(s, self.worker) for s in self.state.resuming)
        with_rows = len(self.worker.running) + resuming
        active = with_rows + len(self.worker.finishing)
        oldest = min(s.arrival for s in fitting)
        late = self.state.draining or now >= oldest + policy.batch_timeout_seconds
        if self.state.limits.batching_strategy == "fixed_size":
            if self.joins_left and oldest <= self.batch_started_at:
                return True  # the batch is still being admitted
            full = waiting >= self.worker.num_slots or self.state.draining or self.state.refusing
            self.joins_left, self.batch_started_at = self.worker.num_slots if full and active == 0 else 0, now
            return self.joins_left > 0
        if self.state.limits.batching_strategy == "dynamic_timeout":
            full = waiting >= max(1, self.worker.num_slots - with_rows) or waiting >= policy.min_batch_size > 1
            return late or full
        return late or active > 0 or waiting >= min(policy.min_batch_size, self.worker.num_slots)

    def on_join(self) -> None:
        self.joins_left -= 1
        fixed = self.state.limits.batching_strategy == "fixed_size"
        require(not fixed or self.joins_left >= 0, "strategy", "a fixed batch has at most as many requests as slots")
        self.state.refusing = False
