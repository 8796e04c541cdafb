"""Blocks by the key of the block before them: finds the block that begins most like the rest of a prompt.

A partial hit copies the leading positions of such a block (copy-on-write, PagedAttention, Kwon et al. 2023).
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

TOKEN_BYTES = 4
_Child = tuple[bytes, int]  # tokens and block


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as big-endian integers of TOKEN_BYTES, so that the order of bytes is the order of tokens.

    A block keeps its tokens in this form: 16 of them are one object of 97 bytes, and 17 objects of 616 as a tuple.
    """
    return struct.pack(f">{len(tokens)}i", *tokens)


class Donor(NamedTuple):
    """The first `num_positions` positions of a block whose tokens begin like those of a prompt."""

    block: int
    num_positions: int


def min_copied(block_size: int) -> int:
    """Return how many positions of a block are worth a copy. It takes a worker as long as to compute one or two."""
    return max(1, block_size // 4)


class ChildBlocks:
    """The blocks that continue a prefix, full or partly filled, by the key of the prefix and their first tokens.

    Only blocks with `min_positions` tokens are added, and only those that share as many are found. Mostly there is one.
    Several are sorted by their tokens, so the one with the longest common prefix is next to the place where the
    searched tokens belong. Tokens are `token_bytes`.
    """

    def __init__(self, num_blocks: int, min_positions: int) -> None:
        self._min_bytes = min_positions * TOKEN_BYTES
        # By key of the block before and first tokens: the only child, or all children.
        self._children: dict[bytes, int | list[_Child]] = {}
        self._places: list[bytes | None] = [None] * num_blocks  # key in `_children`, by block
        self._tokens: list[bytes] = [b""] * num_blocks  # by block, while it has a place

    def add(self, block: int, parent: bytes, tokens: bytes) -> None:
        """Add a block with `tokens` behind `parent`, in place of its former entry."""
        self.add_all([(block, parent, tokens)])

    def add_all(self, blocks: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Add blocks, each with the key before it and its tokens, in place of their former entries."""
        places, set_default, least = self._places, self._children.setdefault, self._min_bytes
        for block, parent, tokens in blocks:
            if places[block] is not None:
                self.discard(block)
            if len(tokens) < least:
                continue
            place = places[block] = parent + tokens[:least]
            self._tokens[block] = tokens
            children = set_default(place, block)
            if children != block:
                if isinstance(children, int):
                    children = self._children[place] = [(self._tokens[children], children)]
                insort(children, (tokens, block))

    def discard(self, block: int) -> None:
        """Remove a block, if it has an entry."""
        place = self._places[block]
        if place is None:
            return
        child = self._tokens[block], block
        self._places[block], self._tokens[block] = None, b""
        children = self._children[place]
        if isinstance(children, int):
            del self._children[place]
            return
        del children[bisect_left(children, child)]
        if len(children) == 1:
            self._children[place] = children[0][1]

    def longest(self, parent: bytes, tokens: Sequence[int], start: int, end: int) -> Donor | None:
        """Return the child of `parent` that shares the most leading tokens with `tokens[start:end]`."""
        wanted = token_bytes(tokens[start:end])
        least = self._min_bytes
        children = self._children.get(parent + wanted[:least]) if len(wanted) >= least else None
        if children is None:
            return None
        near = [(self._tokens[children], children)] if isinstance(children, int) else _neighbours(children, wanted)
        return max((Donor(block, _num_common(child, wanted)) for child, block in near), key=_num_positions)

    def check(self, empty: Iterable[int]) -> None:
        """Check that children and places agree, and that no `empty` block is a child. Raises AssertionError."""
        # Of a pool with thousands of blocks nearly all are only children, so the passes over these are comprehensions.
        placed = [(block, place) for block, place in enumerate(self._places) if place is not None]
        assert not any(map(self._places.__getitem__, empty)), "an empty block is a child"
        several = [(block, place) for block, place in placed if self._children.get(place) != block]
        lists = {place: self._children.get(place) for _, place in several}
        listed = [(block, place, tokens) for place, found in lists.items() for tokens, block in _list(found)]
        assert sorted(listed) == [(block, place, self._tokens[block]) for block, place in several], "children disagree"
        assert len(self._children) == len(placed) - len(several) + len(lists), "a child that has no place"


def _list(children: int | list[_Child] | None) -> list[_Child]:
    assert isinstance(children, list), "children and places disagree"
    return children


def _neighbours(children: list[_Child], wanted: bytes) -> list[_Child]:
    index = bisect_left(children, (wanted, -1))
    return children[max(0, index - 1) : index + 1]


def _num_positions(donor: Donor) -> int:
    return donor.num_positions


def _num_common(tokens: bytes, others: bytes) -> int:
    """Return how many leading tokens are equal."""
    length = min(len(tokens), len(others))
    differing = int.from_bytes(tokens[:length], "big") ^ int.from_bytes(others[:length], "big")
    return (8 * length - differing.bit_length()) // (8 * TOKEN_BYTES)
