"""The queue of waiting requests, ordered by queue key, and passes over it.

Every operation takes O(log n), but for short copies of keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from lineclear.scheduler.core.sequence import Sequence

Key = tuple[float, int]

_MAX_LENGTH = 1024  # of one list; a longer one is halved


class SortedKeys:
    """Unique keys, lowest first, in lists of bounded length: insertion, removal and the rank of a key stay cheap.

    The structure of sortedcontainers' SortedList: a list of sorted lists, and the largest key of each.
    """

    def __init__(self) -> None:
        self._lists: list[list[Key]] = []
        self._largest: list[Key] = []

    def __len__(self) -> int:
        return sum(map(len, self._lists))

    def __iter__(self) -> Iterator[Key]:
        for keys in self._lists:
            yield from keys

    def add(self, key: Key) -> None:
        if not self._lists:
            self._lists, self._largest = [[key]], [key]
            return
        index = min(bisect_left(self._largest, key), len(self._lists) - 1)
        keys = self._lists[index]
        if key > keys[-1]:
            keys.append(key)
        else:
            insort(keys, key)
        self._largest[index] = keys[-1]
        if len(keys) > _MAX_LENGTH:
            half = len(keys) // 2
            self._lists[index : index + 1] = keys[:half], keys[half:]
            self._largest[index : index + 1] = keys[half - 1], keys[-1]

    def remove(self, key: Key) -> None:
        """Remove a key. Raises KeyError if it is not there."""
        index = bisect_left(self._largest, key)
        keys = self._lists[index] if index < len(self._lists) else []
        place = bisect_left(keys, key)
        if place == len(keys) or keys[place] != key:
            raise KeyError(key)
        del keys[place]
        if keys:
            self._largest[index] = keys[-1]
        else:
            del self._lists[index], self._largest[index]

    def after(self, key: Key) -> Key | None:
        """Return the lowest key above `key`."""
        index = bisect_right(self._largest, key)
        if index == len(self._lists):
            return None
        keys = self._lists[index]
        return keys[bisect_right(keys, key)]

    def rank(self, key: Key) -> int:
        """Return the number of keys below `key`."""
        index = bisect_left(self._largest, key)
        below = sum(map(len, self._lists[:index]))
        return below + (bisect_left(self._lists[index], key) if index < len(self._lists) else 0)


class RequestQueue:
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

    def after(self, key: Key) -> Sequence | None:
        """Return the first sequence with a higher key; None if there is none."""
        found = self._keys.after(key)
        return None if found is None else self._live[found[1]]

    def num_before(self, key: Key) -> int:
        """Return the number of sequences with a lower key."""
        return self._keys.rank(key)

    def oldest(self) -> Sequence | None:
        return next(iter(self._live.values()), None)

    def sequences(self) -> list[Sequence]:
        return list(self._live.values())


class QueueWalk:
    """A pass over two queues in order, while some of their sequences start: returns each once, by queue key.

    The caller may remove sequences that it got. It adds none.
    """

    def __init__(self, resuming: RequestQueue, fresh: RequestQueue) -> None:
        self._resuming, self._fresh = resuming, fresh
        self._last_key = (float("-inf"), 0)

    def next(self, *, with_fresh: bool) -> Sequence | None:
        """Return the next sequence; None at the end. Without `with_fresh`, those that have not started are passed."""
        queues = (self._resuming, self._fresh) if with_fresh else (self._resuming,)
        heads = [head for queue in queues if (head := queue.after(self._last_key)) is not None]
        found = min(heads, key=lambda s: s.queue_key, default=None)
        if found is not None:
            self._last_key = found.queue_key
        return found
