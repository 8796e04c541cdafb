"""The fairness index of GetStats: tenants that wait at the same time, by their weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.answers import of_tenant
from support.serving import serving, until

from lineclear.scheduler.requests.fairness import FairnessWindow, Shares
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.settings import load
from lineclear.v1 import inference_pb2 as pb


class Request:
    """A live request that was served `tokens` since the last tick."""

    def __init__(self, tenant: str, tokens: int) -> None:
        self.call, self.tokens = SimpleNamespace(tenant=tenant), tokens

    def take_served_tokens(self) -> int:
        return self.tokens


class Seconds:
    """A window, and the clock that it reads."""

    def __init__(self, **weights: float) -> None:
        self.now = 100.0
        self._waiting: Sequence[str] = ()
        self._live: list[Any] = []
        live = cast("list[RequestContext]", self._live)
        self.window = FairnessWindow(lambda: self._waiting, lambda: live, weights, lambda: self.now)

    def serve(self, tokens: dict[str, int], seconds: int = 1, waiting: Sequence[str] | None = None) -> None:
        """Serve these tokens in each second, while the same or the `waiting` tenants wait."""
        self._waiting = list(tokens) if waiting is None else waiting
        self._live[:] = []
        self.window.tick()
        for _ in range(seconds):
            self.now += 1.0
            self._live[:] = [Request(tenant, count) for tenant, count in tokens.items()]
            self.window.tick()


A_HUNDRED_TO_NONE = {"a": 100, "b": 0}


@pytest.mark.parametrize(
    ("weights", "tokens", "waiting", "wanted"),
    [
        ({}, {"a": 50, "b": 50}, "ab", Shares(1.0, 0.0)),
        ({}, {"a": 200, "b": 10}, "ab", Shares(210**2 / (2 * (200**2 + 10**2)), 190.0)),
        ({}, A_HUNDRED_TO_NONE, "ab", Shares(0.5, 100.0)),
        ({}, {"a": 200, "b": 10}, "a", Shares()),
        ({}, {"a": 50, "b": 50, "c": 1}, "ab", Shares(1.0, 0.0)),
        ({"a": 4.0}, {"a": 80, "b": 20}, "ab", Shares(1.0, 0.0)),
        ({"a": 4.0}, {"a": 20, "b": 20}, "ab", Shares(25**2 / (2 * (5**2 + 20**2)), 15.0)),
    ],
    ids=["equal", "unequal", "starved", "one waits", "one does not wait", "by weight", "not by weight"],
)
def test_figures_of_a_second(weights: dict[str, float], tokens: dict[str, int], waiting: str, wanted: Shares) -> None:
    seconds = Seconds(**weights)
    seconds.serve(tokens, waiting=waiting)
    found = seconds.window.shares()
    assert (found.index, found.gap_tokens) == pytest.approx((wanted.index, wanted.gap_tokens))


def test_a_tenant_that_joins_late_is_not_starved() -> None:
    """All three get the same from then on."""
    seconds = Seconds()
    seconds.serve({"a": 60, "b": 60}, 18)
    seconds.serve({"a": 40, "b": 40, "c": 40}, 7)
    assert seconds.window.shares() == Shares(1.0, 0.0)


def test_a_tenant_that_joins_late_and_gets_nothing_is() -> None:
    """a and b get 150 where the means are 50 + 50 + 100/3: x is 9/8. c gets 0 of 100/3."""
    seconds = Seconds()
    seconds.serve({"a": 50, "b": 50}, 2)
    seconds.serve({"a": 50, "b": 50, "c": 0}, 1)
    found = seconds.window.shares()
    assert found.index == pytest.approx((9 / 8 + 9 / 8) ** 2 / (3 * 2 * (9 / 8) ** 2))
    assert found.index == pytest.approx(2 / 3)
    assert found.gap_tokens == pytest.approx((150 - 400 / 3) + 100 / 3)


def test_pairs_that_never_wait_together_do_not_count_against_each_other() -> None:
    seconds = Seconds()
    seconds.serve({"a": 100, "b": 100}, 5)
    seconds.serve({"c": 5, "d": 5}, 5)
    assert seconds.window.shares() == Shares(1.0, 0.0)


def test_only_the_last_minute_counts() -> None:
    """Also while nothing is served: no timer runs without requests."""
    seconds = Seconds()
    seconds.serve(A_HUNDRED_TO_NONE, 5)
    seconds.now += 56.5  # the first second is over the minute
    assert seconds.window.shares() == Shares(0.5, 400.0)
    seconds.now += 3.5
    assert seconds.window.shares() == Shares(1.0, 0.0)
    seconds.serve(A_HUNDRED_TO_NONE, 5)
    seconds.serve({"a": 10, "b": 10}, 60)
    assert seconds.window.shares() == Shares(1.0, 0.0)


async def test_a_second_ends_by_itself_while_requests_are_live(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[tuple[float, Any]] = []

    def call_later(seconds: float, callback: Any) -> object:
        timers.append((seconds, callback))
        return timers

    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    live = [Request("a", 30), Request("b", 10)]
    requests = cast("list[RequestContext]", live)
    window = FairnessWindow(lambda: ["a", "b"], lambda: requests, {}, lambda: 100.0)

    def seconds_end() -> float:
        seconds, callback = timers.pop()
        assert timers == []
        callback()
        return seconds

    window.start()
    window.start()
    assert [seconds_end() for _ in range(3)] == [1.0] * 3
    assert window.shares() == Shares(40**2 / (2 * (30**2 + 10**2)), 40.0), "of two seconds in which both waited"
    live.clear()
    seconds_end()
    assert timers == [], "no request is live"
    window.start()
    assert len(timers) == 1


async def test_stats_have_the_index_without_names(tmp_path: Path) -> None:
    async with serving(tmp_path, tenant_weights="heavy=2") as s:
        calls = []
        for tenant in ("heavy", "heavy", "heavy", "light", "light", "light"):
            calls.append(s.generate(**of_tenant(tenant)))
            await s.engine.next_request(len(calls))
        fairness = s.manager.requests.fairness
        fairness.tick()
        for key, tokens in ((s.engine.submitted[0].request_id, 37), (s.engine.submitted[3].request_id, 7)):
            s.engine.start(key)
            s.engine.tokens(key, [5] * tokens)
        await until(lambda: [request.outputs[0].num_received for request in s.manager.requests].count(0) == 4)
        fairness.tick()
        stats = await s.stub.GetStats(pb.GetStatsRequest())
        prompt = len(s.engine.submitted[0].prompt)
        served = [(37 + prompt) / 2, 7 + prompt]
        assert stats.gauges.fairness_gap_tokens == pytest.approx(max(served) - min(served))
        assert stats.gauges.fairness_index == pytest.approx(sum(served) ** 2 / (2 * sum(x * x for x in served)))
        assert "heavy" not in str(stats)
        assert not any(call.done() for call in calls)


def test_weights_are_read_from_the_setting() -> None:
    assert load(["--tenant-weights", "alice=4, bob=0.5,"])[0].weights == {"alice": 4.0, "bob": 0.5}
    for wrong in ("alice", "=2", "alice=0", "alice=101", "alice=many", "alice=1,alice=2"):
        with pytest.raises(Exception, match="tenant-weights"):
            load(["--tenant-weights", wrong])
