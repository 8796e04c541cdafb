"""Model of the block pool: the users of each block, the prefix cache, and the blocks that must be zeroed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from simulation.invariant_error import require
from simulation.model_sequence import ModelSequence

Key = tuple[bytes, tuple[int, ...]]
"""Cache salt and all tokens up to the end of the block."""


class ModelBlocks:
    """The blocks of one worker; empty without a worker."""

    def __init__(self, prefix_cache: bool) -> None:
        self._prefix_cache = prefix_cache
        self.reset(0, 1)

    def reset(self, num_blocks: int, size: int) -> None:
        """Start with free blocks of `size` positions."""
        self.size = size
        self._users: list[set[ModelSequence]] = [set() for _ in range(num_blocks)]
        self._index: dict[Key, int] = {}  # the prefix cache
        self._key_of: dict[int, Key] = {}
        self._unused: dict[int, None] = {}  # blocks in the index without user, least recently used first
        self._tainted: set[int] = set()
        # Free block -> the sequence that left it with rows in flight, and the step of the last row.
        self._pending: dict[int, tuple[ModelSequence, int]] = {}

    def clear_cache(self) -> None:
        """Empty the prefix cache."""
        self._index.clear()
        self._key_of.clear()
        self._unused.clear()

    @property
    def num_used(self) -> int:
        """Number of blocks with a user."""
        return sum(map(bool, self._users))

    @property
    def num_free(self) -> int:
        """Number of blocks without a user."""
        return len(self._users) - self.num_used

    @property
    def num_cached(self) -> int:
        """Number of free blocks that keep a prefix."""
        return sum(not self._users[block] for block in self._key_of)

    def cached_prefix(self, sequence: ModelSequence) -> list[int]:
        """Return the longest cached prefix, never with the last token."""
        found: list[int] = []
        tokens = sequence.tokens
        if self._prefix_cache:
            for end in range(self.size, len(tokens), self.size):
                block = self._index.get((sequence.request.cache_salt, tokens[:end]))
                if block is None:
                    break
                found.append(block)
        return found

    def share(self, blocks: Sequence[int], sequence: ModelSequence) -> None:
        """Start the block table of `sequence` with its cached prefix."""
        sequence.blocks = list(blocks)
        for block in blocks:
            self._users[block].add(sequence)
            self._unused.pop(block, None)

    def take(self, block: int, sequence: ModelSequence, zeroed: set[int], *, after_preemption: bool) -> None:
        """Give a free block to `sequence`, and remove it from `zeroed`.

        After a preemption in the same plan, the order of release and take is not known.
        """
        require(0 <= block < len(self._users) and not self._users[block], "I1", "a taken block is free")
        if block in self._key_of:
            empty = sum(not users and b not in self._key_of for b, users in enumerate(self._users))
            require(empty == 0 or after_preemption, "I4", "a cached block is evicted only without empty blocks")
            require(next(iter(self._unused)) == block, "I4", "the least recently used cached block is evicted")
            del self._unused[block], self._index[self._key_of.pop(block)]
        if block in self._tainted or block in self._pending:
            require(block in zeroed, "I18", "a tainted block is zeroed before it is used again")
            self._tainted.discard(block)
            self._pending.pop(block, None)
            zeroed.discard(block)
        self._users[block].add(sequence)
        sequence.blocks.append(block)

    def check_write(self, sequence: ModelSequence, start: int, end: int) -> None:
        """Check that `sequence` may compute positions [start, end)."""
        for block in sequence.blocks[start // self.size : -(-end // self.size)]:
            require(self._users[block] == {sequence}, "I3", "a shared block is never written")
            require(block not in self._key_of, "I3", "a published block is never written")

    def publish(self, sequence: ModelSequence, end: int) -> None:
        """Publish the full blocks below `end`, up to which all positions are computed."""
        if self._prefix_cache:
            tokens = sequence.tokens
            for index in range(sequence.num_computed // self.size, end // self.size):
                key = (sequence.request.cache_salt, tokens[: (index + 1) * self.size])
                if key not in self._index and sequence.blocks[index] not in self._key_of:
                    self._index[key] = sequence.blocks[index]
                    self._key_of[sequence.blocks[index]] = key
        sequence.num_computed = end

    def num_lost_positions(self, sequence: ModelSequence) -> int:
        """Return how many planned positions no cached block would keep after a preemption."""
        if not self._prefix_cache:
            return sequence.num_planned
        return sequence.num_planned - max(sequence.num_shared, sequence.num_computed // self.size * self.size)

    def taint(self, sequence: ModelSequence) -> None:
        """Unpublish the blocks of a sequence with non-finite values, and zero them before reuse."""
        sequence.tainted = True
        for block in sequence.blocks:
            if block in self._key_of:
                del self._index[self._key_of.pop(block)]
            self._tainted.add(block)

    def resolve_pending(self, step: int, tainted: Collection[ModelSequence]) -> None:
        """Settle pending blocks up to `step`; rows of the `tainted` sequences were non-finite."""
        for block, (sequence, last) in list(self._pending.items()):
            if sequence in tainted or last <= step:
                del self._pending[block]
                self._tainted |= {block} if sequence in tainted else set()

    def release(self, sequence: ModelSequence) -> None:
        """Release all blocks of a sequence, last block first."""
        if sequence.num_planned > sequence.num_computed and not sequence.tainted:
            in_flight = sequence.blocks[sequence.num_computed // self.size :]
            self._pending |= dict.fromkeys(in_flight, (sequence, sequence.planned_step))
        for block in reversed(sequence.blocks):
            self._users[block].discard(sequence)
            if block in self._key_of and not self._users[block]:
                self._unused[block] = None
        sequence.blocks = []
