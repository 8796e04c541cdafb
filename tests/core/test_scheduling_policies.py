"""Whose turn it is and when a batch begins: orders, strategies and their timers, in examples to check by hand."""

from __future__ import annotations

import pytest
from core.harness import Rig

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
def test_each_order_serves_in_its_order(order: str, expected_order: str) -> None:
    rig = Rig(order=order, max_batch_size=1, ageing_seconds=30.0)
    rig.submit("a", 9, max_tokens=1)
    rig.submit("b", 6, max_tokens=1, deadline=100.0)
    rig.submit("c", 2, max_tokens=1)
    rig.submit("d", 20, max_tokens=1, priority=0, deadline=200.0)
    rig.run()
    assert "".join(rig.started()) == expected_order


def test_waiting_is_worth_priority() -> None:
    rig = Rig(order="priority", max_batch_size=1, ageing_seconds=1.0)
    rig.submit("patient", 2, max_tokens=1, priority=130)
    rig.now = 3.0
    rig.submit("important", 2, max_tokens=1, priority=128)
    rig.run()
    assert rig.started() == ["patient", "important"]


# --- strategies ------------------------------------------------------------------------------------------------------


def test_continuous_takes_whoever_comes_at_the_next_step() -> None:
    rig = Rig()
    rig.submit("a", 2, max_tokens=9)
    rig.step()
    rig.submit("b", 2, max_tokens=9)
    assert len(rig.rows(rig.step())) == 2


def test_an_idle_engine_waits_for_min_batch_size_or_the_timeout() -> None:
    rig = Rig(min_batch_size=2, batch_timeout_seconds=0.05)
    rig.now = 123456.789
    rig.submit("a", 2)
    assert rig.plan() is None
    assert rig.core.next_deadline() == 123456.789 + 0.05
    rig.now = 123456.789 + 0.05
    assert rig.step() is not None  # at the very moment, whatever the rounding
    assert rig.core.next_deadline() is None
    rig.run()
    rig.submit("b", 2)
    assert rig.plan() is None
    rig.submit("c", 2)
    assert len(rig.rows(rig.step())) == 2


def test_fixed_size_waits_for_a_full_batch_and_lets_nobody_join_it() -> None:
    rig = Rig(strategy="fixed_size", max_batch_size=3)
    for request_id in "ab":
        rig.submit(request_id, 2, max_tokens=2)
    assert rig.step() is None
    rig.submit("c", 2, max_tokens=5)
    rig.submit("d", 2)
    assert len(rig.rows(rig.step())) == 3
    for request_id in "ef":
        rig.submit(request_id, 2)
    while rig.core.num_live > 3:
        rig.step()
    assert rig.started() == ["a", "b", "c"]
    rig.run()
    assert rig.started() == ["a", "b", "c", "d", "e", "f"]


def test_a_fixed_batch_is_admitted_whole_even_if_its_first_members_end_before_the_last_begins() -> None:
    rig = Rig(strategy="fixed_size", max_batch_size=3, target_batch_tokens=4)
    for request_id in "abc":
        rig.submit(request_id, 4, max_tokens=1)
    rig.run()
    assert rig.started() == ["a", "b", "c"]


def test_a_place_left_by_a_cancelled_member_is_not_for_late_comers() -> None:
    rig = Rig(strategy="fixed_size", max_batch_size=3, target_batch_tokens=4)
    for request_id in "abc":
        rig.submit(request_id, 4, max_tokens=3)
    rig.step()
    rig.cancel("b")
    rig.cancel("c")
    rig.now = 1.0
    rig.submit("late", 1)
    while rig.core.num_live > 1:
        rig.step()
    assert rig.started() == ["a"]


def test_a_fixed_batch_begins_when_the_queue_refuses() -> None:
    rig = Rig(strategy="fixed_size", max_batch_size=8, max_queue_size=2)
    rig.submit("a", 2)
    rig.submit("b", 2)
    assert rig.step() is None
    with pytest.raises(QueueFull):
        rig.submit("c", 2)
    assert len(rig.rows(rig.step())) == 2


def test_a_fixed_batch_that_does_not_fill_begins_after_its_timeout_where_one_is_set() -> None:
    rig = Rig(strategy="fixed_size", max_batch_size=3, fixed_size_timeout_seconds=1.0)
    rig.submit("a", 2)
    assert rig.plan() is None
    assert rig.core.next_deadline() == 1.0
    rig.now = 0.5
    rig.submit("b", 2)
    rig.now = 1.0
    assert len(rig.rows(rig.step())) == 2
    rig.now = 1.5
    rig.submit("late", 2)
    rig.now = 3.0
    rig.step()
    assert rig.started() == ["a", "b"], "nobody joins a batch that has begun"
    rig.run()
    assert rig.started() == ["a", "b", "late"]


def test_a_fixed_batch_that_does_not_fill_waits_for_ever_by_default() -> None:
    rig = Rig(strategy="fixed_size", max_batch_size=3)
    rig.submit("a", 2)
    rig.now = 500.0
    assert rig.plan() is None
    assert rig.core.next_deadline() is None


def test_dynamic_timeout_admits_groups() -> None:
    rig = Rig(strategy="dynamic_timeout", max_batch_size=4, batch_timeout_seconds=1.0)
    rig.submit("a", 2, max_tokens=50)
    assert rig.plan() is None
    assert rig.core.next_deadline() == 1.0
    rig.now = 1.0
    assert len(rig.rows(rig.step())) == 1
    rig.submit("b", 2, max_tokens=50)
    rig.submit("c", 2, max_tokens=50)
    assert len(rig.rows(rig.step())) == 1  # three slots are free, two wait
    rig.submit("d", 2, max_tokens=50)
    assert len(rig.rows(rig.step())) == 4


def test_adaptive_admits_what_keeps_the_target_and_more_when_the_queue_grows() -> None:
    # 5 ms a token and a target of 12 ms: two rows, or more as the queue presses.
    rig = Rig(strategy="adaptive", max_batch_size=8, inter_token_target_seconds=0.012, worker_num_blocks=256)
    rig.seconds_per_token = 0.005
    rig.submit("a", 3, max_tokens=60)
    for number in range(12):
        rig.submit(f"teach{number}", 1 + number % 5, max_tokens=1)
        rig.step()
    while rig.core.num_live > 1:
        rig.step()
    rig.submit("b", 1, max_tokens=60)
    rig.submit("c", 1, max_tokens=60)
    rig.step()
    rig.step()
    assert rig.core.snapshot().requests_running == 2
    for number in range(30):
        rig.submit(f"crowd{number}", 1, max_tokens=60)
    rig.step()
    assert rig.core.snapshot().requests_running == 8


# --- timers ----------------------------------------------------------------------------------------------------------


def test_a_full_pipeline_is_not_woken_by_a_timer_that_has_passed() -> None:
    rig = Rig(strategy="dynamic_timeout", max_batch_size=4, batch_timeout_seconds=1.0, pipeline_depth=1)
    for request_id in "abc":
        rig.submit(request_id, 2, max_tokens=9)
    rig.now = 1.0
    assert rig.plan() is not None
    rig.submit("d", 2)
    rig.cancel("a")  # now two slots are free and one waits, until 2.0
    rig.now = 2.5
    assert rig.plan() is None
    assert rig.core.next_deadline() is None
    rig.apply()
    assert len(rig.rows(rig.plan())) == 3
