"""The fairness index of GetStats: tenants that wait at the same time, by their weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from service.serving import serving, text_request, until

from lineclear.scheduler.requests.fairness import FairnessWindow, Shares
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.settings import load
from lineclear.v1 import inference_pb2 as pb


class Request:
    """A live request that was served `tokens` since the last tick."""

    def __init__(self, tenant: str, tokens: int) -> None:
        self.tenant, self.tokens = tenant, tokens

    def take_served_tokens(self) -> int:
        return self.tokens


def shares(
    ticks: Sequence[dict[str, int]], waiting: Sequence[str] = ("a", "b"), weights: dict[str, float] | None = None
) -> Shares:
    """Return the figures after these ticks, each with the tokens by tenant, while `waiting` tenants wait."""
    live: list[Any] = []
    window = FairnessWindow(lambda: waiting, lambda: cast("list[RequestContext]", live), weights or {})
    window.tick()
    for tick in ticks:
        live[:] = [Request(tenant, tokens) for tenant, tokens in tick.items()]
        window.tick()
    return window.shares()


def test_equal_tenants_have_index_one() -> None:
    assert shares([{"a": 50, "b": 50}] * 3) == Shares(1.0, 0.0)


def test_unequal_tenants_lower_the_index() -> None:
    found = shares([{"a": 200, "b": 10}] * 2)
    assert found.index == pytest.approx(210**2 / (2 * (200**2 + 10**2)))
    assert found.gap_tokens == 380
    assert shares([{"a": 100, "b": 0}]).index == 0.5


def test_tenants_that_do_not_wait_do_not_count() -> None:
    assert shares([{"a": 200, "b": 10}], waiting=("a",)) == Shares()
    assert shares([{"a": 50, "b": 50, "c": 1}]) == Shares(1.0, 0.0)


def test_weights_divide_the_tokens() -> None:
    assert shares([{"a": 80, "b": 20}], weights={"a": 4.0}) == Shares(1.0, 0.0)
    assert shares([{"a": 20, "b": 20}], weights={"a": 4.0}).gap_tokens == 15


def test_only_the_last_minute_counts() -> None:
    assert shares([{"a": 100, "b": 0}] * 5 + [{"a": 10, "b": 10}] * 60) == Shares(1.0, 0.0)


async def test_stats_have_the_index_without_names(tmp_path: Path) -> None:
    async with serving(tmp_path, tenant_weights="heavy=2") as s:
        calls = []
        for tenant in ("heavy", "light"):
            for _ in range(3):
                calls.append(s.generate(text_request(), metadata=(("x-tenant-id", tenant),)))
                await s.engine.next_request(len(calls))
        fairness = s.service.requests.fairness
        fairness.tick()
        for key, tokens in ((s.engine.submitted[0].request_id, 37), (s.engine.submitted[3].request_id, 7)):
            s.engine.start(key)
            s.engine.tokens(key, [5] * tokens)
        await until(lambda: [request.outputs[0].num_received for request in s.service.requests].count(0) == 4)
        fairness.tick()
        stats = await s.stub.GetStats(pb.GetStatsRequest())
        prompt = len(s.engine.submitted[0].prompt)
        served = [(37 + prompt) / 2, 7 + prompt]
        assert stats.gauges.fairness_gap_tokens == pytest.approx(max(served) - min(served))
        assert stats.gauges.fairness_index == pytest.approx(sum(served) ** 2 / (2 * sum(x * x for x in served)))
        assert "heavy" not in str(stats)
        for call in calls:
            call.cancel()
        await s.idle()


def test_weights_are_read_from_the_setting() -> None:
    assert load(["--tenant-weights", "alice=4, bob=0.5,"])[0].weights == {"alice": 4.0, "bob": 0.5}
    for wrong in ("alice", "=2", "alice=0", "alice=101", "alice=many"):
        with pytest.raises(Exception, match="tenant-weights"):
            load(["--tenant-weights", wrong])
