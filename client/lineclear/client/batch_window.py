"""The window of a batch: its requests start and finish in any order.

Their outcomes leave in the order of the items, or as they finish.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sized
from typing import Any, Generic, NamedTuple, TypeVar, cast

from lineclear.errors import LineclearError

from .call_params import Params
from .message_classes import Model
from .message_fields import whole
from .progress import Progress
from .prompt_calls import ScoreParams, Scores
from .results import Generation

Item = TypeVar("Item")
Items = Iterable[Item]
AsyncItems = Iterable[Item] | AsyncIterable[Item]
"""A source of items for a batch of an AsyncClient."""
Outcome = Generation | LineclearError
ScoreOutcome = Scores | LineclearError

ALL_AT_ONCE = 2**62
"""The window of a batch that returns all answers together."""

DEFAULT_CONCURRENCY = 32
"""Requests of a batch at a time if the number of slots of the server is unknown."""
_MOST_SLOTS = 256
"""More requests at a time than this only if the caller says so."""


class BatchParams(Params, total=False):
    """The keyword arguments of a batch: its own, and those of each call."""

    concurrency: int | None
    progress: Progress


class WindowParams(BatchParams, total=False):
    """The keyword arguments of a batch whose answers are read one by one."""

    window: int | None


class ScoreBatchParams(ScoreParams, total=False):
    """The keyword arguments of `score_batch`: those of a batch, and of `score`."""

    top_logprobs: int | None
    concurrency: int | None
    progress: Progress


class Read(NamedTuple, Generic[Item]):
    """An item of the caller's iterable, or the error that ended it."""

    item: Item | None
    error: BaseException | None


class WindowRead(NamedTuple):
    """The outcomes that are ready for the reader."""

    due: list[tuple[int, Outcome | Scores]]
    """Each with the index of its item."""
    failure: BaseException | None
    """The error that ended the batch."""
    is_last: bool


class BatchWindow(Generic[Item]):
    """Items are taken with `take`, outcomes added with `put` in any order and read with `read_outcomes`.

    At most `window` items are running or wait to be read. Items are read one by one, as needed. A failed request is an
    outcome; with `return_exceptions` False it ends the batch. With `in_order` an outcome waits for those of earlier
    items. Not safe for threads by itself.
    """

    def __init__(
        self, items: AsyncItems[Item], window: int, return_exceptions: bool = True, in_order: bool = True
    ) -> None:
        assert window >= 1
        self.total: int | None = len(items) if isinstance(items, Sized) else None
        self.is_in_memory = isinstance(items, (list, tuple))  # reading them never blocks
        self.exhausted = False  # every item is taken
        self.failure: BaseException | None = None  # ends the whole batch
        self.completed = 0
        self.failed = 0
        self.tokens = 0  # generated, or scored with their prompts
        self._items: Iterator[Item] | AsyncIterator[Item]
        if isinstance(items, AsyncIterable) and not isinstance(items, Iterable):
            self._items = aiter(items)
        else:
            self._items = iter(items)
        self._window = window
        self._return_exceptions = return_exceptions
        self._in_order = in_order
        self._taken = 0
        self._num_read = 0
        self._reported = -1  # `completed` at the last read_outcomes
        self._waiting: dict[int, Outcome | Scores] = {}

    @property
    def has_no_more(self) -> bool:
        """Whether `take` returns no further item."""
        return self.exhausted or self.failure is not None

    @property
    def done(self) -> bool:
        """Whether the batch has failed or every outcome has been read."""
        return self.failure is not None or (self.exhausted and self._num_read == self._taken)

    def workers(self, concurrency: int) -> int:
        """Return the number of workers: `concurrency`, or fewer for fewer items or a small window, and at least one."""
        concurrency = min(concurrency, self._window)
        return concurrency if self.total is None else max(1, min(concurrency, self.total))

    @property
    def has_room(self) -> bool:
        """Whether the window has room for one more item."""
        return not self.has_no_more and self._taken - self._num_read < self._window

    def read(self) -> Read[Item]:
        """Read the next item. It may block in the caller's iterable: one worker at a time, and without a lock."""
        try:
            return Read(next(cast("Iterator[Item]", self._items)), None)
        except BaseException as error:
            return Read(None, error)

    @property
    def async_read(self) -> Callable[[], Any]:
        """`read`, or a coroutine function that does the same with an asynchronous iterable."""
        return self._read_async if isinstance(self._items, AsyncIterator) else self.read

    async def _read_async(self) -> Read[Item]:
        try:
            return Read(await anext(cast("AsyncIterator[Item]", self._items)), None)
        except BaseException as error:
            return Read(None, error)

    def take(self, read: Read[Item]) -> tuple[int, Item] | None:
        """Return the item that was read and its index, None at the end of the batch."""
        if self.has_no_more:  # the batch failed during the read
            return None
        if isinstance(read.error, StopIteration | StopAsyncIteration):
            self.exhausted = True
            return None
        if read.error is not None:
            self.fail(read.error)  # raised to the reader of the outcomes
            return None
        self._taken += 1
        return self._taken - 1, cast("Item", read.item)

    def put(self, index: int, outcome: Generation | Scores | BaseException) -> None:
        """Add the outcome of an item. An error other than a LineclearError, such as a bug, ends the batch."""
        assert index not in self._waiting
        assert index < self._taken
        if not isinstance(outcome, Outcome | Scores):
            self.fail(outcome)
            return
        self._waiting[index] = outcome
        self.completed += 1
        if not isinstance(outcome, LineclearError):
            self.tokens += outcome.prompt_tokens if isinstance(outcome, Scores) else outcome.usage.completion_tokens
            return
        self.failed += 1
        if not self._return_exceptions:
            self.fail(outcome)

    def fail(self, error: BaseException) -> None:
        """End the batch with `error`, unless it has failed before."""
        self.failure = self.failure or error

    def read_outcomes(self) -> WindowRead | None:
        """Return the outcomes that are ready, None if nothing has changed."""
        if not self.done and self.completed == self._reported:
            return None
        self._reported = self.completed
        due = self._due()
        self._num_read += len(due)
        return WindowRead(due, self.failure, self.done)

    def _due(self) -> list[tuple[int, Outcome | Scores]]:
        if not self._in_order:
            due, self._waiting = list(self._waiting.items()), {}
            return due
        ready = itertools.takewhile(self._waiting.__contains__, itertools.count(self._num_read))
        return [(index, self._waiting.pop(index)) for index in ready]


def checked_window(concurrency: int | None, window: int | None) -> int:
    """Return the size of the window, by default large enough that one slow answer does not idle the other workers.

    Raises ValueError if `concurrency` is below 1 or above `window`.
    """
    if concurrency is not None:
        whole("concurrency", concurrency, 1)
    if window is not None and whole("window", window, 1) < (concurrency or 1):
        raise ValueError(f"window is {window}; give at least concurrency, which is {concurrency}")
    return window or max(256, 8 * (concurrency or _MOST_SLOTS))


def default_concurrency(model: Model) -> int:
    """Return the number of slots of all workers, so that batches are full and the queue is left to others."""
    slots = model.limits.num_slots or model.limits.max_batch_size
    return min(slots, _MOST_SLOTS) or DEFAULT_CONCURRENCY
