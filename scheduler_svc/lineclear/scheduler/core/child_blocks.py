"""Blocks by the key of the block before them: finds the block that begins most like the rest of a prompt.

A partial hit copies the leading positions of such a block (copy-on-write, PagedAttention, Kwon et al. 2023).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

Tokens = tuple[int, ...]
_Place = tuple[bytes, Tokens]  # key of the block before, and first tokens
_Child = tuple[Tokens, int]  # tokens and block


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
    searched tokens belong.
    """

    def __init__(self, min_positions: int) -> None:
        self._min_positions = min_positions
        self._children: dict[_Place, _Child | list[_Child]] = {}  # the only child, or all children
        self._entries: dict[int, tuple[_Place, _Child]] = {}  # by block

    def add(self, block: int, parent: bytes, tokens: Tokens) -> None:
        """Add a block with `tokens` behind `parent`, in place of its former entry."""
        self.add_all([(block, parent, tokens)])

    def add_all(self, blocks: Iterable[tuple[int, bytes, Tokens]]) -> None:
        """Add blocks, each with the key before it and its tokens, in place of their former entries."""
        entries, set_default, least = self._entries, self._children.setdefault, self._min_positions
        for block, parent, tokens in blocks:
            if block in entries:
                self.discard(block)
            if len(tokens) < least:
                continue
            child, place = (tokens, block), (parent, tokens[:least])
            entries[block] = (place, child)
            children = set_default(place, child)
            if children is not child:
                if isinstance(children, tuple):
                    children = self._children[place] = [children]
                insort(children, child)

    def discard(self, block: int) -> None:
        """Remove a block, if it has an entry."""
        entry = self._entries.pop(block, None)
        if entry is None:
            return
        place, child = entry
        children = self._children[place]
        if isinstance(children, tuple):
            del self._children[place]
            return
        del children[bisect_left(children, child)]
        if len(children) == 1:
            self._children[place] = children[0]

    def longest(self, parent: bytes, tokens: Sequence[int], start: int, end: int) -> Donor | None:
        """Return the child of `parent` that shares the most leading tokens with `tokens[start:end]`."""
        wanted = tuple(tokens[start:end])
        least = self._min_positions
        children = self._children.get((parent, wanted[:least])) if len(wanted) >= least else None
        if children is None:
            return None
        near = [children] if isinstance(children, tuple) else _neighbours(children, wanted)
        return max((Donor(block, _num_common(child, wanted)) for child, block in near), key=_num_positions)

    def dump(self) -> list[Any]:
        """Return a copy of the state; of tokens only their number."""
        return [(block, parent, len(tokens)) for block, ((parent, _), (tokens, _)) in self._entries.items()]

    def load(self, entries: Iterable[Any], token: int) -> None:
        """Restore a dump that went through JSON; every token becomes `token`."""
        for block, parent, num_tokens in entries:
            self.add(block, bytes.fromhex(parent), (token,) * num_tokens)

    def check(self, published: Container[int], references: Sequence[int]) -> None:
        """Check that children and entries agree, and that a free block is published. Raises AssertionError."""
        listed = [
            (block, (place, (tokens, block)))
            for place, children in self._children.items()
            for tokens, block in (children if isinstance(children, list) else (children,))
        ]
        assert len(listed) == len(self._entries), "a block is a child twice"
        assert dict(listed) == self._entries, "children disagree"
        assert all(references[block] or block in published for block in self._entries), "a free block is a child"


def _neighbours(children: list[_Child], wanted: Tokens) -> list[_Child]:
    index = bisect_left(children, (wanted, -1))
    return children[max(0, index - 1) : index + 1]


def _num_positions(donor: Donor) -> int:
    return donor.num_positions


def _num_common(tokens: Tokens, others: Tokens) -> int:
    """Return how many leading tokens are equal."""
    for count, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return count
    return min(len(tokens), len(others))
