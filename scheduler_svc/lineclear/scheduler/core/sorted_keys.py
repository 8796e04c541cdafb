"""Keys in order, in lists of bounded length, so that insertion, removal and the rank of a key stay cheap.

The structure of sortedcontainers' SortedList: a list of sorted lists, and the largest key of each.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

Key = tuple[float, int]

_MAX_LENGTH = 1024  # of one list; a longer one is halved


class SortedKeys:
    """Unique keys, lowest first."""

    def __init__(self) -> None:
        self._lists: list[list[Key]] = []
        self._largest: list[Key] = []

    def __len__(self) -> int:
        return sum(map(len, self._lists))

    def __iter__(self) -> Iterator[Key]:
        for keys in self._lists:
            yield from keys

    def add(self, key: Key) -> None:
        """Insert a key."""
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

    def rank(self, key: Key) -> int:
        """Return the number of keys below `key`."""
        index = bisect_left(self._largest, key)
        below = sum(map(len, self._lists[:index]))
        return below + (bisect_left(self._lists[index], key) if index < len(self._lists) else 0)
