"""The core's counters and gauges."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class Counters:
    """Totals since the core was created. `cached_tokens` of `looked_up_tokens` were prefix-cache hits."""

    requests_admitted: int = 0
    requests_rejected: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_expired: int = 0
    requests_failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    looked_up_tokens: int = 0
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
    requests_waiting: int
    tokens_waiting: int
    requests_running: int
    steps_in_flight: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    draining: bool
    step_time: tuple[float, float, float]
