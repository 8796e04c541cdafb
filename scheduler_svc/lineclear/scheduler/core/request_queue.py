"""Requests that wait, in the order they will be served. Every operation is O(log n), whatever the length."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from lineclear.scheduler.core.sequence import Sequence


class RequestQueue:
    """Sequences by rank. Removal is lazy: the heap forgets an entry when it comes to its top or when half are gone."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self._pushes = 0  # breaks the tie between a live entry and a forgotten one of the same sequence
        self._live: OrderedDict[str, Sequence] = OrderedDict()  # by arrival in this queue
        self.num_tokens = 0  # prompt and confirmed output of all of them

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._live.get(sequence.request.request_id) is sequence

    def push(self, sequence: Sequence) -> None:
        """Add a sequence; ranks are unique, so its place is determined."""
        assert sequence.request.request_id not in self._live
        self._live[sequence.request.request_id] = sequence
        self.num_tokens += len(sequence.tokens)
        self._insert(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands. Its tokens must be those it was pushed with."""
        del self._live[sequence.request.request_id]
        self.num_tokens -= len(sequence.tokens)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [(s.queue_key, i, s) for i, s in enumerate(self._live.values())]
            heapq.heapify(self._heap)

    def grow(self, sequence: Sequence) -> None:
        """A waiting sequence got one token more: a sample that was in flight when it was preempted."""
        assert sequence in self
        self.num_tokens += 1

    def head(self) -> Sequence | None:
        """Who is next."""
        while self._heap and self._heap[0][2] not in self:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def first(self, count: int) -> list[Sequence]:
        """The first `count` in order."""
        found: list[Sequence] = []
        while len(found) < count and (sequence := self.head()) is not None:
            heapq.heappop(self._heap)
            if not found or found[-1] is not sequence:  # an entry left by an earlier stay may repeat the rank
                found.append(sequence)
        for sequence in found:
            self._insert(sequence)
        return found

    def oldest(self) -> Sequence | None:
        """Who has been in this queue longest."""
        return next(iter(self._live.values()), None)

    def sequences(self) -> list[Sequence]:
        """All of them, by arrival in this queue."""
        return list(self._live.values())

    def _insert(self, sequence: Sequence) -> None:
        self._pushes += 1
        heapq.heappush(self._heap, (sequence.queue_key, self._pushes, sequence))
