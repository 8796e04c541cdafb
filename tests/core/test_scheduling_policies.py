"""Queue orders, batching strategies and their timers."""

from __future__ import annotations

import pytest
from core.harness import CoreHarness

from lineclear.errors import QueueFull

# --- orders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "expected_order"),
    [
        ("fifo", "abcd"),
        ("prefill_first", "abcd"),
        ("priority", "dabc"),
        ("shortest", "cbad"),
        ("deadline", "bdac"),
    ],
)
def test_queue_orders(order: str, expected_order: str) -> None:
    harness = CoreHarness(scheduling_policy=order, max_batch_size=1, priority_aging_seconds=30.0)
    harness.submit("a", 9, max_tokens=1)
    harness.submit("b", 6, max_tokens=1, deadline=100.0)
    harness.submit("c", 2, max_tokens=1)
    harness.submit("d", 20, max_tokens=1, priority=0, deadline=200.0)
    harness.run()
    assert "".join(harness.started()) == expected_order


def test_waiting_raises_priority() -> None:
    harness = CoreHarness(scheduling_policy="priority", max_batch_size=1, priority_aging_seconds=1.0)
    harness.submit("patient", 2, max_tokens=1, priority=130)
    harness.now = 3.0
    harness.submit("important", 2, max_tokens=1, priority=128)
    harness.run()
    assert harness.started() == ["patient", "important"]


# --- strategies ------------------------------------------------------------------------------------------------------


def test_continuous_admits_at_the_next_step() -> None:
    harness = CoreHarness()
    harness.submit("a", 2, max_tokens=9)
    harness.step()
    harness.submit("b", 2, max_tokens=9)
    assert len(harness.rows(harness.step())) == 2


def test_idle_engine_waits_for_min_batch_size_or_timeout() -> None:
    harness = CoreHarness(min_batch_size=2, batch_timeout_seconds=0.05)
    harness.now = 123456.789
    harness.submit("a", 2)
    assert harness.plan() is None
    assert harness.core.next_deadline() == 123456.789 + 0.05
    harness.now = 123456.789 + 0.05
    assert harness.step() is not None  # exactly then, in spite of rounding
    assert harness.core.next_deadline() is None
    harness.run()
    harness.submit("b", 2)
    assert harness.plan() is None
    harness.submit("c", 2)
    assert len(harness.rows(harness.step())) == 2


def test_fixed_batch_is_admitted_whole() -> None:
    harness = CoreHarness(batching_strategy="fixed_size", max_batch_size=3, target_batch_tokens=4)
    for request_id in "abc":
        harness.submit(request_id, 4, max_tokens=1)
    harness.run()
    assert harness.started() == ["a", "b", "c"]


def test_cancelled_member_leaves_no_place_in_fixed_batch() -> None:
    harness = CoreHarness(batching_strategy="fixed_size", max_batch_size=3, target_batch_tokens=4)
    for request_id in "abc":
        harness.submit(request_id, 4, max_tokens=3)
    harness.step()
    harness.cancel("b")
    harness.cancel("c")
    harness.now = 1.0
    harness.submit("late", 1)
    while harness.core.num_live > 1:
        harness.step()
    assert harness.started() == ["a"]


def test_fixed_batch_starts_when_queue_rejects() -> None:
    harness = CoreHarness(batching_strategy="fixed_size", max_batch_size=8, max_queue_size=2)
    harness.submit("a", 2)
    harness.submit("b", 2)
    assert harness.step() is None
    with pytest.raises(QueueFull):
        harness.submit("c", 2)
    assert len(harness.rows(harness.step())) == 2


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


def test_fixed_batch_without_timeout_waits() -> None:
    harness = CoreHarness(batching_strategy="fixed_size", max_batch_size=3)
    harness.submit("a", 2)
    harness.now = 500.0
    assert harness.plan() is None
    assert harness.core.next_deadline() is None


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


# --- timers ----------------------------------------------------------------------------------------------------------


def test_full_pipeline_has_no_past_wakeup() -> None:
    harness = CoreHarness(
        batching_strategy="dynamic_timeout", max_batch_size=4, batch_timeout_seconds=1.0, pipeline_depth=1
    )
    for request_id in "abc":
        harness.submit(request_id, 2, max_tokens=9)
    harness.now = 1.0
    assert harness.plan() is not None
    harness.submit("d", 2)
    harness.cancel("a")  # now two slots are free and one waits, until 2.0
    harness.now = 2.5
    assert harness.plan() is None
    assert harness.core.next_deadline() is None
    harness.apply()
    assert len(harness.rows(harness.plan())) == 3
