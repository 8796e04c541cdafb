"""The core's counters and gauges."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    steps: int = 0
    rows: int = 0
    wasted_samples: int = 0

    def copy(self) -> Counters:
        """Return a copy."""
        return replace(self)


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """Counters and gauges at one moment."""

    counters: Counters
    num_requests_waiting: int
    num_tokens_waiting: int
    num_requests_running: int
    steps_in_flight: int
    num_blocks: int
    blocks_used: int
    blocks_cached: int
    draining: bool
    step_time: tuple[float, float, float]
