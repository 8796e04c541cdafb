"""The core's counters and gauges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


def _total(gauge: str) -> Any:
    """Return the property of a CoreSnapshot that is the total of a gauge of its workers."""
    return property(lambda snapshot: sum(getattr(worker, gauge) for worker in snapshot.workers))


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

    num_slots = _total("num_slots")
    num_requests_running = _total("num_requests_running")
    steps_in_flight = _total("steps_in_flight")
    num_blocks = _total("num_blocks")
    blocks_used = _total("blocks_used")
    blocks_cached = _total("blocks_cached")
    last_step_tokens = _total("last_step_tokens")
    last_step_positions = _total("last_step_positions")

    @property
    def step_time(self) -> tuple[float, float, float]:
        """Step-time model of the oldest joined worker."""
        return self.workers[0].step_time if self.workers else (0.0, 0.0, 0.0)
