"""The bookkeeping of a batch: order, window, ends."""

from __future__ import annotations

import random

import pytest

from lineclear.client.many import Batch, Outcome, checked_concurrency
from lineclear.errors import InternalError


def outcome(index: int) -> Outcome:
    return InternalError(str(index))


def test_outcomes_leave_in_the_order_of_the_items() -> None:
    batch = Batch("abc", window=3)
    assert [batch.take() for _ in range(3)] == [(0, "a"), (1, "b"), (2, "c")]
    batch.put(1, outcome(1))
    assert batch.ready() == []
    batch.put(0, outcome(0))
    assert [str(error) for error in batch.ready()] == ["0", "1"]
    assert not batch.done
    batch.put(2, outcome(2))
    assert [str(error) for error in batch.ready()] == ["2"]
    assert batch.take() is None
    assert batch.done
    assert (batch.total, batch.completed, batch.failed) == (3, 3, 3)


def test_items_are_read_no_further_than_the_window() -> None:
    read = []
    batch = Batch((read.append(n) or n for n in range(10)), window=2)  # type: ignore[func-returns-value]
    assert batch.total is None
    assert [batch.take(), batch.take(), batch.take()] == [(0, 0), (1, 1), None]
    batch.put(1, outcome(1))
    assert batch.take() is None  # 1 still waits for 0
    batch.put(0, outcome(0))
    batch.ready()
    assert batch.take() == (2, 2)
    assert read == [0, 1, 2]


def test_a_source_that_breaks_ends_the_batch_with_its_error() -> None:
    batch = Batch((1 / n for n in (1, 0)), window=5)
    batch.take()
    assert batch.take() is None
    assert isinstance(batch.failure, ZeroDivisionError)
    assert batch.done


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_completion_comes_out_in_order(seed: int) -> None:
    dice = random.Random(seed)
    count, window = dice.randrange(40), dice.randrange(1, 8)
    batch, out, running = Batch(range(count), window), [], []
    while not batch.done:
        if running and dice.random() < 0.5:
            batch.put(index := running.pop(dice.randrange(len(running))), outcome(index))
        elif (taken := batch.take()) is not None:
            running.append(taken[0])
        assert len(running) <= window
        out += [str(error) for error in batch.ready()]
    assert out == [str(n) for n in range(count)]


def test_a_window_is_at_least_as_wide_as_the_concurrency() -> None:
    assert checked_concurrency(4, None) >= 32
    assert checked_concurrency(4, 4) == 4
    for wrong in ((0, None), (4, 3)):
        with pytest.raises(ValueError, match="at least"):
            checked_concurrency(*wrong)
