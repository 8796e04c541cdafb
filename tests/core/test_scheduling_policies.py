"""Queue orders and batching strategies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core.harness import CoreHarness


@pytest.mark.parametrize(
    ("order", "expected_order"),
    [("fifo", "abcd"), ("prefill_first", "abcd"), ("priority", "dabc"), ("shortest", "cbad"), ("deadline", "bdac")],
)
def test_queue_orders(order: str, expected_order: str) -> None:
    harness = CoreHarness(scheduling_policy=order, max_batch_size=1, priority_aging_seconds=30.0)
    harness.submit("a", 9, max_tokens=1)
    harness.submit("b", 6, max_tokens=1, deadline=100.0)
    harness.submit("c", 2, max_tokens=1)
    harness.submit("d", 20, max_tokens=1, priority=0, deadline=200.0)
    harness.run()
    assert "".join(harness.started()) == expected_order


def test_fixed_batch_starts_after_timeout() -> None:
    harness = CoreHarness(batching_strategy="fixed_size", max_batch_size=3, fixed_size_timeout_seconds=1.0)
    harness.submit("a", 2)
    assert harness.plan() is None
    assert harness.core.next_deadline() == 1.0
    harness.now = 0.5
    harness.submit("b", 2)
    harness.now = 1.0
    assert len(harness.rows(harness.step())) == 2
    harness.now = 1.5
    harness.submit("late", 2)
    harness.now = 3.0
    harness.step()
    assert harness.started() == ["a", "b"], "no request joins a batch that has started"
    harness.run()
    assert harness.started() == ["a", "b", "late"]


def test_dynamic_timeout_admits_groups() -> None:
    harness = CoreHarness(batching_strategy="dynamic_timeout", max_batch_size=4, batch_timeout_seconds=1.0)
    harness.submit("a", 2, max_tokens=50)
    assert harness.plan() is None
    assert harness.core.next_deadline() == 1.0
    harness.now = 1.0
    assert len(harness.rows(harness.step())) == 1
    harness.submit("b", 2, max_tokens=50)
    harness.submit("c", 2, max_tokens=50)
    assert len(harness.rows(harness.step())) == 1  # three slots are free, two wait
    harness.submit("d", 2, max_tokens=50)
    assert len(harness.rows(harness.step())) == 4


def test_adaptive_keeps_target_and_admits_more_with_longer_queue() -> None:
    # 5 ms a token and a target of 12 ms: two rows, or more with a longer queue.
    harness = CoreHarness(
        batching_strategy="adaptive", max_batch_size=8, target_inter_token_latency_seconds=0.012, worker_num_blocks=256
    )
    harness.seconds_per_token = 0.005
    harness.submit("a", 3, max_tokens=60)
    for number in range(12):
        harness.submit(f"teach{number}", 1 + number % 5, max_tokens=1)
        harness.step()
    while harness.core.num_live > 1:
        harness.step()
    harness.submit("b", 1, max_tokens=60)
    harness.submit("c", 1, max_tokens=60)
    harness.step()
    harness.step()
    assert harness.core.snapshot().num_requests_running == 2
    for number in range(30):
        harness.submit(f"crowd{number}", 1, max_tokens=60)
    harness.step()
    assert harness.core.snapshot().num_requests_running == 8


def test_waiting_requests_get_the_keys_of_their_arrival() -> None:
    """With `priority`, each second of waiting counts as a class, also the seconds before the switch."""
    harness = CoreHarness(max_batch_size=1, priority_aging_seconds=1.0)
    harness.submit("running", 4, 4)
    harness.step()
    for name, priority, second in (("a", 9, 0), ("b", 5, 1), ("c", 5, 2), ("d", 0, 20)):
        harness.now = float(second)
        harness.submit(name, 4, 2, priority=priority)
    harness.core.switch(replace(harness.core.limits, scheduling_policy="priority"), harness.now)
    harness.record([])  # checks the invariants
    harness.run()
    assert harness.started() == ["running", "b", "c", "a", "d"]
