"""The figures of GetStats in the form that Prometheus reads: which they are and what they are called.

A counter or gauge that joins GetStats is here with it. Nothing about requests, callers or content: no label has a value
from outside; those of `outcome` are words of ours, finish reasons and reasons of errors. How they are fetched is in
`scrapes`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from google.protobuf.message import Message
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from lineclear.scheduler.requests.request_stats import BOUNDS_SECONDS, Histogram, ServerStats
from lineclear.v1 import inference_pb2 as pb


def families(
    stats: pb.GetStatsResponse, figures: ServerStats, *, certificate_expires_at: float | None = None
) -> Iterator[Metric]:
    """All there is. Of `figures` what is counted since the start. The time is in seconds of the Unix epoch."""
    if certificate_expires_at is not None:
        text = "When the certificate of the listeners expires, as a Unix timestamp."
        yield GaugeMetricFamily("lineclear_certificate_expiry_timestamp_seconds", text, certificate_expires_at)
    for name, value in _numbers(stats.totals):
        # A share can be had from the counters, over any time; rejected requests are counted by reason below.
        if isinstance(value, int) and name != "requests_rejected":
            yield CounterMetricFamily(f"lineclear_{name}", f"Totals.{name} of GetStats.", value=value)
    for name, value in _numbers(stats.gauges):
        yield GaugeMetricFamily(f"lineclear_{name}", f"Gauges.{name} of GetStats.", value=value)
    ended = CounterMetricFamily("lineclear_requests_ended", "Of those that were let in, by how.", labels=["outcome"])
    for outcome, count in figures.ended.items():
        ended.add_metric([outcome], count)
    yield ended
    text = "Calls of any method, and orders of Sessions, answered with an error before a request was let in; by reason."
    rejected = CounterMetricFamily("lineclear_requests_rejected", text, labels=["reason"])
    for reason, count in figures.rejected.items():
        rejected.add_metric([reason], count)
    yield rejected
    for name, spread in figures.histograms.items():
        yield _histogram(name, spread)
    yield GaugeMetricFamily("lineclear_step_seconds_p99", "Quantiles.p99 of step_seconds.", stats.step_seconds.p99)
    uptime_seconds = stats.uptime.ToTimedelta().total_seconds()
    yield GaugeMetricFamily("lineclear_uptime_seconds", "Since the scheduler started.", uptime_seconds)
    yield GaugeMetricFamily("lineclear_worker_joined", "Whether a worker is there.", int(stats.worker.joined))
    yield CounterMetricFamily("lineclear_workers_joined", "Since the scheduler started.", stats.worker.incarnation)
    what = {"version": stats.server_version, "device": stats.worker.device, "dtype": stats.worker.dtype}
    yield InfoMetricFamily("lineclear", "What is running.", what)
    yield from _names_elsewhere(stats.gauges)


def _names_elsewhere(gauges: pb.Gauges) -> Iterator[Metric]:
    """What autoscalers and the endpoint pickers of the Gateway API look for, whoever the server is."""
    usage = gauges.blocks_used / max(1, gauges.blocks_total)
    yield GaugeMetricFamily("vllm:num_requests_running", "As lineclear_requests_running.", gauges.requests_running)
    yield GaugeMetricFamily("vllm:num_requests_waiting", "As lineclear_requests_waiting.", gauges.requests_waiting)
    yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Blocks used, as a share of all.", usage)


def _numbers(message: Message) -> Iterator[tuple[str, float]]:
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        yield field.name, int(value) if isinstance(value, bool) else value


def _histogram(name: str, spread: Histogram) -> Metric:
    bounds = [*map(str, BOUNDS_SECONDS), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(spread.counts), strict=True))
    text = f"Seconds, of requests that finished; {name}_seconds of GetStats."
    return HistogramMetricFamily(f"lineclear_{name}_seconds", text, buckets=buckets, sum_value=spread.sum_seconds)
