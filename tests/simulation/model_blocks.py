"""Who holds which block, and what is in it, as the oracle sees it: tables, the prefix cache, and what must be zeroed.

Decides nothing about who should hold one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from simulation.invariant_error import hold
from simulation.model_request import Track

Key = tuple[bytes, tuple[int, ...]]


class Holdings:
    """Of one worker's blocks; none without a worker."""

    def __init__(self, prefix_cache: bool) -> None:
        self._prefix_cache = prefix_cache
        self.open(0, 1)

    def open(self, num_blocks: int, size: int) -> None:
        """Begin with blocks of `size` positions that nobody holds."""
        self.size = size
        self._holders: list[set[Track]] = [set() for _ in range(num_blocks)]
        self._index: dict[Key, int] = {}  # the prefix cache: what is in which block
        self._key_of: dict[int, Key] = {}
        self._unused: dict[int, None] = {}  # blocks of the index that nobody holds, longest unused first
        self._dirty: set[int] = set()
        # Free block -> who had rows in flight when he left it, and the step of the last.
        self._doubts: dict[int, tuple[Track, int]] = {}

    def forget(self) -> None:
        """The prefix cache is emptied."""
        self._index.clear()
        self._key_of.clear()
        self._unused.clear()

    @property
    def num_used(self) -> int:
        """Blocks in somebody's table."""
        return sum(map(bool, self._holders))

    @property
    def num_free(self) -> int:
        """The others."""
        return len(self._holders) - self.num_used

    @property
    def num_cached(self) -> int:
        """Those of them that keep a prefix."""
        return sum(not self._holders[block] for block in self._key_of)

    def cached_prefix(self, track: Track) -> list[int]:
        """The longest there is, which never has the last token."""
        found: list[int] = []
        tokens = track.tokens
        if self._prefix_cache:
            for end in range(self.size, len(tokens), self.size):
                block = self._index.get((track.request.cache_salt, tokens[:end]))
                if block is None:
                    break
                found.append(block)
        return found

    def share(self, blocks: Sequence[int], track: Track) -> None:
        """`track` begins with these."""
        track.table = list(blocks)
        for block in blocks:
            self._holders[block].add(track)
            self._unused.pop(block, None)

    def take(self, block: int, track: Track, zeroed: set[int], *, after_a_leave: bool) -> None:
        """`track` is given `block`. `zeroed` loses it if it is among them.

        `after_a_leave`: blocks came back while the plan was made, and nobody can say when.
        """
        hold(0 <= block < len(self._holders) and not self._holders[block], "I1", "a block nobody holds")
        if block in self._key_of:
            empty = sum(not holders and b not in self._key_of for b, holders in enumerate(self._holders))
            hold(empty == 0 or after_a_leave, "I4", "a cached block is given away only when no empty one is left")
            hold(next(iter(self._unused)) == block, "I4", "the cached block that was unused longest is given away")
            del self._unused[block], self._index[self._key_of.pop(block)]
        if block in self._dirty or block in self._doubts:
            hold(block in zeroed, "I18", "a dirty block is zeroed before it is used again")
            self._dirty.discard(block)
            self._doubts.pop(block, None)
            zeroed.discard(block)
        self._holders[block].add(track)
        track.table.append(block)

    def writes(self, track: Track, start: int, end: int) -> None:
        """`track` computes positions [start, end)."""
        for block in track.table[start // self.size : -(-end // self.size)]:
            hold(self._holders[block] == {track}, "I3", "nobody writes to a shared block")
            hold(block not in self._key_of, "I3", "nobody writes to a published block")

    def publish(self, track: Track, end: int) -> None:
        """All before `end` is computed and applied."""
        if self._prefix_cache:
            tokens = track.tokens
            for index in range(track.applied // self.size, end // self.size):
                key = (track.request.cache_salt, tokens[: (index + 1) * self.size])
                if key not in self._index and track.table[index] not in self._key_of:
                    self._index[key] = track.table[index]
                    self._key_of[track.table[index]] = key
        track.applied = end

    def loss(self, track: Track) -> int:
        """Positions it would have to compute again that no cached block keeps."""
        if not self._prefix_cache:
            return track.planned
        return track.planned - max(track.shared, track.applied // self.size * self.size)

    def soil(self, track: Track) -> None:
        """What it computed was not finite."""
        track.soiled = True
        for block in track.table:
            if block in self._key_of:
                del self._index[self._key_of.pop(block)]
            self._dirty.add(block)

    def settle(self, step: int, soiled: Collection[Track]) -> None:
        """The rows of `step` are heard of, and those of `soiled` were not finite."""
        for block, (track, last) in list(self._doubts.items()):
            if track in soiled or last <= step:
                del self._doubts[block]
                self._dirty |= {block} if track in soiled else set()

    def leave(self, track: Track) -> None:
        """It gives all back, the last first."""
        if track.planned > track.applied and not track.soiled:
            in_flight = track.table[track.applied // self.size :]
            self._doubts |= dict.fromkeys(in_flight, (track, track.last_row))
        for block in reversed(track.table):
            self._holders[block].discard(track)
            if block in self._key_of and not self._holders[block]:
                self._unused[block] = None
        track.table = []
