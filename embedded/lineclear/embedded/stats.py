"""Statistics of a batcher."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Figures of one executed step."""

    step: int
    """Number of the step, from 1 at the start and after each failed step."""
    num_rows: int
    """Slots with a row in the step."""
    num_tokens: int
    """Positions computed; of an ItemBatcher: the cost of the items."""
    total_tokens: int
    """Positions held: prompt and output of all slots of the step."""
    seconds: float
    """Time in the step function."""


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """Totals since the batcher was made, and gauges of this moment."""

    requests_submitted: int
    requests_finished: int
    requests_failed: int
    """Failed, expired and cancelled ones."""
    requests_rejected: int
    """QueueFull, a request that can never fit, or a stopped batcher."""
    requests_waiting: int
    requests_running: int
    steps: int
    rows: int
    """Rows of all steps: `rows / steps` is the mean batch size."""
    failed_steps: int
    """Steps whose step function raised an exception."""
    step_seconds: float
    """Time in the step function."""
    queue_seconds: float
    """Sum of the times between arrival and first step, of requests that ended."""
    preemptions: int
    blocks_used: int
    num_blocks: int
    last_step: StepTotals | None

    @property
    def mean_batch_size(self) -> float:
        """Return the mean number of rows of a step."""
        return self.rows / self.steps if self.steps else 0.0
