"""What Prometheus is told: every figure of GetStats under a name of its own, over HTTP, each visit anew."""

from __future__ import annotations

import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from support.patience import PATIENCE_SECONDS

from lineclear.scheduler.rpc.metrics import families
from lineclear.scheduler.rpc.stats import BOUNDS_SECONDS, Durations, Stats
from lineclear.scheduler.scrapes import Scrapes
from lineclear.scheduler.settings import ConfigurationError
from lineclear.v1 import inference_pb2 as pb


class _Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def read(stats: pb.GetStatsResponse, figures: Stats) -> dict[str, float]:
    """{name and labels: value} of what a scrape of these would bring, by the library's own parser."""
    registry = CollectorRegistry()
    registry.register(_Given(list(families(stats, figures))))
    samples = [s for f in text_string_to_metric_families(generate_latest(registry).decode()) for s in f.samples]
    return {"".join([s.name, *(f" {k}={v}" for k, v in sorted(s.labels.items()))]): s.value for s in samples}


def test_every_counter_and_gauge_has_a_name() -> None:
    stats = pb.GetStatsResponse()
    whole = [f.name for f in pb.Totals.DESCRIPTOR.fields if f.cpp_type != f.CPPTYPE_DOUBLE]
    for value, name in enumerate(whole, 1):
        setattr(stats.totals, name, value)
    found = read(stats, Stats(0.0))
    assert [found[f"lineclear_{name}_total"] for name in whole] == list(range(1, len(whole) + 1))
    assert not [f.name for f in pb.Gauges.DESCRIPTOR.fields if f"lineclear_{f.name}" not in found]


def test_what_autoscalers_look_for_is_there_by_the_name_they_know() -> None:
    gauges = pb.Gauges(requests_waiting=3, requests_running=5, blocks_used=16, blocks_total=64)
    found = read(pb.GetStatsResponse(gauges=gauges), Stats(0.0))
    assert found["vllm:num_requests_waiting"] == found["lineclear_requests_waiting"] == 3
    assert found["vllm:num_requests_running"] == found["lineclear_requests_running"] == 5
    assert found["vllm:kv_cache_usage_perc"] == 0.25


def test_durations_are_counted_up_to_each_bound() -> None:
    figures = Stats(0.0)
    for first_token in (0.001, 0.0011, 0.3, 1000.0, None):
        figures.add_finished(Durations(None, first_token, None, 2.0, None))
    found = read(pb.GetStatsResponse(), figures)
    expected = {0.001: 1, 0.0025: 2, 0.25: 2, 0.5: 3, 500.0: 3}
    assert {bound: found[f"lineclear_first_token_seconds_bucket le={bound}"] for bound in expected} == expected
    assert found["lineclear_first_token_seconds_bucket le=+Inf"] == found["lineclear_first_token_seconds_count"] == 4
    assert found["lineclear_first_token_seconds_sum"] == pytest.approx(1000.3021)
    assert found["lineclear_total_seconds_count"] == 5
    assert found["lineclear_queue_seconds_count"] == 0
    assert list(BOUNDS_SECONDS) == sorted(BOUNDS_SECONDS)


def test_requests_are_counted_by_how_they_ended() -> None:
    figures = Stats(0.0)
    for outcome in ("length", "stop_eos", "length", "deadline_exceeded"):
        figures.add_ended(outcome)
    found = read(pb.GetStatsResponse(), figures)
    ended = {name: value for name, value in found.items() if name.startswith("lineclear_requests_ended_total")}
    assert ended == {
        "lineclear_requests_ended_total outcome=length": 2,
        "lineclear_requests_ended_total outcome=stop_eos": 1,
        "lineclear_requests_ended_total outcome=deadline_exceeded": 1,
    }


# -- the listener


def fetch(scrapes: Scrapes) -> str:
    with urllib.request.urlopen(f"http://{scrapes.address}/metrics", timeout=PATIENCE_SECONDS) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        return str(response.read().decode())


def test_each_visit_finds_the_figures_of_its_moment() -> None:
    values = iter([1, 2])
    scrapes = Scrapes("127.0.0.1:0", lambda: [GaugeMetricFamily("visits", "So many.", next(values))])
    try:
        assert "visits 1.0" in fetch(scrapes)
        assert "visits 2.0" in fetch(scrapes)
        with pytest.raises(urllib.error.HTTPError, match="503"):  # no figures any more
            fetch(scrapes)
    finally:
        scrapes.close()
    with pytest.raises(urllib.error.URLError):
        fetch(scrapes)


def test_a_caller_that_leaves_without_a_word_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    scrapes = Scrapes("127.0.0.1:0", lambda: [GaugeMetricFamily("visits", "So many.", 1)])
    host, _, port = scrapes.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port))) as caller:
            caller.sendall(b"GET")
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        assert "visits 1.0" in fetch(scrapes)
    finally:
        scrapes.close()
    assert capfd.readouterr().err == ""


def test_an_address_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="in use"):
            Scrapes(f"127.0.0.1:{taken.getsockname()[1]}", list)
