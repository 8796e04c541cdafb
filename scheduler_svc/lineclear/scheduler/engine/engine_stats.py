"""Figures of the engine that other threads read: the core, the worker, the link and the last steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from lineclear.scheduler.core.stats import CoreSnapshot
from lineclear.wire.messages import Hello

MAX_STEP_TIMES = 1024
RATE_SECONDS = 10


class TokenRate:
    """Counts tokens by second for `RATE_SECONDS`."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._counts: deque[tuple[int, int]] = deque()  # (second, tokens), at most RATE_SECONDS + 1 of them

    def __len__(self) -> int:
        """Return the seconds with tokens that are kept."""
        return len(self._counts)

    def add(self, count: int, now: float) -> None:
        second = int(now)
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1] = (second, self._counts[-1][1] + count)
        else:
            self._counts.append((second, count))
            self._expire(now)

    def per_second(self, now: float) -> float:
        """Return the rate over the last ten seconds, or since the start (at least one second)."""
        self._expire(now)
        window_seconds = min(max(now - self._since, 1.0), float(RATE_SECONDS))
        return sum(count for _, count in self._counts) / window_seconds

    def _expire(self, now: float) -> None:
        while self._counts and self._counts[0][0] <= now - RATE_SECONDS - 1:
            self._counts.popleft()


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
    """Which workers are joined. The service, health and statistics all read this value."""

    hello: Hello | None = None
    """Of the joined worker with the longest context, the oldest of several."""
    last_hello: Hello | None = None
    """The same, or the last one before all workers were lost."""
    num_joins: int = 0
    """Workers that have joined so far."""
    is_unhealthy: bool = False
    """A worker that has to be killed is still connected, and no worker is joined."""
    is_stopping: bool = False
    """Each joined worker has received SIGTERM: it runs until no request is left or its drain timeout is over."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker that serves, waits or hangs."""

    hello: Hello
    state: str
    """`joined`, `stopping`, `cut_off`, `unhealthy`, `condemned` or `waiting`."""
    index: int | None = None
    """Its number in the log, or if another program starts workers, the smallest that no other serving worker has.

    None before it has joined.
    """
    joins: int = 0
    """Workers that have joined with this index so far, this one included."""
    num_steps: int = 0
    """Steps since it joined."""
    tokens_per_second: float = 0.0
    """Sampled tokens over the last ten seconds."""


class WantedWorker(NamedTuple):
    """A worker that the supervisor keeps running. `pid` is None while its process does not run."""

    number: int
    """As `worker` in the log; the index of its figures once it has joined."""
    pid: int | None
    is_given_up: bool


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State at one moment, at most about half a second old."""

    core: CoreSnapshot
    worker: WorkerStatus = field(default_factory=WorkerStatus)
    workers: tuple[WorkerFigures, ...] = ()
    """Those that have joined first, by index."""
    step_seconds: tuple[tuple[int, float], ...] = ()
    """Epoch and time of the last MAX_STEP_TIMES steps, as the workers measured it; oldest first."""
    counters: EngineCounters = field(default_factory=EngineCounters)
    link: LinkCounters = field(default_factory=LinkCounters)
    membership: MembershipCounters = field(default_factory=MembershipCounters)
