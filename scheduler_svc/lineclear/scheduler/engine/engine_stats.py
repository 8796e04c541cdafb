"""What the engine tells of itself: the core, the worker, the link and the last steps at one moment.

Figures alone, made by the engine and read by any thread. What they are called on the wire is rpc/overview.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lineclear.scheduler.core.stats import CoreSnapshot
from lineclear.scheduler.engine.worker_link import LinkCounters
from lineclear.wire.messages import Hello

MAX_STEP_TIMES = 1024


class StepTime(NamedTuple):
    """One step that was done. `step_seconds` is the worker's own figure, `total_seconds` from plan sent to result."""

    epoch: int
    step: int
    num_rows: int
    num_tokens: int
    step_seconds: float
    total_seconds: float


@dataclass(slots=True)
class EngineCounters:
    """Seconds of the engine thread since it started, by what they were spent on."""

    iterations: int = 0
    plan_seconds: float = 0.0
    apply_seconds: float = 0.0
    publish_seconds: float = 0.0
    checks: int = 0
    """How often the core's invariants were checked."""
    check_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State at one moment, at most about half a second old."""

    core: CoreSnapshot
    hello: Hello | None = None
    """Of the joined worker."""
    incarnation: int = 0
    """How many workers have joined so far."""
    step_times: tuple[StepTime, ...] = ()
    """The last MAX_STEP_TIMES, oldest first."""
    counters: EngineCounters = field(default_factory=EngineCounters)
    link: LinkCounters = field(default_factory=LinkCounters)
