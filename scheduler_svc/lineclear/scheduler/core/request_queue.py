"""The queue of waiting requests, ordered by queue key. Every operation takes O(log n), but for short copies of keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from lineclear.scheduler.core.sequence import Sequence
from lineclear.scheduler.core.sorted_keys import SortedKeys


class RequestQueue:
    """Sequences by `queue_key`."""

    def __init__(self) -> None:
        self._keys = SortedKeys()
        self._live: dict[int, Sequence] = {}  # by number; in the order of arrival in this queue
        self.num_tokens = 0  # prompt and confirmed output of all of them
        self.expected_len = 0  # expected prompt and output tokens of all of them
        self.num_siblings = self.sibling_tokens = 0  # of those that take no place
        self.num_without_output = 0  # scores and embeddings
        self.longest = 0  # the largest max_len since the queue was empty

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_places(self) -> int:
        """Number of sequences that count against `max_queue_size`."""
        return len(self._live) - self.num_siblings

    @property
    def num_with_output(self) -> int:
        """Number of sequences that wait for a first token."""
        return len(self._live) - self.num_without_output

    @property
    def place_tokens(self) -> int:
        """Tokens that count against `max_queue_tokens`."""
        return self.num_tokens - self.sibling_tokens

    def __contains__(self, sequence: Sequence) -> bool:
        return self._live.get(sequence.number) is sequence

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in order. The queue must not change meanwhile."""
        return (self._live[number] for _, number in self._keys)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at the place of its unique queue key."""
        assert sequence.number not in self._live
        self._live[sequence.number] = sequence
        self.longest = max(self.longest, sequence.max_len)
        self.num_tokens += len(sequence.tokens)
        self.expected_len += sequence.request.expected_len
        self.num_without_output += not sequence.request.max_tokens
        if sequence.request.is_sibling:
            self.num_siblings += 1
            self.sibling_tokens += len(sequence.tokens)
        self._keys.add(sequence.queue_key)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands. Its tokens must be those it was pushed with."""
        del self._live[sequence.number]
        self.num_tokens -= len(sequence.tokens)
        self.expected_len -= sequence.request.expected_len
        self.num_without_output -= not sequence.request.max_tokens
        if sequence.request.is_sibling:
            self.num_siblings -= 1
            self.sibling_tokens -= len(sequence.tokens)
        self._keys.remove(sequence.queue_key)
        if not self._live:
            self.longest = 0

    def sort(self) -> None:
        """Restore the order after the keys of sequences have changed."""
        self._keys = SortedKeys()
        for sequence in self._live.values():
            self._keys.add(sequence.queue_key)

    def grow(self, sequence: Sequence) -> None:
        """Count a token that a waiting sequence received: a sample in flight when the sequence was preempted."""
        assert sequence in self
        self.num_tokens += 1
        self.sibling_tokens += sequence.request.is_sibling

    def first(self, count: int) -> list[Sequence]:
        """Return the first `count` sequences in order."""
        return list(islice(self, count))

    def num_before(self, key: tuple[float, int]) -> int:
        """Return the number of sequences with a lower key."""
        return self._keys.rank(key)

    def oldest(self) -> Sequence | None:
        """Return the sequence that has been in this queue longest."""
        return next(iter(self._live.values()), None)

    def sequences(self) -> list[Sequence]:
        """Return all sequences by arrival in this queue."""
        return list(self._live.values())
