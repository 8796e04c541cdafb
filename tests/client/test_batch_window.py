"""The bookkeeping of a batch: order, window, ends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lineclear.client.batch_window import OrderedWindow, Outcome, checked_concurrency
from lineclear.errors import InternalError


def outcome(index: int) -> Outcome:
    return InternalError(str(index))


def take(batch: OrderedWindow[Any]) -> tuple[int, Any] | None:
    return batch.take(batch.read()) if batch.has_room else None


def due(batch: OrderedWindow[Any]) -> list[str]:
    turn = batch.read_outcomes()
    return [] if turn is None else [str(error) for error in turn.due]


def test_outcomes_are_read_in_the_order_of_the_items() -> None:
    batch = OrderedWindow("abc", window=3)
    assert [take(batch) for _ in range(3)] == [(0, "a"), (1, "b"), (2, "c")]
    batch.put(1, outcome(1))
    assert due(batch) == []
    batch.put(0, outcome(0))
    assert due(batch) == ["0", "1"]
    assert not batch.done
    batch.put(2, outcome(2))
    assert due(batch) == ["2"]
    assert take(batch) is None
    assert batch.done
    assert (batch.total, batch.completed, batch.failed) == (3, 3, 3)


def test_items_are_read_no_further_than_the_window() -> None:
    read = []
    batch = OrderedWindow((read.append(n) or n for n in range(10)), window=2)  # type: ignore[func-returns-value]
    assert batch.total is None
    assert [take(batch), take(batch), take(batch)] == [(0, 0), (1, 1), None]
    batch.put(1, outcome(1))
    assert take(batch) is None  # 1 still waits for 0
    batch.put(0, outcome(0))
    due(batch)
    assert take(batch) == (2, 2)
    assert read == [0, 1, 2]


def test_error_of_the_items_ends_the_batch() -> None:
    batch = OrderedWindow((1 / n for n in (1, 0)), window=5)
    take(batch)
    assert take(batch) is None
    assert isinstance(batch.failure, ZeroDivisionError)
    assert batch.done


def test_bug_ends_the_batch_and_failure_is_an_outcome() -> None:
    for return_exceptions, error, ends in (
        (True, outcome(0), False), (False, outcome(0), True), (True, KeyError(0), True), (False, KeyError(0), True),
    ):  # fmt: skip
        batch = OrderedWindow("abc", 3, return_exceptions)
        take(batch)
        batch.put(0, error)
        turn = batch.read_outcomes()
        assert turn is not None
        assert (turn.failure, turn.is_last, take(batch) is None) == (error if ends else None, ends, ends)


def test_first_failure_counts() -> None:
    batch = OrderedWindow("ab", 2, return_exceptions=False)
    for _ in "ab":
        take(batch)
    first = outcome(1)
    batch.put(1, first)
    batch.put(0, outcome(0))
    turn = batch.read_outcomes()
    assert turn is not None
    assert turn.failure is first


def test_read_outcomes_is_none_without_news() -> None:
    batch = OrderedWindow("a", 1)
    assert batch.read_outcomes() == ([], None, False)  # nothing is complete: reported once
    assert batch.read_outcomes() is None
    take(batch)
    assert batch.read_outcomes() is None
    done = outcome(0)
    batch.put(0, done)
    assert batch.read_outcomes() == ([done], None, False)  # the end of the items is not known yet
    assert batch.read_outcomes() is None
    take(batch)
    assert batch.read_outcomes() == ([], None, True)


def test_number_of_workers() -> None:
    assert [OrderedWindow(items, 1).workers(4) for items in ("", "ab", "abcdef", iter(""))] == [1, 2, 4, 4]


@pytest.mark.parametrize("seed", range(20))
def test_random_completion_is_read_in_order(seed: int) -> None:
    dice = random.Random(seed)
    count, window = dice.randrange(40), dice.randrange(1, 8)
    batch, out, running = OrderedWindow(range(count), window), [], []
    while not batch.done:
        if running and dice.random() < 0.5:
            batch.put(index := running.pop(dice.randrange(len(running))), outcome(index))
        elif (taken := take(batch)) is not None:
            running.append(taken[0])
        assert len(running) <= window
        out += due(batch)
    assert out == [str(n) for n in range(count)]


def test_a_window_is_at_least_as_wide_as_the_concurrency() -> None:
    assert checked_concurrency(4, None) >= 32
    assert checked_concurrency(4, 4) == 4
    for wrong in ((0, None), (4, 3)):
        with pytest.raises(ValueError, match="at least"):
            checked_concurrency(*wrong)
