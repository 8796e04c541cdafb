"""Prometheus metrics, made from the fields of GetStatsResponse, and the HTTP server that offers them.

A field of Counters or Gauges is a metric of the same name; its comment in inference.proto is the help text. A metric
that vLLM has with the same meaning also appears under vLLM's name, for dashboards, autoscalers and the endpoint pickers
of the Kubernetes Gateway API. Labels are finish reasons, reasons of errors, and names that operators gave to adapters.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from google.protobuf.message import Message
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from lineclear.scheduler.http_listener import HttpListener
from lineclear.scheduler.requests.adapters import AdapterUse
from lineclear.scheduler.requests.request_manager import RequestManager
from lineclear.scheduler.requests.request_metrics import BOUNDS_SECONDS, ServerStats
from lineclear.scheduler.requests.status_messages import SERVING, WORKER_MEMORY
from lineclear.scheduler.security.tls import ServerCertificates
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1.stats_help import HELP

MAX_CONNECTIONS = 16
VLLM_NAMES = {
    "lineclear_num_requests_running": "vllm:num_requests_running",
    "lineclear_num_requests_waiting": "vllm:num_requests_waiting",
    "lineclear_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "lineclear_prompt_tokens": "vllm:prompt_tokens",
    "lineclear_generation_tokens": "vllm:generation_tokens",
    "lineclear_prefix_cache_hits": "vllm:prefix_cache_hits",
    "lineclear_spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "lineclear_spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "lineclear_spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "lineclear_prefix_cache_queries": "vllm:prefix_cache_queries",
    "lineclear_preemptions": "vllm:num_preemptions",
    "lineclear_requests": "vllm:request_success",
    "lineclear_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "lineclear_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "lineclear_request_mean_inter_token_latency_seconds": "vllm:request_time_per_output_token_seconds",
    "lineclear_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "lineclear_lora_requests_info": "vllm:lora_requests_info",
}
"""vLLM's metric with the same meaning. Counters also have the suffix `_total`."""
_VLLM_FINISH_REASONS = {
    "stop_eos": "stop",
    "stop_token": "stop",
    "stop_string": "stop",
    "length": "length",
    "repetition": "repetition",
    "no_output": "stop",
    "cancelled": "abort",
    "deadline_exceeded": "abort",
}


async def current(manager: RequestManager, certificates: ServerCertificates | None) -> list[Metric]:
    """Return the figures of GetStats as metrics. On the event loop."""
    expires_at = certificates.expires_at.timestamp() if certificates is not None else None
    stats, adapters = await manager.status(), manager.requests.adapter_use()
    return list(families(stats, manager.services.stats, certificate_expires_at=expires_at, adapters=adapters))


def families(
    stats: pb.GetStatsResponse,
    server: ServerStats,
    *,
    certificate_expires_at: float | None = None,
    adapters: AdapterUse | None = None,
) -> Iterator[Metric]:
    """Yield every metric. `server` has histograms and counters by label, `certificate_expires_at` is a Unix time."""
    for metric in _families(stats, server, certificate_expires_at, adapters or AdapterUse(0)):
        yield metric
        if metric.name == "lineclear_requests":
            yield _request_success(server.ended)
        elif metric.name in VLLM_NAMES:
            yield _renamed(metric, VLLM_NAMES[metric.name])


def _families(
    stats: pb.GetStatsResponse, server: ServerStats, certificate_expires_at: float | None, adapters: AdapterUse
) -> Iterator[Metric]:
    for name, value in _numbers(stats.counters):
        if name != "requests_rejected":  # counted by reason below
            yield CounterMetricFamily(f"lineclear_{name}", HELP[f"Counters.{name}"], value=value)
    for name, value in _numbers(stats.gauges):
        yield GaugeMetricFamily(f"lineclear_{name}", HELP[f"Gauges.{name}"], value=value)
    text = "Requests in the queue or later that ended, by finish reason or reason of the error."
    yield _labelled("lineclear_requests", text, server.ended)
    text = f"{HELP['Counters.requests_rejected']} By reason of the error."
    yield _labelled("lineclear_requests_rejected", text, server.rejected, label="reason")
    for name, histogram in server.histograms.items():
        buckets = list(zip([*map(str, BOUNDS_SECONDS), "+Inf"], itertools.accumulate(histogram.counts), strict=True))
        text = f"{HELP[f'GetStatsResponse.{name}_seconds']} Requests that finished."
        yield HistogramMetricFamily(f"lineclear_{name}_seconds", text, buckets, histogram.sum_seconds)
    text = f"{HELP['GetStatsResponse.step_seconds']} 99th percentile of the last 1024 steps."
    yield GaugeMetricFamily("lineclear_step_seconds_p99", text, stats.step_seconds.p99)
    uptime_seconds = stats.uptime.ToTimedelta().total_seconds()
    yield GaugeMetricFamily("lineclear_uptime_seconds", HELP["GetStatsResponse.uptime"], uptime_seconds)
    yield GaugeMetricFamily("lineclear_worker_up", HELP["WorkerStatus.up"], int(stats.worker.up))
    yield CounterMetricFamily("lineclear_worker_joins", HELP["WorkerStatus.joins"], stats.worker.joins)
    yield from _worker_families(stats.workers)
    yield _lora_requests_info(adapters)
    names = ("device", "dtype", "forward_pass")
    facts = {"version": stats.server_version, **{name: getattr(stats.worker, name) for name in names}}
    text = "Release of lineclear, device of the worker, data type of the weights, what computes the layers."
    yield InfoMetricFamily("lineclear", text, facts)
    if certificate_expires_at is not None:
        text = "Unix time at which the certificate of the listeners expires."
        yield GaugeMetricFamily("lineclear_certificate_expiry_timestamp_seconds", text, certificate_expires_at)


_WORKER_COUNTERS = ("joins", "steps", "state_snapshot_hits")
_WORKER_GAUGES = (
    *("num_slots", "num_requests_running", "steps_in_flight", "step_seconds", "generation_tokens_per_second"),
    *("num_blocks", "blocks_used", "blocks_cached", "load_seconds", *WORKER_MEMORY),
    *("num_state_snapshots", "state_snapshots_used"),
)


def _worker_families(workers: Iterable[pb.WorkerStats]) -> Iterator[Metric]:
    """Yield the figures of each worker with an index. Indices are small and used again, so labels are few."""
    shown = [worker for worker in workers if worker.HasField("index")]
    up = GaugeMetricFamily("lineclear_worker_joined", "Whether this worker serves.", labels=["worker"])
    for worker in shown:
        up.add_metric([str(worker.index)], int(worker.state in SERVING))
    yield up
    for name in (*_WORKER_COUNTERS, *_WORKER_GAUGES):
        is_counter = name in _WORKER_COUNTERS
        # lineclear_worker_joins without a label counts the joins of all workers.
        full_name = "lineclear_worker_slot_joins" if name == "joins" else f"lineclear_worker_{name}"
        kind = CounterMetricFamily if is_counter else GaugeMetricFamily
        family = kind(full_name, HELP[f"WorkerStats.{name}"], labels=["worker"])
        for worker in shown:
            family.add_metric([str(worker.index)], getattr(worker, name))
        yield family


def _lora_requests_info(use: AdapterUse) -> GaugeMetricFamily:
    """Return the names of adapters in use as labels, as vLLM does: the series with the largest value is the newest."""
    text = "Adapters of running and of waiting requests, and --max-loras. The value is the Unix time of the scrape."
    labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
    metric = GaugeMetricFamily("lineclear_lora_requests_info", text, labels=labels)
    now = datetime.datetime.now(datetime.UTC).timestamp()
    metric.add_metric([str(use.max_loras), ",".join(use.running), ",".join(use.waiting)], now)
    return metric


def _numbers(message: Message) -> Iterator[tuple[str, float]]:
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        yield field.name, int(value) if isinstance(value, bool) else value


def _labelled(name: str, text: str, counts: Counter[str], label: str = "finish_reason") -> CounterMetricFamily:
    metric = CounterMetricFamily(name, text, labels=[label])
    for word, count in counts.items():
        metric.add_metric([word], count)
    return metric


def _request_success(ended: Counter[str]) -> Metric:
    counts: Counter[str] = Counter()
    for reason, word in _VLLM_FINISH_REASONS.items():
        counts[word] += ended[reason]
    return _labelled(
        VLLM_NAMES["lineclear_requests"], "As lineclear_requests, in vLLM's words.", counts, "finished_reason"
    )


def _renamed(metric: Metric, name: str) -> Metric:
    alias = copy.copy(metric)
    alias.name, alias.documentation = name, f"As {metric.name}."
    alias.samples = [sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in metric.samples]
    return alias


class MetricsServer(HttpListener, Collector):
    """Serves the metrics of `collect` until `close`, with a thread for each of at most MAX_CONNECTIONS."""

    def __init__(self, address: str, collect: Callable[[], Iterable[Metric]]) -> None:
        """Listen on `address`, a host:port. Raises ConfigurationError if that fails. `collect` may raise."""
        super().__init__(address, "metrics", MAX_CONNECTIONS)
        self._collect = collect
        self._collecting = threading.Lock()
        registry = CollectorRegistry()
        registry.register(self)
        self._page = make_wsgi_app(registry, disable_compression=True)
        self.serve(self._answer)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry calls it."""
        yield from self._collect()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        # Always the text format 0.0.4, which every release of Prometheus reads: OpenMetrics has no colons in names.
        environ["HTTP_ACCEPT"] = "text/plain; version=0.0.4"
        try:
            with self._collecting:
                return list(self._page(environ, start_response))
        except Exception:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the engine did not answer in time\n"]
