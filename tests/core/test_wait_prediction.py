"""The place of a waiting request and its predicted wait, compared with what happens."""

from __future__ import annotations

from typing import Any

import pytest
from core.harness import CoreHarness, make_request

from lineclear.errors import QueueFull
from lineclear.scheduler.core.events import Admitted, QueuePosition, Started

STEP_SECONDS = 0.1


class Timed(CoreHarness):
    """A harness with two slots whose steps take a tenth of a second, and the placements that requests got."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{"max_batch_size": 2, "worker_num_blocks": 200} | sizes)
        self.places: dict[str, QueuePosition] = {}
        self.waits: dict[str, float] = {}

    def ask(self, name: str, prompt: int = 4, max_tokens: int = 10, **more: Any) -> QueuePosition | None:
        request = make_request(name, prompt, max_tokens, wants_position=True, **more)
        (event,) = self.record(self.core.submit(request, self.now))
        assert isinstance(event, Admitted)
        if event.position is not None:
            self.places[name] = event.position
        self.waits[name] = -self.now
        return event.position

    def tick(self) -> None:
        before = len(self.events)
        self.plan()
        for event in self.events[before:]:
            if isinstance(event, Started) and event.request_id in self.waits:
                self.waits[event.request_id] += self.now
        self.now += STEP_SECONDS
        if self.flights:
            self.apply()

    def finish(self) -> None:
        while self.core.num_live:
            self.tick()


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


@pytest.mark.parametrize("order", ["fifo", "prefill_first"])
def test_known_lengths_are_predicted_to_within_a_few_steps(order: str) -> None:
    harness = trained(scheduling_policy=order)
    for number in range(20):
        harness.ask(f"r{number}", 4, 4 + number % 7 * 4, seed=number)
    harness.finish()
    late = [name for name, place in harness.places.items() if place.requests_ahead >= 2]
    assert len(late) >= 16
    for name in late:
        seconds = harness.places[name].seconds
        assert seconds == pytest.approx(harness.waits[name], abs=12 * STEP_SECONDS)  # of up to 150 steps


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
