"""Deadlines in the queue: requests that cannot start in time are rejected, others not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from core.harness import CoreHarness, make_request
from core.test_wait_prediction import trained

from lineclear.errors import DeadlineUnreachable
from lineclear.scheduler.core.events import Admitted, Event, QueuePosition, Started
from lineclear.scheduler.core.limits import check_deadline
from lineclear.scheduler.core.policies import QUEUE_ORDERS

STEP_SECONDS = 0.05
MEAN_TOKENS = 20
NUM_SLOTS = 8


class Queue(CoreHarness):
    """Slots whose answers take a second on average, and only that average is expected.

    Every request is admitted, and counted where it would be rejected, so that wrong rejections are visible. There are
    just enough blocks for answers of 200 tokens in all slots.
    """

    def __init__(self, seed: int, **sizes: Any) -> None:
        super().__init__(
            **{"max_batch_size": NUM_SLOTS, "worker_num_blocks": 52 * NUM_SLOTS, "max_queue_size": 100_000} | sizes
        )
        self.rng = random.Random(seed)
        self.waiting: dict[str, float] = {}  # deadline of each
        self.rejected: set[str] = set()
        self.late: set[str] = set()
        self.count = 0

    def run_load(self, load: float, arrivals: int) -> None:
        """Serve requests, single and in bursts, at `load` times what the slots can do."""
        until = self.count + arrivals
        next_at = self.now
        while self.count < until:
            while next_at <= self.now:
                burst = self.rng.choice((1, 1, 1, 1, self.rng.randint(2, 16)))
                for _ in range(burst):
                    self._arrive(self.rng.uniform(0.05, 4.0))
                next_at += self.rng.expovariate(load * NUM_SLOTS) * burst
            self._tick()

    def record(self, events: list[Event]) -> list[Event]:
        """Store the events without a check of the core, which would take most of the time."""
        self.events += events
        return events

    def _arrive(self, timeout: float) -> None:
        name, self.count = f"r{self.count}", self.count + 1
        length = max(1, min(200, round(MEAN_TOKENS * self.rng.lognormvariate(-0.32, 0.8))))
        request = make_request(name, 4, length, expected_tokens=MEAN_TOKENS, wants_position=True)
        (event,) = self.core.submit(request, self.now)
        assert isinstance(event, Admitted)
        self.waiting[name] = self.now + timeout
        if event.position is not None and would_reject(timeout, event.position, self.now):
            self.rejected.add(name)

    def _tick(self) -> None:
        self.events.clear()
        self.plan()
        for event in self.events:
            if isinstance(event, Started) and self.waiting.pop(event.request_id) < self.now:
                self.late.add(event.request_id)
        self.plans.clear()
        self.now += STEP_SECONDS
        if self.flights:
            self.apply()


def would_reject(timeout: float, place: QueuePosition, now: float) -> bool:
    try:
        check_deadline(make_request("x", 1, deadline=now + timeout), place, NUM_SLOTS, now)
    except DeadlineUnreachable:
        return True
    return False


@pytest.mark.parametrize("seed", range(3))
def test_no_wrong_rejection_at_half_load(seed: int) -> None:
    queue = Queue(seed)
    queue.run_load(0.5, 1500)
    assert queue.rejected - queue.late - set(queue.waiting) == set()


@pytest.mark.parametrize("seed", range(3))
def test_overload_rejects_most_late_requests(seed: int) -> None:
    queue = Queue(seed)
    queue.run_load(0.5, 300)
    queue.run_load(2.0, 1500)
    started = queue.rejected - set(queue.waiting)
    assert started - queue.late == set()
    assert len(queue.late) > 400
    assert len(started & queue.late) > 0.8 * len(queue.late)


@pytest.mark.parametrize("order", sorted(QUEUE_ORDERS))
def test_deadline_within_a_third_of_the_wait_is_rejected(order: str) -> None:
    harness = trained(max_batch_size=1, scheduling_policy=order, reject_unmeetable_deadlines=True)
    harness.submit("running", 4, max_tokens=90, priority=0, deadline=harness.now + 9.0, tenant="a")
    harness.tick()
    harness.submit("waiting", 4, max_tokens=100, priority=0, deadline=harness.now + 2.9, tenant="b", expected_tokens=4)
    before = harness.core.snapshot(harness.now).counters
    with pytest.raises(DeadlineUnreachable) as caught:
        harness.submit("late", 4, deadline=harness.now + 3.0, tenant="b", priority=0 if order != "priority" else 9)
    assert caught.value.metadata["requests_ahead"] == "1"
    assert float(caught.value.metadata["least_wait_seconds"]) == pytest.approx(9.5 / 3, rel=0.1)
    after = harness.core.snapshot(harness.now).counters
    assert after.requests_rejected == before.requests_rejected + 1
    assert after.requests_admitted == before.requests_admitted
    harness.submit("in time", 4, deadline=harness.now + 5.0, tenant="b", priority=9)
    harness.submit("without", 4, tenant="b")
    assert harness.core.num_live == 4


def test_no_rejection_before_the_pace_is_known() -> None:
    harness = CoreHarness(max_batch_size=1, reject_unmeetable_deadlines=True)
    for number in range(9):
        harness.submit(f"r{number}", 4, max_tokens=100, deadline=0.001)
    assert harness.core.num_live == 9
