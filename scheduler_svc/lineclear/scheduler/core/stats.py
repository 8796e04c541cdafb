"""The core's limits and its books: what it may do, what it has done, how it stands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lineclear.scheduler.core.policies import PolicySettings


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """The bounds the core holds, and the policies it follows. Names and meaning: docs/configuration.md."""

    max_batch_size: int = 64
    target_batch_tokens: int = 0  # as many as the worker takes
    pipeline_depth: int = 2
    max_queue_size: int = 1024
    max_queue_tokens: int = 1_000_000
    max_preemptions: int = 4
    max_bypasses: int = 16
    max_lone_crashes: int = 1
    max_lone_kills: int = 3
    prefix_cache: bool = True
    cache_secret: bytes = b""
    strategy: str = "continuous"
    order: str = "fifo"
    victim: str = "cheapest"
    policy: PolicySettings = field(default_factory=PolicySettings)


@dataclass(slots=True)
class Counters:
    """What was done since the core was made. `looked_up_tokens` is what `cached_tokens` is a share of."""

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
        """The figures of now."""
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
