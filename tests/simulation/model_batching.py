"""When requests that never ran may join, as the oracle sees it: what each strategy promises.

Who of them is next, is for `turns`.
"""

from __future__ import annotations

from simulation.invariant_error import hold
from simulation.model_state import Crowd


class Joining:
    """Follows who waits, and the batch that a strategy is filling."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.turned_away = False  # somebody, since one joined last
        self.batch_places, self.batch_begun_at = 0, float("-inf")

    def is_open(self, now: float) -> bool:
        """Whether they may join the step that begins now."""
        if not self.crowd.fresh:
            return False
        policy, waiting = self.crowd.limits.policy, len(self.crowd.fresh)
        active = len(self.crowd.running) + len(self.crowd.resuming)
        oldest = min(t.arrival for t in self.crowd.fresh)
        late = self.crowd.draining or now >= oldest + policy.batch_timeout_seconds
        if self.crowd.limits.batching_strategy == "fixed_size":
            if self.batch_places and oldest <= self.batch_begun_at:
                return True  # the batch is still being admitted
            full = waiting >= self.crowd.num_slots or self.crowd.draining or self.turned_away
            self.batch_places, self.batch_begun_at = self.crowd.num_slots if full and active == 0 else 0, now
            return self.batch_places > 0
        if self.crowd.limits.batching_strategy == "dynamic_timeout":
            full = waiting >= max(1, self.crowd.num_slots - active) or waiting >= policy.min_batch_size > 1
            return late or full
        return late or active > 0 or waiting >= min(policy.min_batch_size, self.crowd.num_slots)

    def joined(self) -> None:
        """One of them did."""
        self.batch_places -= 1
        fixed = self.crowd.limits.batching_strategy == "fixed_size"
        hold(not fixed or self.batch_places >= 0, "strategy", "a fixed batch has as many places as slots")
        self.turned_away = False
