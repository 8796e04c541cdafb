"""The queue of waiting requests, ordered by queue key. Every operation takes O(log n)."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from lineclear.scheduler.core.sequence import Sequence


class RequestQueue:
    """Sequences by `queue_key`. Removal is lazy: a heap entry of a removed sequence is dropped when it reaches the top,
    or when more than half of the entries are such.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], int, Sequence]] = []
        self._num_pushes = 0  # breaks ties between a live and a dropped entry of the same sequence
        self._live: OrderedDict[str, Sequence] = OrderedDict()  # by arrival in this queue
        self.num_tokens = 0  # prompt and confirmed output of all of them

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._live.get(sequence.request.request_id) is sequence

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at the place of its unique queue key."""
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
        """Count a token that a waiting sequence received: a sample in flight when the sequence was preempted."""
        assert sequence in self
        self.num_tokens += 1

    def head(self) -> Sequence | None:
        """Return the next sequence, or None if the queue is empty."""
        while self._heap and self._heap[0][2] not in self:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def first(self, count: int) -> list[Sequence]:
        """Return the first `count` sequences in order."""
        found: list[Sequence] = []
        while len(found) < count and (sequence := self.head()) is not None:
            heapq.heappop(self._heap)
            if not found or found[-1] is not sequence:  # a dropped entry of an earlier stay may repeat the key
                found.append(sequence)
        for sequence in found:
            self._insert(sequence)
        return found

    def oldest(self) -> Sequence | None:
        """Return the sequence that has been in this queue longest."""
        return next(iter(self._live.values()), None)

    def sequences(self) -> list[Sequence]:
        """Return all sequences by arrival in this queue."""
        return list(self._live.values())

    def dump(self) -> list[int]:
        """Return the sequences' numbers by arrival in this queue."""
        return [s.number for s in self._live.values()]

    def load(self, state: Iterable[int], sequences: Mapping[int, Sequence]) -> None:
        """Restore a dump into a new queue."""
        for number in state:
            self.push(sequences[number])

    def _insert(self, sequence: Sequence) -> None:
        self._num_pushes += 1
        heapq.heappush(self._heap, (sequence.queue_key, self._num_pushes, sequence))
