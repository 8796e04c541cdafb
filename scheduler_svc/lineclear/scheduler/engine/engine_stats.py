"""Figures of the engine that other threads read: the core, the worker, the link and the last steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lineclear.scheduler.core.stats import CoreSnapshot
from lineclear.wire.messages import Hello

MAX_STEP_TIMES = 1024


class StepTime(NamedTuple):
    """One finished step: `step_seconds` as the worker measured it, `total_seconds` from plan sent to result."""

    epoch: int
    step: int
    num_rows: int
    num_tokens: int
    step_seconds: float
    total_seconds: float


@dataclass(slots=True)
class EngineCounters:
    """Seconds of the engine thread since it started, by activity."""

    iterations: int = 0
    plan_seconds: float = 0.0
    apply_seconds: float = 0.0
    publish_seconds: float = 0.0
    checks: int = 0
    """Checks of the core's invariants."""
    check_seconds: float = 0.0


@dataclass(slots=True)
class LinkCounters:
    """Totals since the link was opened. Written by the thread that owns the link."""

    plans: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    messages: int = 0
    bad_frames: int = 0


@dataclass(slots=True)
class MembershipCounters:
    """Totals since the engine started."""

    stale_messages: int = 0
    """Messages of epochs that are over or unknown."""
    refused_joins: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Which worker is joined. The service, health and statistics all read this value."""

    hello: Hello | None = None
    """Of the joined worker."""
    last_hello: Hello | None = None
    """Of the joined worker, or of the one before."""
    num_joins: int = 0
    """Workers that have joined so far."""
    is_unhealthy: bool = False
    """A worker that has to be killed is still connected."""
    is_stopping: bool = False
    """The joined worker has received SIGTERM: it runs until no request is left or its drain timeout is over."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State at one moment, at most about half a second old."""

    core: CoreSnapshot
    worker: WorkerStatus = field(default_factory=WorkerStatus)
    step_times: tuple[StepTime, ...] = ()
    """The last MAX_STEP_TIMES, oldest first."""
    counters: EngineCounters = field(default_factory=EngineCounters)
    link: LinkCounters = field(default_factory=LinkCounters)
    membership: MembershipCounters = field(default_factory=MembershipCounters)
