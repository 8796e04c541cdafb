"""The order of many requests: which is next, which answer is due, and how far the one may run ahead of the other.

Pure bookkeeping that the threads of a Client and the tasks of an AsyncClient share; it never waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Generic, TypeVar

from lineclear.errors import LineclearError

from .results import Generation

Item = TypeVar("Item")
Outcome = Generation | LineclearError


class Batch(Generic[Item]):
    """Items go out by `take`, outcomes come in by `put` in any order and leave by `ready` in the order of the items.

    At most `window` items are out or waiting for an earlier one. The items are read one by one, as they are taken.
    """

    def __init__(self, items: Iterable[Item], window: int) -> None:
        assert window >= 1
        self.total: int | None = len(items) if isinstance(items, Sized) else None
        self.exhausted = False  # no item is left to take
        self.failure: BaseException | None = None  # ends the whole batch
        self.completed = 0
        self.failed = 0
        self.completion_tokens = 0
        self._items: Iterator[Item] = iter(items)
        self._window = window
        self._taken = 0
        self._left = 0
        self._waiting: dict[int, Outcome] = {}

    @property
    def done(self) -> bool:
        """Every outcome has left, and none will follow."""
        return self.failure is not None or (self.exhausted and self._left == self._taken)

    def take(self) -> tuple[int, Item] | None:
        """The next item and its index; None while the window is full, and when `exhausted` or failed."""
        if self.exhausted or self.failure is not None or self._taken - self._left >= self._window:
            return None
        try:
            item = next(self._items)
        except StopIteration:
            self.exhausted = True
            return None
        except Exception as error:
            self.fail(error)  # whoever reads the outcomes gets it
            return None
        self._taken += 1
        return self._taken - 1, item

    def put(self, index: int, outcome: Outcome) -> None:
        assert index not in self._waiting
        assert self._left <= index < self._taken
        self._waiting[index] = outcome
        self.completed += 1
        if isinstance(outcome, LineclearError):
            self.failed += 1
        else:
            self.completion_tokens += outcome.usage.completion_tokens

    def fail(self, error: BaseException) -> None:
        """End the batch. The first failure is the one that counts."""
        self.failure = self.failure or error

    def ready(self) -> list[Outcome]:
        """The outcomes that are due."""
        due = []
        while self._left in self._waiting:
            due.append(self._waiting.pop(self._left))
            self._left += 1
        return due


def checked_concurrency(concurrency: int, window: int | None) -> int:
    """The window for so many requests at once: wide enough that one slow answer does not idle the others."""
    if concurrency < 1:
        raise ValueError("concurrency must be at least 1")
    if window is not None and window < concurrency:
        raise ValueError("window must be at least concurrency")
    return window or max(256, 8 * concurrency)
