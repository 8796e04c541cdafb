"""Request statistics against results computed by hand."""

from __future__ import annotations

import random

import pytest

from lineclear.scheduler.core.events import RequestStats
from lineclear.scheduler.requests.request_metrics import (
    WINDOW_REQUESTS,
    RequestTimings,
    ServerStats,
    quantiles,
    request_timings,
)
from lineclear.v1 import inference_pb2 as pb


def test_quantiles_of_a_hundred_numbers() -> None:
    found = quantiles(float(n) for n in range(100, 0, -1))
    assert found == pb.Quantiles(mean=50.5, p50=50.0, p90=90.0, p99=99.0, max=100.0, count=100)


@pytest.mark.parametrize(
    ("values", "p50", "p90", "p99"), [([3.0], 3, 3, 3), ([1.0, 2.0], 1, 2, 2), ([1.0, 2.0, 3.0], 2, 3, 3)]
)
def test_quantiles_of_few_numbers_are_among_them(values: list[float], p50: float, p90: float, p99: float) -> None:
    found = quantiles(values)
    assert (found.p50, found.p90, found.p99) == (p50, p90, p99)


def test_request_timings() -> None:
    record = RequestStats(
        arrival=10.5, prompt_tokens=3, completion_tokens=5, started_at=11.0, first_token_at=12.0, last_token_at=14.0
    )
    assert request_timings(record, 10.0, 5, 15.0) == RequestTimings(
        queue_time=1.0, time_to_first_token=2.0, decode_time=2.0, e2e_latency=5.0, mean_inter_token_latency=0.5
    )


def test_a_request_that_never_ran_only_has_a_total() -> None:
    assert request_timings(RequestStats(10.0, 3), 10.0, 0, 12.0) == RequestTimings(None, None, None, 2.0, None)


def test_one_token_has_no_gap() -> None:
    record = RequestStats(0.0, 3, completion_tokens=1, started_at=1.0, first_token_at=2.0, last_token_at=2.0)
    assert request_timings(record, 0.0, 1, 3.0).mean_inter_token_latency is None


def test_the_window_is_that_of_the_last_requests() -> None:
    """The window is kept in order of arrival, and its quantiles equal those of a full sort."""
    rng = random.Random(1)
    stats = ServerStats(0.0)
    added: list[RequestTimings] = []
    for _ in range(2 * WINDOW_REQUESTS):
        queue = rng.choice([None, 0.0, rng.random(), 0.5])
        added.append(RequestTimings(queue, None, None, round(rng.random(), 1), None))
        stats.add_finished(added[-1])
    last = added[-WINDOW_REQUESTS:]
    assert stats.window("decode_time") == quantiles([]) == pb.Quantiles()
    assert stats.window("e2e_latency") == quantiles(spent.e2e_latency for spent in last)
    assert stats.window("queue_time") == quantiles(spent.queue_time for spent in last if spent.queue_time is not None)


def test_the_rate_is_of_the_last_ten_seconds() -> None:
    stats = ServerStats(100.0)
    assert stats.output.per_second(100.0) == 0.0
    stats.output.add(50, 100.1)
    assert stats.output.per_second(100.2) == 50.0  # the first second counts as a full one
    assert stats.output.per_second(105.0) == 10.0
    stats.output.add(50, 109.5)
    assert stats.output.per_second(110.0) == 10.0
    assert stats.output.per_second(112.0) == 5.0
    assert stats.output.per_second(200.0) == 0.0


def test_the_rate_keeps_a_bounded_history() -> None:
    stats = ServerStats(0.0)
    for n in range(100_000):
        stats.output.add(1, n * 0.01)
    assert stats.output.per_second(1000.0) == pytest.approx(100.0, rel=0.11)
    assert len(stats.output) <= 12
