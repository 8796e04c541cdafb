"""Passes over the waiting requests in order, while some of them start."""

from __future__ import annotations

from collections import deque

from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.sequence import Sequence


class QueueWalk:
    """Returns each sequence of two queues once, by queue key.

    The caller may remove sequences that it got. It adds none.
    """

    def __init__(self, resuming: RequestQueue, fresh: RequestQueue) -> None:
        self._resuming, self._fresh = _Cursor(resuming), _Cursor(fresh)

    def next(self, *, with_fresh: bool) -> Sequence | None:
        """Return the next sequence, of both queues or only of those that have started; None at the end."""
        cursors = (self._resuming, self._fresh) if with_fresh else (self._resuming,)
        heads = [(head.queue_key, cursor) for cursor in cursors if (head := cursor.head()) is not None]
        return min(heads, key=lambda entry: entry[0])[1].pop() if heads else None


class _Cursor:
    """A place in a queue."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._ahead: deque[Sequence] = deque()
        self._count = 1  # sequences to look at next, from the head of the queue
        self._at_end = False
        self._last_key = (float("-inf"), 0)

    def head(self) -> Sequence | None:
        while not self._ahead and not self._at_end:
            found = self._queue.first(self._count)
            self._at_end = len(found) < self._count
            self._ahead.extend(s for s in found if s.queue_key > self._last_key)
            self._count *= 2
        return self._ahead[0] if self._ahead else None

    def pop(self) -> Sequence:
        sequence = self._ahead.popleft()
        self._last_key = sequence.queue_key
        return sequence
