"""Blocks of keys and values, and who owns them. Knows nothing of requests or devices.

A block is in exactly one place: held (reference count >= 1), free and empty, or free and *cached*: it still holds a
prefix that a later request may share, and is evicted, longest unused first, when blocks are short.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for."""


def root_key(secret: bytes, salt: bytes) -> bytes:
    """The parent of every first block: requests with different salts share nothing."""
    return blake2b(salt, key=secret[:64], digest_size=32).digest()


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """256-bit key of a full block, given the key of the block before it."""
    return blake2b(array("i", tokens).tobytes(), key=parent, digest_size=32).digest()


class PendingWrites:
    """A reason to doubt what is in some blocks; told from others by identity."""


class BlockPool:
    """Hands out `num_blocks` blocks of `block_size` positions, counts references, remembers prefixes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._empty = deque(range(num_blocks - 1, -1, -1))  # taken from the right: low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # free but published, longest unused first
        self._published: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # block -> key, tokens
        self._by_key: dict[bytes, int] = {}
        self._tainted: set[int] = set()
        self._pending: dict[int, PendingWrites] = {}  # free and empty, and perhaps dirty
        self._to_zero: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that still hold a prefix."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return self.num_blocks - self.num_free

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks, evicting the longest unused cached ones when no empty ones are left.

        Raises OutOfBlocks and changes nothing if that many are not free.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked, {self.num_free} free")
        taken = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._unpublish(block)
            if block in self._tainted or block in self._pending:
                self._tainted.discard(block)
                self._pending.pop(block, None)
                self._to_zero.append(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold published blocks once more."""
        for block in blocks:
            assert block in self._published
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give one hold of each block back. The tail goes first, so that the head of a prefix outlives it."""
        for block in reversed(blocks):
            assert self._references[block] > 0
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._published:
                    self._cached[block] = None
                else:
                    self._empty.append(block)

    def release_tainted(self, blocks: Sequence[int]) -> None:
        """Give back blocks whose content is not to be trusted: nobody shares them again, and whoever takes one next,
        when its last holder has let go, gets it zeroed."""
        for block in blocks:
            self._unpublish(block)
            self._tainted.add(block)
        self.release(blocks)

    def release_pending(self, blocks: Sequence[int], doubt: PendingWrites) -> None:
        """Give back blocks that nobody else holds or knows of, and whose content is not known yet to be trusted.

        Until `settle` whoever takes one gets it zeroed, and the others are taken first.
        """
        for block in blocks:
            assert self._references[block] == 1
            assert block not in self._published
            self._references[block] = 0
            self._pending[block] = doubt
            self._empty.appendleft(block)

    def resolve_pending(self, doubt: PendingWrites, *, dirty: bool) -> None:
        """What became of a doubt, for the blocks that nobody has taken meanwhile."""
        for block in [block for block, other in self._pending.items() if other is doubt]:
            del self._pending[block]
            if dirty:
                self._tainted.add(block)

    def drain_to_zero(self) -> tuple[int, ...]:
        """Blocks handed out since the last call that the worker must fill with zeros before it uses them."""
        blocks = tuple(self._to_zero)
        self._to_zero.clear()
        return blocks

    def publish(self, block: int, key: bytes, tokens: tuple[int, ...]) -> None:
        """Offer a held, full block to others under its key, unless it is dirty. The first block with a key keeps it."""
        assert self._references[block] > 0
        assert len(tokens) == self.block_size
        if key not in self._by_key and block not in self._published and block not in self._tainted:
            self._by_key[key] = block
            self._published[block] = (key, tokens)

    def find(self, key: bytes, tokens: tuple[int, ...]) -> int | None:
        """The block published under `key`, if it holds just these tokens."""
        block = self._by_key.get(key)
        return block if block is not None and self._published[block][1] == tokens else None

    def is_free(self, block: int) -> bool:
        """Whether nobody holds the block."""
        return self._references[block] == 0

    def _unpublish(self, block: int) -> None:
        if block in self._published:
            key, _ = self._published.pop(block)
            del self._by_key[key]

    def clear_cache(self) -> None:
        """Empty the prefix cache; held blocks stay held."""
        for block in list(self._published):
            self._unpublish(block)
        self._empty.extend(self._cached)
        self._cached.clear()

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Every invariant, given the block tables of all holders. AssertionError on a breach."""
        references = [0] * self.num_blocks
        for table in holders:
            assert len(set(table)) == len(table), "a block twice in one table"
            for block in table:
                references[block] += 1
        assert references == self._references, "reference counts and tables disagree"
        # Sets of all blocks would cost a millisecond, and a serving engine checks between two steps.
        empty, num_held = set(self._empty), self.num_blocks - references.count(0)
        assert len(empty) == len(self._empty), "a block twice among the empty ones"
        assert num_held + len(empty) + len(self._cached) == self.num_blocks, "a block in two places or in none"
        assert empty.isdisjoint(self._cached), "a block both empty and cached"
        assert not any(map(references.__getitem__, chain(empty, self._cached))), "a block both free and held"
        assert self._cached.keys() <= self._published.keys()
        assert empty.isdisjoint(self._published), "an empty block in the prefix index"
        assert {key: block for block, (key, _) in self._published.items()} == self._by_key
        assert self._pending.keys() <= empty, "doubt of what somebody holds"
        assert not self._tainted & self._published.keys(), "a dirty block in the prefix index"
