"""The order of many requests: which is next, which answer is due, how far the one may run ahead of the other, and what
ends them all.

Pure bookkeeping that the threads of a Client and the tasks of an AsyncClient share; it never waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Generic, NamedTuple, TypeVar, cast

from lineclear.errors import LineclearError

from .results import Generation

Item = TypeVar("Item")
Outcome = Generation | LineclearError

# The window of a batch whose answers are all kept anyway: there is no reason to hold back.
ALL_AT_ONCE = 2**62


class Read(NamedTuple, Generic[Item]):
    """An item of the caller's iterable, or the error that ended it."""

    item: Item | None
    error: BaseException | None


class WindowRead(NamedTuple):
    """What the reader of a batch gets at once."""

    due: list[Outcome]
    failure: BaseException | None
    """Raised instead of all that is still to come."""
    is_last: bool


class OrderedWindow(Generic[Item]):
    """Items go out by `take`, outcomes come in by `put` in any order and leave by `turn` in the order of the items.

    At most `window` items are out or waiting for an earlier one. The items are read one by one, as they are taken.
    A request that fails is an outcome like others, or ends the batch if not `return_exceptions`.
    """

    def __init__(self, items: Iterable[Item], window: int, return_exceptions: bool = True) -> None:
        assert window >= 1
        self.total: int | None = len(items) if isinstance(items, Sized) else None
        self.is_in_memory = isinstance(items, (list, tuple))  # reading them waits for nothing
        self.exhausted = False  # no item is left to take
        self.failure: BaseException | None = None  # ends the whole batch
        self.completed = 0
        self.failed = 0
        self.completion_tokens = 0
        self._items: Iterator[Item] = iter(items)
        self._window = window
        self._return_exceptions = return_exceptions
        self._taken = 0
        self._left = 0
        self._reported = -1  # of what is completed, by the last turn
        self._waiting: dict[int, Outcome] = {}

    @property
    def has_no_more(self) -> bool:
        """Nothing will be taken any more, by anybody."""
        return self.exhausted or self.failure is not None

    @property
    def done(self) -> bool:
        """Every outcome has left, and none will follow."""
        return self.failure is not None or (self.exhausted and self._left == self._taken)

    def workers(self, concurrency: int) -> int:
        """How many are of use; one at the least, who finds out that there is nothing."""
        return concurrency if self.total is None else max(1, min(concurrency, self.total))

    @property
    def has_room(self) -> bool:
        """Whether one more item may be taken now."""
        return not self.has_no_more and self._taken - self._left < self._window

    def read(self) -> Read[Item]:
        """Read the next item: one reader at a time, under no lock, because the caller's iterable may take its time."""
        try:
            return Read(next(self._items), None)
        except BaseException as error:
            return Read(None, error)

    def take(self, read: Read[Item]) -> tuple[int, Item] | None:
        """Account for what was read: the item and its index, None where it `has_no_more`."""
        if self.has_no_more:  # it was ended meanwhile
            return None
        if isinstance(read.error, StopIteration):
            self.exhausted = True
            return None
        if read.error is not None:
            self.fail(read.error)  # whoever reads the outcomes gets it
            return None
        self._taken += 1
        return self._taken - 1, cast("Item", read.item)

    def put(self, index: int, outcome: Generation | BaseException) -> None:
        """What became of an item. An error that is no LineclearError, a bug or a wrong argument, ends the batch."""
        assert index not in self._waiting
        assert self._left <= index < self._taken
        if not isinstance(outcome, Outcome):
            self.fail(outcome)
            return
        self._waiting[index] = outcome
        self.completed += 1
        if not isinstance(outcome, LineclearError):
            self.completion_tokens += outcome.usage.completion_tokens
            return
        self.failed += 1
        if not self._return_exceptions:
            self.fail(outcome)

    def fail(self, error: BaseException) -> None:
        """End the batch. The first failure is the one that counts."""
        self.failure = self.failure or error

    def read_outcomes(self) -> WindowRead | None:
        """What is new for the reader; None while nothing is."""
        if not self.done and self.completed == self._reported:
            return None
        self._reported = self.completed
        due = []
        while self._left in self._waiting:
            due.append(self._waiting.pop(self._left))
            self._left += 1
        return WindowRead(due, self.failure, self.done)


def checked_concurrency(concurrency: int, window: int | None) -> int:
    """The window for so many requests at once: wide enough that one slow answer does not idle the others."""
    if concurrency < 1:
        raise ValueError("concurrency must be at least 1")
    if window is not None and window < concurrency:
        raise ValueError("window must be at least concurrency")
    return window or max(256, 8 * concurrency)
