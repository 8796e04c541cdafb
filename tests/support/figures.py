"""Equations between the figures of a server, over one metrics page and GetStats."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from support.counters import check_counters

from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.metrics_export import VLLM_NAMES

FINISHED = {reason.name.lower() for reason in FinishReason} - {"cancelled"}
"""Outcomes of requests that completed their answer."""
HISTOGRAMS = (
    *("request_queue_time", "time_to_first_token", "request_mean_inter_token_latency", "e2e_request_latency"),
)
IDLE_GAUGES = ("num_requests_waiting", "num_tokens_waiting", "num_requests_running", "blocks_used", "open_streams")
"""Gauges that are 0 if no request is live."""


class Page:
    """The values of a metrics page, by name and labels."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._values[sample.name][tuple(sample.labels.values())] = sample.value

    def __getitem__(self, name: str) -> float:
        """Return the value of a metric without labels."""
        return self._values[f"lineclear_{name}"][()]

    def by_label(self, name: str) -> dict[str, float]:
        return {labels[0]: value for labels, value in self._values[f"lineclear_{name}"].items()}

    def named(self, name: str) -> dict[tuple[str, ...], float]:
        """Return all values of a metric with its whole name, by labels."""
        return self._values[name]

    @property
    def counters(self) -> SimpleNamespace:
        """The counters without labels, by the name of their field."""
        shown = {name: values for name, values in self._values.items() if name.endswith("_total") and () in values}
        return SimpleNamespace(
            **{name.removeprefix("lineclear_").removesuffix("_total"): values[()] for name, values in shown.items()}
        )

    @property
    def ended(self) -> Counter[str]:
        """Admitted requests that ended, by outcome."""
        return Counter({key: int(value) for key, value in self.by_label("requests_total").items()})

    @property
    def rejected(self) -> Counter[str]:
        """Rejected requests and calls, by reason."""
        return Counter({key: int(value) for key, value in self.by_label("requests_rejected_total").items()})


def check_page(page: Page, *, idle: bool = False) -> Page:
    """Check the equations that hold at any moment; with `idle`, those of a server without requests too."""
    _check_requests(page)
    _check_histograms(page)
    check_counters(page.counters)
    _check_gauges(page)
    _check_vllm_names(page)
    if idle:
        _check_idle(page)
    return page


def check_stats(stats: Any, page: Page) -> None:
    """Check that GetStats of the client has the counters of the page. Nothing may run between the two."""
    for name, count in dataclasses.asdict(stats.counters).items():
        shown = sum(page.rejected.values()) if name == "requests_rejected" else page[f"{name}_total"]
        assert shown == count, name


def _check_requests(page: Page) -> None:
    names = ("requests_finished", "requests_cancelled", "requests_expired", "requests_failed")
    finished, cancelled, expired, failed = (page[f"{name}_total"] for name in names)
    ended = page.ended
    assert finished == sum(count for outcome, count in ended.items() if outcome in FINISHED), ended
    assert (cancelled, expired) == (ended["cancelled"], ended["deadline_exceeded"]), ended
    assert finished + cancelled + expired + failed == ended.total(), ended
    live = page["requests_admitted_total"] - ended.total()
    assert 0 <= live <= page["open_streams"], "admitted requests are those that ended and those that are live"


def _check_histograms(page: Page) -> None:
    counts = {name: page[f"{name}_seconds_count"] for name in HISTOGRAMS}
    assert counts["e2e_request_latency"] == page["requests_finished_total"]
    assert counts["request_queue_time"] == page["requests_finished_total"]
    assert counts["request_mean_inter_token_latency"] <= counts["time_to_first_token"]
    assert counts["time_to_first_token"] <= page["requests_finished_total"]
    for name in HISTOGRAMS:
        buckets = [*page.by_label(f"{name}_seconds_bucket").values()]
        assert buckets == sorted(buckets), f"{name}: buckets count up to each bound"
        assert buckets[-1] == counts[name]
        assert page[f"{name}_seconds_sum"] == 0 or counts[name], name


def _check_gauges(page: Page) -> None:
    assert page["blocks_used"] + page["blocks_cached"] <= page["num_blocks"]
    assert math.isclose(page["kv_cache_usage_ratio"], page["blocks_used"] / max(1, page["num_blocks"]))
    joined = page.by_label("worker_joined")
    assert page["num_workers_joined"] == sum(joined.values()), joined
    absent = page["num_workers_starting"] + page["num_workers_given_up"]
    assert absent <= page["num_workers_wanted"] <= absent + page["num_workers_joined"]
    if joined and all(joined.values()):
        assert page["worker_up"] == 1
        for name in ("num_blocks", "blocks_used", "blocks_cached", "num_requests_running", "steps_in_flight"):
            assert page[name] == sum(page.by_label(f"worker_{name}").values()), name
    index = page["fairness_index"]
    assert 0 < index <= 1
    assert (page["fairness_gap_tokens"] == 0) or index < 1, "tenants with a difference are served unequally"


def _check_vllm_names(page: Page) -> None:
    for ours, theirs in VLLM_NAMES.items():
        for suffix in ("", "_total", "_count", "_sum", "_bucket"):
            if ours != "lineclear_requests":
                assert page.named(theirs + suffix) == page.named(ours + suffix), ours
    success = page.named("vllm:request_success_total")
    ended = page.ended
    assert success["abort",] == ended["cancelled"] + ended["deadline_exceeded"]
    assert sum(success.values()) - success["abort",] == page["requests_finished_total"]


def _check_idle(page: Page) -> None:
    assert {name: page[name] for name in IDLE_GAUGES} == dict.fromkeys(IDLE_GAUGES, 0)
    assert page["requests_admitted_total"] == page.ended.total()
