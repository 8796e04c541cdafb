"""How the server has been doing: quantiles over the last requests, tokens per second.

Counts on the event loop, from the accounts of requests that ended. What the core counts itself (totals, queue, blocks)
comes from its snapshot and is not kept here.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lineclear.scheduler.core.events import RequestStats

BOUNDS_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
)
WINDOW_REQUESTS = 1024
RATE_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of a window of numbers; all zero when it is empty."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    count: int = 0


def quantiles(values: Iterable[float]) -> Quantiles:
    """The p-quantile is the smallest value that at least that share of the values does not exceed."""
    return _of_ordered(sorted(values))


def _of_ordered(ordered: Sequence[float]) -> Quantiles:
    if not ordered:
        return Quantiles()
    return Quantiles(
        sum(ordered) / len(ordered),
        _percentile(ordered, 50),
        _percentile(ordered, 90),
        _percentile(ordered, 99),
        ordered[-1],
        len(ordered),
    )


def _percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[-(-len(ordered) * percent // 100) - 1]


class RequestTimings(NamedTuple):
    """Where the time of one request went, in seconds from its arrival; None where it never came to that."""

    queue_time: float | None
    time_to_first_token: float | None
    decode_time: float | None
    e2e_latency: float
    mean_inter_token_latency: float | None


HISTOGRAMS = {
    "request_queue_time": "queue_time",
    "time_to_first_token": "time_to_first_token",
    "request_mean_inter_token_latency": "mean_inter_token_latency",
    "e2e_request_latency": "e2e_latency",
}
"""Fields of GetStatsResponse and metrics, without `_seconds`: the field of RequestTimings that each has."""


def request_timings(record: RequestStats, arrival: float, completion_tokens: int, now: float) -> RequestTimings:
    """From a request's account. `arrival` is the call's own, before tokenizing."""
    first, last, started = record.first_token_at, record.last_token_at, record.started_at
    decode = None if first is None or last is None else last - first
    return RequestTimings(
        queue_time=None if started is None else started - arrival,
        time_to_first_token=None if first is None else first - arrival,
        decode_time=decode,
        e2e_latency=now - arrival,
        mean_inter_token_latency=decode / (completion_tokens - 1)
        if decode is not None and completion_tokens > 1
        else None,
    )


class Histogram:
    """How often a duration was at most each of BOUNDS_SECONDS (and more than the one before), or more than all."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect.bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds


class ServerStats:
    """The last requests that finished, all of them by how long they took, and the last seconds of output."""

    def __init__(self, now: float) -> None:
        self._since = now
        self.histograms = {name: Histogram() for name in HISTOGRAMS}
        self.ended: Counter[str] = Counter()
        """How many of those that were let in ended how: by finish reason, or by the reason of their error."""
        self.rejected: Counter[str] = Counter()
        """How many calls and orders of a Session were answered with an error instead of being let in, by reason."""
        self._window: deque[RequestTimings] = deque()
        # The window's values in order, by field: GetStats asks more often than requests finish, and sorts nothing.
        self._ordered: dict[str, list[float]] = {name: [] for name in RequestTimings._fields}
        self._output: deque[tuple[int, int]] = deque()  # (second, tokens), at most RATE_SECONDS + 1 of them

    def add_finished(self, spent: RequestTimings) -> None:
        """A request finished."""
        self._window.append(spent)
        for name, seconds in spent._asdict().items():
            if seconds is not None:
                bisect.insort(self._ordered[name], seconds)
        if len(self._window) > WINDOW_REQUESTS:
            for name, seconds in self._window.popleft()._asdict().items():
                if seconds is not None:
                    del self._ordered[name][bisect.bisect_left(self._ordered[name], seconds)]
        for name, histogram in self.histograms.items():
            if (seconds := getattr(spent, HISTOGRAMS[name])) is not None:
                histogram.add(seconds)

    def add_ended(self, outcome: str) -> None:
        """A request that was let in is over, one way or another."""
        self.ended[outcome] += 1

    def add_rejected(self, reason: str) -> None:
        """A call or an order was answered with an error, and no request of it was let in."""
        self.rejected[reason] += 1

    def add_tokens(self, count: int, now: float) -> None:
        """So many output tokens came from the worker."""
        second = int(now)
        if self._output and self._output[-1][0] == second:
            self._output[-1] = (second, self._output[-1][1] + count)
        else:
            self._output.append((second, count))
        self._expire_window(now)

    def tokens_per_second(self, now: float) -> float:
        """Over the last ten seconds, or since the start where that is shorter (but at least one second)."""
        self._expire_window(now)
        covered = min(max(now - self._since, 1.0), float(RATE_SECONDS))
        return sum(count for _, count in self._output) / covered

    def uptime_seconds(self, now: float) -> float:
        """Since the start."""
        return now - self._since

    def window(self, name: str) -> Quantiles:
        """Return quantiles of one field of RequestTimings over the last requests that finished."""
        return _of_ordered(self._ordered[name])

    def _expire_window(self, now: float) -> None:
        while self._output and self._output[0][0] <= now - RATE_SECONDS - 1:
            self._output.popleft()
