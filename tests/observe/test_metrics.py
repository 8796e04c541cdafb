"""Prometheus metrics: a metric for every field of GetStats, served over HTTP and current at each scrape."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from security.test_token_file import ALICE, token_file
from support.every_method import bearer
from support.processes import Running, until
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler import http_listener
from lineclear.scheduler.metrics_export import MAX_CONNECTIONS, VLLM_NAMES, MetricsServer, families
from lineclear.scheduler.requests.request_metrics import BOUNDS_SECONDS, EndedRequest, RequestTimings, ServerStats
from lineclear.v1 import inference_pb2 as pb


def page_with(metrics: Iterable[Metric]) -> str:
    """Return the page of a scrape that finds these metrics."""
    registry = CollectorRegistry()
    registry.register(Mock(spec=Collector, collect=Mock(return_value=[*metrics])))
    return generate_latest(registry).decode()


def read(stats: pb.GetStatsResponse, figures: ServerStats, **more: Any) -> dict[str, float]:
    """Return {name and labels: value} of a scrape, read by the library's own parser."""
    page = page_with(families(stats, figures, **more))
    samples = [s for f in text_string_to_metric_families(page) for s in f.samples]
    return {"".join([s.name, *(f" {k}={v}" for k, v in sorted(s.labels.items()))]): s.value for s in samples}


def test_metric_names_are_unique() -> None:
    """The text format allows one HELP and one TYPE line for a name; strict readers drop the whole page."""
    figures = ServerStats(0.0)
    figures.add_rejected("QUEUE_FULL")
    names = [family.name for family in families(pb.GetStatsResponse(), figures)]
    assert sorted(set(names)) == sorted(names)


def test_every_counter_and_gauge_is_a_metric() -> None:
    stats = pb.GetStatsResponse()
    counters = [f.name for f in pb.Counters.DESCRIPTOR.fields]
    counters.remove("requests_rejected")  # counted by reason, under the same name
    for value, name in enumerate(counters, 1):
        setattr(stats.counters, name, value)
    found = read(stats, ServerStats(0.0))
    assert [found[f"lineclear_{name}_total"] for name in counters] == list(range(1, len(counters) + 1))
    assert not [f.name for f in pb.Gauges.DESCRIPTOR.fields if f"lineclear_{f.name}" not in found]


def test_memory_of_each_worker_is_a_metric() -> None:
    figures = {"load_seconds": 12.5, "weight_bytes": 1 << 34, "kv_cache_bytes": 1 << 36, "step_memory_bytes": 3}
    stats = pb.GetStatsResponse(workers=[pb.WorkerStats(index=n, swap_memory_bytes=n, **figures) for n in (0, 2)])
    page = read(stats, ServerStats(0.0))
    for name, value in figures.items():
        assert [page[f"lineclear_worker_{name} worker={n}"] for n in (0, 2)] == [value, value]
    assert page["lineclear_worker_swap_memory_bytes worker=2"] == 2


def test_labels_say_what_computes_the_layers() -> None:
    worker = pb.WorkerStatus(device="cpu", dtype="int4", forward_pass="fused", forward_pass_reason="in no label")
    page = read(pb.GetStatsResponse(server_version="1", worker=worker), ServerStats(0.0))
    assert page["lineclear_info device=cpu dtype=int4 forward_pass=fused version=1"] == 1


def test_help_is_the_comment_of_the_field() -> None:
    texts = {family.name: family.documentation for family in families(pb.GetStatsResponse(), ServerStats(0.0))}
    assert texts["lineclear_num_requests_waiting"] == "Requests in the queue."
    assert texts["lineclear_preemptions"].startswith("Preemptions: a request gave its KV blocks to another")


def test_metrics_of_vllm_have_its_names() -> None:
    """The names stand for the same values, and each is a name that vLLM exports."""
    figures = ServerStats(0.0)
    figures.add_finished(RequestTimings(0.1, 0.2, 0.3, 0.6, 0.05))
    counters = {"prompt_tokens": 1, "generation_tokens": 2, "prefix_cache_hits": 3, "prefix_cache_queries": 4}
    gauges = pb.Gauges(num_requests_waiting=3, num_requests_running=5, kv_cache_usage_ratio=0.25)
    found = read(pb.GetStatsResponse(gauges=gauges, counters=pb.Counters(**counters, preemptions=6)), figures)
    for ours, theirs in VLLM_NAMES.items():
        for name in [name for name in found if name.removeprefix(ours)[:1] in ("", "_") and name.startswith(ours)]:
            if ours != "lineclear_requests":
                assert found[name.replace(ours, theirs, 1)] == found[name], name
    assert found["vllm:num_requests_waiting"] == 3
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:num_preemptions_total"] == 6
    assert found["vllm:request_time_per_output_token_seconds_sum"] == 0.05
    assert found["vllm:e2e_request_latency_seconds_bucket le=1.0"] == 1


def test_durations_are_counted_up_to_each_bound() -> None:
    figures = ServerStats(0.0)
    for first_token in (0.001, 0.0011, 0.3, 1000.0, None):
        figures.add_finished(RequestTimings(None, first_token, None, 2.0, None))
    found = read(pb.GetStatsResponse(), figures)
    expected = {0.001: 1, 0.0025: 2, 0.25: 2, 0.5: 3, 500.0: 3}
    name = "lineclear_time_to_first_token_seconds"
    assert {bound: found[f"{name}_bucket le={bound}"] for bound in expected} == expected
    assert found[f"{name}_bucket le=+Inf"] == found[f"{name}_count"] == 4
    assert found[f"{name}_sum"] == pytest.approx(1000.3021)
    assert found["lineclear_e2e_request_latency_seconds_count"] == 5
    assert found["lineclear_request_queue_time_seconds_count"] == 0
    assert list(BOUNDS_SECONDS) == sorted(BOUNDS_SECONDS)


def test_requests_are_counted_by_how_they_ended() -> None:
    figures = ServerStats(0.0)
    for outcome in ("length", "stop_eos", "length", "stop_string", "deadline_exceeded"):
        figures.add_ended(
            EndedRequest("id", outcome, True, "", "", 1, 3, RequestTimings(None, None, None, 1.0, None), None)
        )
    figures.add_rejected("invalid_request")
    found = read(pb.GetStatsResponse(), figures)
    success = {"stop": 2, "length": 2, "abort": 1, "repetition": 0}
    assert {name: found[f"vllm:request_success_total finished_reason={name}"] for name in success} == success
    assert found["lineclear_requests_total finish_reason=length"] == 2
    assert found["lineclear_requests_rejected_total reason=invalid_request"] == 1


def test_certificate_expiry_is_exported_if_known() -> None:
    name = "lineclear_certificate_expiry_timestamp_seconds"
    assert read(pb.GetStatsResponse(), ServerStats(0.0), certificate_expires_at=1.8e9)[name] == 1.8e9
    assert name not in read(pb.GetStatsResponse(), ServerStats(0.0))


# -- the listener


def fetch(scrapes: MetricsServer, accept: str = "*/*", query: str = "") -> str:
    request = urllib.request.Request(f"http://{scrapes.address}/metrics{query}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return str(response.read().decode())


def visits(value: int = 1) -> list[Metric]:
    return [GaugeMetricFamily("visits", "So many.", value)]


@contextlib.contextmanager
def scraped(collect: Callable[[], Iterable[Metric]] = visits) -> Iterator[MetricsServer]:
    scrapes = MetricsServer("127.0.0.1:0", collect)
    try:
        yield scrapes
    finally:
        scrapes.close()


def connect(scrapes: MetricsServer) -> socket.socket:
    host, _, port = scrapes.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)


PROMETHEUS = {
    "2.30": "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "2.53, native histograms": "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;"
    "encoding=delimited,application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "3.0": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
}
"""The `Accept` header of each release."""


@pytest.mark.parametrize("accept", [*PROMETHEUS.values(), "*/*"], ids=[*PROMETHEUS, "curl"])
def test_names_are_equal_for_every_prometheus_release(accept: str) -> None:
    stats = pb.GetStatsResponse(gauges=pb.Gauges(num_requests_waiting=3))
    with scraped(lambda: families(stats, ServerStats(0.0))) as scrapes:
        found = {s.name: s.value for f in text_string_to_metric_families(fetch(scrapes, accept)) for s in f.samples}
    assert found["vllm:num_requests_waiting"] == found["lineclear_num_requests_waiting"] == 3


def test_metrics_name_no_tenant_request_or_model(start: Callable[..., Running], tmp_path: Path) -> None:
    """A scrape needs no token."""
    tokens = token_file(tmp_path, f"tenant-alice {ALICE}")
    server = start(
        "--metrics-listen", "127.0.0.1:0", "--token-file", str(tokens), "--served-model-name", "served-by-name"
    )
    for names in ({"request_id": "invoice-4711"}, {"request_id": "invoice-4712", "model": "served-by-no-name"}):
        request = pb.GenerateRequest(text="The quick", sampling={"seed": 1, "max_tokens": 3}, **names)
        with contextlib.suppress(grpc.RpcError):  # the second request names an unknown model
            list(server.stub.Generate(request, metadata=bearer(ALICE)))
    page = server.metrics_page()
    assert "lineclear_requests_finished_total 1.0" in page
    assert 'reason="model_not_found"' in page
    assert not [name for name in ("alice", "invoice", "served-by", ALICE) if name in page]


def test_metrics_can_be_selected_by_name() -> None:
    with scraped(lambda: [*visits(), GaugeMetricFamily("others", "So many.", 1)]) as scrapes:
        assert {"visits 1.0", "others 1.0"} < set(fetch(scrapes).splitlines())
        assert "others 1.0" not in fetch(scrapes, query="?name[]=visits")


@pytest.mark.parametrize("payload", [b"POST /metrics HTTP/1.1\r\n\r\n", b"hello\r\n\r\n"])
def test_other_http_requests_are_rejected(payload: bytes) -> None:
    with scraped() as scrapes, connect(scrapes) as caller:
        caller.sendall(payload)
        response = caller.recv(1 << 16)
        assert b"400" in response or b"405" in response


def test_slow_clients_do_not_block_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more clients than connections, each new connection closes the oldest. No client times out here."""
    monkeypatch.setattr(http_listener.Handler, "timeout", 10 * PATIENCE_SECONDS)
    with scraped() as scrapes, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(scrapes)) for _ in range(MAX_CONNECTIONS + 4)]
        for caller in slow:
            caller.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        assert "visits 1.0" in fetch(scrapes)
        for caller in slow[:5]:  # the four above the limit, and a fifth for the scrape
            with contextlib.suppress(ConnectionResetError):
                assert caller.recv(1) == b""


def test_scrape_threads_are_bounded_while_the_engine_hangs() -> None:
    """Complete requests wait for the engine, so closing their connections does not end their threads."""
    answers = threading.Event()

    def collect() -> list[Metric]:
        assert answers.wait(PATIENCE_SECONDS)
        return visits()

    def threads() -> int:
        return sum("process_request_thread" in thread.name for thread in threading.enumerate())

    until(lambda: threads() == 0)
    with scraped(collect) as scrapes, contextlib.ExitStack() as stack:
        for _ in range(3 * MAX_CONNECTIONS):
            stack.enter_context(connect(scrapes)).sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        until(lambda: threads() >= MAX_CONNECTIONS)
        assert threads() == MAX_CONNECTIONS
        answers.set()
        assert "visits 1.0" in fetch(scrapes)


def test_silent_client_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listener.Handler, "timeout", 0.2)
    with scraped() as scrapes, connect(scrapes) as caller:
        caller.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""


def test_client_that_does_not_read_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_listener.Handler, "timeout", 0.5)
    large = [GaugeMetricFamily(f"visits_{n}", "x" * 10_000, n) for n in range(2000)]
    with scraped(lambda: large) as scrapes, connect(scrapes) as caller:
        caller.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert caller.recv(1, socket.MSG_PEEK)  # the response has started
        until(lambda: not scrapes._connections)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while data := caller.recv(1 << 20):
                received += len(data)
        assert received < 20_000_000
    assert capfd.readouterr().err == ""


def test_each_scrape_gets_current_values() -> None:
    values = iter([1, 2])
    with scraped(lambda: visits(next(values))) as scrapes:
        assert "visits 1.0" in fetch(scrapes)
        assert "visits 2.0" in fetch(scrapes)
        with pytest.raises(urllib.error.HTTPError, match="503"):  # collecting fails
            fetch(scrapes)


def test_connection_reset_by_a_client_is_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    with scraped() as scrapes:
        with connect(scrapes) as caller:
            caller.sendall(b"GET")
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        assert "visits 1.0" in fetch(scrapes)
    assert capfd.readouterr().err == ""


def test_slow_scrape_does_not_delay_the_exit(start: Callable[..., Running]) -> None:
    """The client sends a byte now and then, so a timeout between bytes would not end it."""
    server = start("--metrics-listen", "127.0.0.1:0")
    host, _, port = server.wait_for("metrics_listening")["address"].rpartition(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        assert "lineclear_num_requests_running" in server.metrics_page()
        server.popen.send_signal(signal.SIGTERM)
        end = monotonic() + SOON_SECONDS
        while server.popen.poll() is None and monotonic() < end:
            with contextlib.suppress(OSError):
                slow.sendall(b"x")
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.popen.wait(0.05)
        assert server.popen.poll() == 0


def test_an_address_in_use_is_refused() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        with pytest.raises(ConfigurationError, match="in use"):
            MetricsServer(f"127.0.0.1:{used.getsockname()[1]}", list)
