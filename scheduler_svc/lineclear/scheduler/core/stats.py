"""The core's counters and gauges."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counters since the core was created; `Counters` in inference.proto says what each counts."""

    requests_admitted: int = 0
    requests_rejected: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_expired: int = 0
    requests_failed: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_queries: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    swapped_out_tokens: int = 0
    swapped_in_tokens: int = 0
    prefix_cache_stateless_tokens: int = 0
    steps: int = 0
    rows: int = 0
    wasted_samples: int = 0
    step_tokens: int = 0
    step_positions: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """Gauges of a joined worker at one moment."""

    epoch: int
    num_slots: int
    num_requests_running: int
    steps: int
    """Steps planned in this epoch."""
    steps_in_flight: int
    num_blocks: int
    blocks_used: int
    blocks_cached: int
    step_time: tuple[float, float, float]
    last_step_tokens: int
    """Positions that the last planned step computes."""
    last_step_positions: int
    """Positions that requests hold after it."""
    is_fitted: bool
    """Whether `step_time` follows from enough steps to predict others."""
    state_snapshots_used: int
    state_snapshot_hits: int


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """Counters and gauges at one moment. The gauges without `workers` are totals of all joined workers."""

    counters: Counters
    num_requests_waiting: int
    num_tokens_waiting: int
    draining: bool
    workers: tuple[WorkerSnapshot, ...] = ()
    """The joined workers, oldest first."""
    num_search_steps_waiting: int = 0
    """Requests in the queue that are steps of beam searches which have started."""
    num_search_steps_running: int = 0
    """Requests with a slot that are steps of beam searches."""
    predicted_wait_seconds: float | None = None
    """Of a request at the end of the queue; None if unknown."""

    @property
    def num_slots(self) -> int:
        """Slots."""
        return sum(worker.num_slots for worker in self.workers)

    @property
    def num_requests_running(self) -> int:
        """Requests with a slot."""
        return sum(worker.num_requests_running for worker in self.workers)

    @property
    def steps_in_flight(self) -> int:
        """Plans without result."""
        return sum(worker.steps_in_flight for worker in self.workers)

    @property
    def num_blocks(self) -> int:
        """KV blocks."""
        return sum(worker.num_blocks for worker in self.workers)

    @property
    def blocks_used(self) -> int:
        """KV blocks of running requests."""
        return sum(worker.blocks_used for worker in self.workers)

    @property
    def blocks_cached(self) -> int:
        """Free KV blocks that keep a prefix."""
        return sum(worker.blocks_cached for worker in self.workers)

    @property
    def last_step_tokens(self) -> int:
        """Positions computed by the last step of each worker."""
        return sum(worker.last_step_tokens for worker in self.workers)

    @property
    def last_step_positions(self) -> int:
        """Positions held after the last step of each worker."""
        return sum(worker.last_step_positions for worker in self.workers)

    @property
    def step_time(self) -> tuple[float, float, float]:
        """Step-time model of the oldest joined worker."""
        return self.workers[0].step_time if self.workers else (0.0, 0.0, 0.0)
