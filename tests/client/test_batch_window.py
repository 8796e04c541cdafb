"""The bookkeeping of a batch: order, window, ends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lineclear.client.batch_window import BatchWindow, Outcome, checked_window, default_concurrency
from lineclear.client.message_classes import Model
from lineclear.client.results import from_proto
from lineclear.errors import InternalError
from lineclear.v1 import inference_pb2 as pb


def outcome(index: int) -> Outcome:
    return InternalError(str(index))


def take(batch: BatchWindow[Any]) -> tuple[int, Any] | None:
    return batch.take(batch.read()) if batch.has_room else None


def due(batch: BatchWindow[Any]) -> list[str]:
    turn = batch.read_outcomes()
    return [] if turn is None else [str(error) for _, error in turn.due]


def test_items_are_read_no_further_than_the_window() -> None:
    read = []
    batch = BatchWindow((read.append(n) or n for n in range(10)), window=2)  # type: ignore[func-returns-value]
    assert batch.total is None
    assert [take(batch), take(batch), take(batch)] == [(0, 0), (1, 1), None]
    batch.put(1, outcome(1))
    assert take(batch) is None  # 1 still waits for 0
    batch.put(0, outcome(0))
    due(batch)
    assert take(batch) == (2, 2)
    assert read == [0, 1, 2]


def test_bug_ends_the_batch_and_failure_is_an_outcome() -> None:
    for return_exceptions, error, ends in (
        (True, outcome(0), False), (False, outcome(0), True), (True, KeyError(0), True), (False, KeyError(0), True),
    ):  # fmt: skip
        batch = BatchWindow("abc", 3, return_exceptions)
        take(batch)
        batch.put(0, error)
        turn = batch.read_outcomes()
        assert turn is not None
        assert (turn.failure, turn.is_last, take(batch) is None) == (error if ends else None, ends, ends)


def test_first_failure_counts() -> None:
    batch = BatchWindow("ab", 2, return_exceptions=False)
    for _ in "ab":
        take(batch)
    first = outcome(1)
    batch.put(1, first)
    batch.put(0, outcome(0))
    turn = batch.read_outcomes()
    assert turn is not None
    assert turn.failure is first


def test_read_outcomes_is_none_without_news() -> None:
    batch = BatchWindow("a", 1)
    assert batch.read_outcomes() == ([], None, False)  # nothing is complete: reported once
    assert batch.read_outcomes() is None
    take(batch)
    assert batch.read_outcomes() is None
    done = outcome(0)
    batch.put(0, done)
    assert batch.read_outcomes() == ([(0, done)], None, False)  # the end of the items is not known yet
    assert batch.read_outcomes() is None
    take(batch)
    assert batch.read_outcomes() == ([], None, True)


def test_number_of_workers() -> None:
    assert [BatchWindow(items, 9).workers(4) for items in ("", "ab", "abcdef", iter(""))] == [1, 2, 4, 4]
    assert BatchWindow(iter(""), 3).workers(4) == 3


@pytest.mark.parametrize(
    ("slots", "of_workers", "concurrency"),
    [(1, 0, 1), (8, 8, 8), (8, 24, 24), (4096, 4096, 256), (0, 0, 32)],
)
def test_default_concurrency_is_the_number_of_slots(slots: int, of_workers: int, concurrency: int) -> None:
    limits = pb.Limits(max_batch_size=slots, num_slots=of_workers)
    assert default_concurrency(from_proto(Model, pb.GetModelResponse(limits=limits))) == concurrency


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("in_order", [True, False])
def test_random_completion_is_read_once(seed: int, in_order: bool) -> None:
    dice = random.Random(seed)
    count, window = dice.randrange(40), dice.randrange(1, 8)
    batch, out, running = BatchWindow(range(count), window, in_order=in_order), [], []
    turns = iter(range(10_000))
    while not batch.done:
        assert next(turns, None) is not None, "the batch never ends"
        if running and dice.random() < 0.5:
            batch.put(index := running.pop(dice.randrange(len(running))), outcome(index))
        elif (taken := take(batch)) is not None:
            running.append(taken[0])
        assert len(running) <= window
        out += due(batch)
    assert (out if in_order else sorted(out, key=int)) == [str(n) for n in range(count)]
    assert (batch.total, batch.completed, batch.failed) == (count, count, count)


def test_a_window_is_at_least_as_wide_as_the_concurrency() -> None:
    assert checked_window(4, None) >= 32
    assert checked_window(4, 4) == 4
    assert checked_window(None, 3) == 3
    for wrong in ((0, None), (4, 3), (None, 0)):
        with pytest.raises(ValueError, match="at least"):
            checked_window(*wrong)
