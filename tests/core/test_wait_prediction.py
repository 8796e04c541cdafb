"""The place of a waiting request and its predicted wait, compared with what happens."""

from __future__ import annotations

from typing import Any

import pytest
from core.harness import CoreHarness, make_request

from lineclear.errors import QueueFull
from lineclear.scheduler.core.events import Admitted, QueuePosition, Started
from lineclear.scheduler.core.policies import QUEUE_ORDERS

STEP_SECONDS = 0.1


class Timed(CoreHarness):
    """A harness with two slots whose steps take a tenth of a second, and the placements that requests got."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{"max_batch_size": 2, "worker_num_blocks": 200} | sizes)
        self.places: dict[str, QueuePosition] = {}
        self.arrivals: dict[str, float] = {}
        self.starts: dict[str, float] = {}

    def ask(self, name: str, prompt: int = 4, max_tokens: int = 10, **more: Any) -> QueuePosition | None:
        request = make_request(name, prompt, max_tokens, wants_position=True, **more)
        (event,) = self.record(self.core.submit(request, self.now))
        assert isinstance(event, Admitted)
        if event.position is not None:
            self.places[name], self.arrivals[name] = event.position, self.now
        return event.position

    def tick(self) -> None:
        for event in self.record_plan():
            if isinstance(event, Started):
                self.starts[event.request_id] = self.now
        self.now += STEP_SECONDS
        if self.flights:
            self.apply()

    def record_plan(self) -> list[Any]:
        before = len(self.events)
        self.plan()
        return self.events[before:]

    def finish(self) -> None:
        while self.core.num_live:
            self.tick()

    def errors(self) -> dict[str, float]:
        """Return predicted minus actual wait of each request that had a prediction, in steps."""
        return {
            name: (place.seconds - (self.starts[name] - self.arrivals[name])) / STEP_SECONDS
            for name, place in self.places.items()
            if place.seconds is not None
        }


def trained(**sizes: Any) -> Timed:
    """Return a harness in which requests have ended, so that it knows the pace."""
    harness = Timed(**sizes)
    for turn in range(2):
        for number in range(harness.core.limits.max_batch_size):
            harness.ask(f"first{turn}.{number}", 4, 10)
        harness.finish()
    harness.places.clear()
    return harness


def test_request_that_starts_at_once_gets_no_place() -> None:
    harness = trained()
    assert harness.ask("a") is None
    harness.tick()
    assert harness.ask("b") is None
    assert harness.ask("c") == QueuePosition(1, harness.places["c"].seconds)


def test_only_requests_that_ask_get_a_place() -> None:
    harness = trained(max_batch_size=1)
    for name in "ab":
        harness.submit(name, 4)
    assert [e.position for e in harness.events if isinstance(e, Admitted)][-2:] == [None, None]


def test_pace_is_unknown_before_a_request_has_ended() -> None:
    harness = Timed(max_batch_size=1)
    harness.ask("a")
    harness.tick()
    assert harness.ask("b") == QueuePosition(0, None)
    assert harness.ask("c") == QueuePosition(1, None)


@pytest.mark.parametrize("order", sorted(QUEUE_ORDERS))
def test_known_lengths_are_predicted_to_within_a_few_steps(order: str) -> None:
    """Twenty requests of different lengths; nothing arrives later with an earlier key."""
    harness = trained(scheduling_policy=order, priority_aging_seconds=0.001)
    for number in range(20):
        tenant = "ab"[number % 2]
        harness.ask(f"r{number}", 4, 4 + number % 7 * 4, tenant=tenant, priority=number % 5, seed=number)
    last = {name: place for name, place in harness.places.items() if place.requests_ahead >= 2}
    harness.finish()
    errors = harness.errors()
    if order in ("fifo", "prefill_first"):
        assert len(last) >= 16
        assert max(abs(errors[name]) for name in last) <= 12  # of up to 150 steps
    started = sorted(harness.starts, key=lambda name: harness.starts[name])
    assert set(last) <= set(started)


@pytest.mark.parametrize(
    ("order", "more", "places"),
    [
        ("fifo", [{}, {}, {}], [1, 2, 3]),
        ("priority", [{"priority": 9}, {"priority": 1}, {"priority": 5}], [1, 0, 2]),
        ("shortest", [{"max_tokens": 30}, {"max_tokens": 20}, {"max_tokens": 5}], [1, 1, 0]),
        ("shortest", [{"expected_tokens": 5, "max_tokens": 30}, {"max_tokens": 20}, {"max_tokens": 25}], [0, 2, 3]),
        ("deadline", [{"deadline": 50.0}, {"deadline": 20.0}, {"deadline": 30.0}], [0, 0, 1]),
        ("fair", [{"tenant": "a"}, {"tenant": "b"}, {"tenant": "b"}], [1, 0, 1]),
    ],
)
def test_place_counts_the_requests_with_an_earlier_key(order: str, more: list[Any], places: list[int]) -> None:
    harness = trained(scheduling_policy=order, max_batch_size=1)
    harness.ask("running", 4, 20, tenant="a", priority=0)
    harness.tick()
    harness.ask("waiting", 4, 10, tenant="a", priority=5)
    found = [harness.ask(f"r{number}", 4, **{"max_tokens": 10} | fields) for number, fields in enumerate(more)]
    assert [place.requests_ahead for place in found if place is not None] == places


def test_expected_lengths_shorten_the_prediction() -> None:
    waits = []
    for expected in (0, 10):
        harness = trained(max_batch_size=1)
        harness.ask("running", 4, 100, expected_tokens=expected)
        harness.tick()
        place = harness.ask("next")
        assert place is not None
        waits.append(place.seconds)
    assert waits == [pytest.approx(100 * STEP_SECONDS, rel=0.1), pytest.approx(10 * STEP_SECONDS, rel=0.2)]


def test_slots_of_a_fixed_batch_are_free_together() -> None:
    harness = trained(batching_strategy="fixed_size")
    harness.ask("a", 4, 10)
    harness.ask("b", 4, 40)
    harness.tick()
    assert harness.ask("c") == QueuePosition(0, None)  # the next batch is not full
    place = harness.ask("d")
    assert place is not None
    assert place.requests_ahead == 1
    assert place.seconds == pytest.approx(40 * STEP_SECONDS, rel=0.1)


def test_full_queue_names_the_predicted_wait() -> None:
    harness = trained(max_batch_size=1, max_queue_size=3)
    for number in range(4):
        harness.ask(f"r{number}", 4, 10)
        harness.tick()
    with pytest.raises(QueueFull) as caught:
        harness.ask("more")
    wait = float(caught.value.metadata["predicted_wait_seconds"])
    assert wait == pytest.approx(37 * STEP_SECONDS, rel=0.15)  # 7 steps of the running one, and three times 10
    assert caught.value.retry_after_seconds == pytest.approx(wait / 2, rel=0.01)
    snapshot = harness.core.snapshot(harness.now)
    assert snapshot.predicted_wait_seconds == pytest.approx(wait, abs=0.001)


def test_full_queue_without_worker_has_no_prediction() -> None:
    harness = trained(max_batch_size=1, max_queue_size=1)
    harness.lose()
    harness.ask("a")
    with pytest.raises(QueueFull) as caught:
        harness.ask("b")
    assert "predicted_wait_seconds" not in caught.value.metadata
    assert caught.value.retry_after_seconds == 1.0
