"""Statistics of ended requests: counters, quantiles over the last ones, histograms, tokens per second.

Counted on the event loop, from one EndedRequest for each request. Queue, tokens and blocks come from the core's
snapshot.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lineclear.scheduler.core.events import FinishReason, RequestStats
from lineclear.scheduler.engine.engine_stats import TokenRate
from lineclear.v1 import inference_pb2 as pb

BOUNDS_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
)
WINDOW_REQUESTS = 1024


def quantiles(values: Iterable[float]) -> pb.Quantiles:
    """Return the quantiles, all zero without values.

    The p-quantile is the smallest value that a share p of the values does not exceed.
    """
    return _of_sorted(sorted(values))


def _of_sorted(ordered: Sequence[float]) -> pb.Quantiles:
    if not ordered:
        return pb.Quantiles()
    p50, p90, p99 = (ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 90, 99))
    mean = sum(ordered) / len(ordered)
    return pb.Quantiles(mean=mean, p50=p50, p90=p90, p99=p99, max=ordered[-1], count=len(ordered))


class RequestTimings(NamedTuple):
    """Timings of one request in seconds; None for phases that it did not reach."""

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
    """Compute the timings. `arrival` is the time of the call, before tokenization."""
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


class EndedRequest(NamedTuple):
    """How a request ended. Made once; counters, histograms, the log line and the span are made from it."""

    request_id: str
    outcome: str
    """Finish reason, or reason of the error, in lower case."""
    was_admitted: bool
    """The engine has had it in its queue. If not, the request counts as rejected."""
    tenant: str
    """As in the log: empty without a tenant."""
    trace_id: str
    num_outputs: int
    num_tokens: int
    """Output tokens of all outputs, those of other servers included."""
    timings: RequestTimings
    stats: RequestStats | None
    """Of the first output that has started; None if the engine has not ended it."""
    code: str = "OK"
    """The gRPC code that its call ended with."""

    def log_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"request_id": self.request_id, "outcome": self.outcome, "tokens": self.num_tokens}
        if self.tenant:
            fields["tenant"] = self.tenant
        if self.trace_id:
            fields["trace_id"] = self.trace_id
        if self.num_outputs > 1:
            fields["outputs"] = self.num_outputs
        for name, seconds in zip(_TIMING_FIELDS, self.timings, strict=True):
            if seconds is not None:
                fields[name] = round(seconds, 6)
        if (stats := self.stats) is not None:
            fields["prompt_tokens"] = stats.prompt_tokens
            fields["cached_tokens"] = stats.cached_tokens
            fields["recomputed_tokens"] = stats.recomputed_tokens
            fields["preemptions"] = stats.preemptions
            fields["recoveries"] = stats.recoveries
        return fields


_TIMING_FIELDS = tuple(f"{name}_seconds" for name in RequestTimings._fields)
_FINISHED = frozenset(reason.name.lower() for reason in FinishReason if reason is not FinishReason.CANCELLED)


class Histogram:
    """Counts of durations by the buckets of BOUNDS_SECONDS, and above the last."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds


class ServerStats:
    """Timings of the last requests, histograms of all, and the output rate of the last seconds."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.histograms = {name: Histogram() for name in HISTOGRAMS}
        self.ended: Counter[str] = Counter()
        """Admitted requests that ended, by outcome: finish reason or error reason."""
        self.search_tokens = 0
        """Tokens of the outputs of beam searches: the core samples none of them."""
        self.rejected: Counter[str] = Counter()
        """Requests that ended before the engine admitted them, and other calls that failed, by reason."""
        self._window: deque[RequestTimings] = deque()
        # Sorted values of the window, by field, because GetStats is called more often than requests finish.
        self._ordered: dict[str, list[float]] = {name: [] for name in RequestTimings._fields}
        self.output = TokenRate(now)
        """Output tokens of the workers in the last ten seconds."""

    def add_finished(self, timings: RequestTimings) -> None:
        """Count a complete answer."""
        self._window.append(timings)
        for name, seconds in timings._asdict().items():
            if seconds is not None:
                bisect.insort(self._ordered[name], seconds)
        if len(self._window) > WINDOW_REQUESTS:
            for name, seconds in self._window.popleft()._asdict().items():
                if seconds is not None:
                    del self._ordered[name][bisect.bisect_left(self._ordered[name], seconds)]
        for name, histogram in self.histograms.items():
            if (seconds := getattr(timings, HISTOGRAMS[name])) is not None:
                histogram.add(seconds)

    def add_ended(self, ended: EndedRequest) -> None:
        """Count the end of a request, in exactly one figure."""
        if not ended.was_admitted:
            self.rejected[ended.outcome] += 1
            return
        self.ended[ended.outcome] += 1
        if ended.outcome in _FINISHED:
            self.add_finished(ended.timings)

    def add_rejected(self, reason: str) -> None:
        """Count a call or command that failed before it had a request."""
        self.rejected[reason.lower()] += 1

    def request_counters(self) -> dict[str, int]:
        """Return the counters of ended requests, by their names in `Counters`."""
        finished = sum(count for outcome, count in self.ended.items() if outcome in _FINISHED)
        cancelled, expired = self.ended["cancelled"], self.ended["deadline_exceeded"]
        return {
            "requests_rejected": self.rejected.total(),
            "requests_finished": finished,
            "requests_cancelled": cancelled,
            "requests_expired": expired,
            "requests_failed": self.ended.total() - finished - cancelled - expired,
        }

    def window(self, name: str) -> pb.Quantiles:
        """Return quantiles of one field of RequestTimings over the last requests that finished."""
        return _of_sorted(self._ordered[name])
