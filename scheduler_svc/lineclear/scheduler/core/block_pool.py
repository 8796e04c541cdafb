"""KV blocks: reference counts and an LRU of cached prefixes (PagedAttention, Kwon et al. 2023; vLLM's BlockPool).

A block is in exactly one state: used (reference count >= 1), free and empty, free and *partial*, or free and *cached*.
A cached block keeps a prefix that a later request can share. A partial block has leading positions that a later request
can copy. When no empty block is left, the oldest partial block is evicted, then the least recently used cached block: a
beam search leaves a partial block for each beam and token, and these must not evict prefixes of other requests.

A block is published when the row that fills it is planned: plans run in order, so a row of a later plan, or a later
row of the same plan, reads it after it was written. Until the result of that row the block is *unconfirmed*: its values
may prove to be non-finite. It leaves this state with the result, or with its last reference.

A request whose prompt shares only a part of a further block gets a copy of these positions (copy-on-write). The source
is a published block, or the block that the prompt of a sequence fills in part, also when the sequence has ended. It is
offered to plans after the one that writes it, because copies run before a plan's writes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from lineclear.scheduler.core.prefix_keys import TOKEN_BYTES, Prefix, token_bytes
from lineclear.scheduler.core.state_pool import StatePool

_Child = tuple[bytes, int]  # tokens and block


class OutOfBlocks(Exception):
    """Fewer blocks are free than requested."""


class Donor(NamedTuple):
    """The first `num_positions` positions of a block whose tokens begin like those of a prompt."""

    block: int
    num_positions: int


def min_copied(block_size: int) -> int:
    """Return how many positions of a block are worth a copy. It takes a worker as long as to compute one or two."""
    return max(1, block_size // 4)


class PendingWrites:
    """Rows in flight that write to unconfirmed or released blocks. Compared by identity."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        """The blocks that were published with these writes."""


class BlockPool:
    """Allocate `num_blocks` blocks of `block_size` positions, count references and index cached prefixes.

    Tokens are `token_bytes`. State by block is a list with an entry for each block, and the rest refers to its objects.
    With recurrent `states`, no part of a block is copied: no state is kept inside of a block.
    """

    def __init__(self, num_blocks: int, block_size: int, states: StatePool | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states = states
        self.min_copied = min_copied(block_size) if states is None else block_size + 1
        self._references = [0] * num_blocks
        self._empty = deque(range(num_blocks - 1, -1, -1))  # taken from the right: low ids first
        self._partial: OrderedDict[int, None] = OrderedDict()  # free, oldest first
        self._cached: OrderedDict[int, None] = OrderedDict()  # free but published, longest unused first
        self._keys: list[bytes | None] = [None] * num_blocks  # of published blocks
        self._tokens: list[bytes] = [b""] * num_blocks  # of published blocks
        self._by_key: dict[bytes, int] = {}
        self._tainted: set[int] = set()
        self._pending: dict[int, PendingWrites] = {}  # free and empty; non-finite values may still be written to them
        self._unconfirmed: dict[int, PendingWrites] = {}  # used blocks
        # Published blocks, and partly filled ones. `_parts` are the latter, and may have been published since.
        self._children = ChildBlocks(num_blocks, self.min_copied)
        self._parts: set[int] = set()
        self._planned: list[tuple[int, bytes, bytes]] = []  # to add to `_children` after the plan
        self._to_zero: list[int] = []

    @property
    def num_free(self) -> int:
        """Number of blocks that `take` can hand out, partial and cached blocks included."""
        return len(self._empty) + len(self._partial) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of free blocks that keep a prefix."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks; evict the oldest partial and cached blocks when no empty block is left.

        Raises OutOfBlocks, and changes nothing, if fewer than `count` blocks are free.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks requested, {self.num_free} free")
        taken = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, _ = (self._partial or self._cached).popitem(last=False)
                self._unpublish(block)
            if block in self._tainted or block in self._pending:
                self._tainted.discard(block)
                self._pending.pop(block, None)
                self._to_zero.append(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of the published `blocks`."""
        for block in blocks:
            assert self._keys[block] is not None
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference of each block, last block first, so that the head of a prefix is evicted after its tail."""
        for block in reversed(blocks):
            assert self._references[block] > 0
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._unconfirmed:
                    self._add_pending(block, self._unconfirmed.pop(block))
                elif self._keys[block] is not None:
                    self._cached[block] = None
                elif block in self._parts:
                    self._partial[block] = None
                else:
                    self._empty.append(block)

    def release_tainted(self, blocks: Sequence[int]) -> None:
        """Release blocks with non-finite values: unpublish them, and zero each before it is handed out again."""
        for block in blocks:
            self._taint(block)
        self.release(blocks)

    def _taint(self, block: int) -> None:
        self._unpublish(block)
        self._unconfirmed.pop(block, None)
        self._tainted.add(block)

    def release_pending(self, blocks: Sequence[int], writes: PendingWrites) -> None:
        """Release blocks to which the rows of `writes` are still in flight. Those that others share stay unconfirmed.

        Until `resolve_pending`, such a block is zeroed when it is handed out, and other empty blocks go first.
        """
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._unconfirmed.pop(block, None)
                self._add_pending(block, writes)

    def _add_pending(self, block: int, writes: PendingWrites) -> None:
        self._unpublish(block)
        self._pending[block] = writes
        self._empty.appendleft(block)

    def resolve_pending(self, writes: PendingWrites, *, tainted: bool) -> None:
        """Settle the blocks of `writes`: all values were finite, or they are `tainted` and have no reference."""
        for block in writes.blocks:
            if self._unconfirmed.get(block) is writes:
                assert not tainted, "a block with values that are not finite is in use"
                del self._unconfirmed[block]
        for block in [block for block, other in self._pending.items() if other is writes]:
            del self._pending[block]
            if tainted:
                self._tainted.add(block)

    def drain_to_zero(self) -> tuple[int, ...]:
        """Return the blocks handed out since the last call that the worker must zero before use."""
        blocks = tuple(self._to_zero)
        self._to_zero.clear()
        return blocks

    def publish(self, block: int, key: bytes, tokens: bytes) -> bool:
        """Put a used, full block into the prefix cache unless it is tainted. The first block with a key keeps it.

        With recurrent state, the last one does, unless a state is kept behind the first: then the blocks before a state
        are those that its sequence used last. Returns whether it did.
        """
        assert self._references[block] > 0
        assert len(tokens) == self.block_size * TOKEN_BYTES
        if self._keys[block] is not None or block in self._tainted:
            return False
        if key in self._by_key and not self._give_way(self._by_key[key]):
            self._drop_state(block)
            return False
        self._by_key[key] = block
        self._keys[block], self._tokens[block] = key, tokens
        return True

    def _give_way(self, block: int) -> bool:
        """Return whether a block leaves the prefix cache because another one has the same content."""
        if self.states is None or self.states.has_state(block):
            return False
        self._unpublish(block)
        if block in self._cached:
            del self._cached[block]
            self._empty.append(block)
        return True

    def is_published(self, block: int) -> bool:
        return self._keys[block] is not None

    def offer(self, block: int, parent: bytes, tokens: bytes) -> None:
        """Offer the leading positions of a published block to copies; `parent` is the key of the block before."""
        self._children.add(block, parent, tokens)

    def note_writes(self, block: int, parent: bytes, tokens: bytes, writes: PendingWrites) -> None:
        """Note that rows of the plan being made fill a used block up to the end of `tokens`: it is unconfirmed.

        Plans after this one may copy these positions.
        """
        self._unconfirmed[block] = writes
        writes.blocks.append(block)
        self._planned.append((block, parent, tokens))

    def end_plan(self) -> None:
        """Offer the positions that the plan writes to copies of the plans after it."""
        if self._planned:
            self._children.add_all(self._planned)
            least = self.min_copied * TOKEN_BYTES
            self._parts.update(b for b, _, t in self._planned if self._keys[b] is None and len(t) >= least)
            self._planned.clear()

    def find_donor(self, parent: bytes, tokens: Sequence[int], start: int, end: int) -> Donor | None:
        """Return the block behind `parent` that shares the most leading tokens with `tokens[start:end]`, if any."""
        return self._children.longest(parent, tokens, start, end)

    def pending_writes(self, blocks: Iterable[int]) -> list[PendingWrites]:
        """Return the rows in flight that write to used `blocks`."""
        if not self._unconfirmed:
            return []
        return list({id(w): w for block in blocks if (w := self._unconfirmed.get(block)) is not None}.values())

    def find(self, key: bytes, tokens: bytes) -> int | None:
        """Return the block published under `key` if it has exactly these tokens."""
        block = self._by_key.get(key)
        return block if block is not None and self._tokens[block] == tokens else None

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def reference_counts(self) -> bytes:
        """Return the reference counts by block, 255 for more."""
        try:
            return bytes(self._references)
        except ValueError:
            return bytes(min(count, 255) for count in self._references)

    def cached_blocks(self) -> tuple[int, ...]:
        """Return the free blocks that keep a prefix."""
        return tuple(self._cached)

    def prefixes(self) -> list[Prefix]:
        """Return the published blocks of prompts, in any order; none with recurrent states."""
        parents = self._children.parents()
        return [Prefix(k, p, t) for k, p, t in zip(self._keys, parents, self._tokens, strict=True) if k and p]

    def _unpublish(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block], self._tokens[block] = None, b""
        self._drop_state(block)
        self._parts.discard(block)
        self._children.discard(block)

    def _drop_state(self, block: int) -> None:
        if self.states is not None:
            self.states.drop(block)

    def clear_cache(self) -> None:
        """Empty the prefix cache; used blocks stay used."""
        for block in list(self._by_key.values()):
            self._unpublish(block)
        self._children = ChildBlocks(self.num_blocks, self.min_copied)
        self._empty.extend([*self._partial, *self._cached])
        self._partial.clear()
        self._parts.clear()
        self._cached.clear()

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Check every invariant, given the block tables of all running sequences. Raises AssertionError."""
        references = [0] * self.num_blocks
        for table in block_tables:
            assert len(set(table)) == len(table), "a block twice in one table"
            for block in table:
                references[block] += 1
        assert references == self._references, "reference counts and tables disagree"
        # Sets of all blocks would cost a millisecond, and a serving engine checks between two steps.
        empty, num_used = set(self._empty), self.num_blocks - references.count(0)
        assert len(empty) == len(self._empty), "a block twice in the list of empty blocks"
        free = [*empty, *self._partial, *self._cached]
        assert num_used + len(free) == self.num_blocks, "a block in two states or in none"
        assert len(set(free)) == len(free), "a block in two states of free blocks"
        assert not any(map(references.__getitem__, free)), "a block both free and used"
        assert all(map(self._keys.__getitem__, self._cached)), "a cached block that is not in the prefix index"
        assert not any(map(self._keys.__getitem__, chain(empty, self._partial))), "an empty block in the prefix index"
        assert self.num_blocks - self._keys.count(None) == len(self._by_key), "a published block that is not found"
        assert list(map(self._keys.__getitem__, self._by_key.values())) == list(self._by_key)
        assert self._pending.keys() <= empty, "pending writes to a block that is not empty"
        assert not any(map(self._keys.__getitem__, self._tainted)), "a tainted block in the prefix index"
        assert all(map(references.__getitem__, self._unconfirmed)), "an unconfirmed block that is not used"
        assert all(block in writes.blocks for block, writes in self._unconfirmed.items())
        assert not self._planned, "a plan has not ended"
        assert empty.isdisjoint(self._parts), "an empty block that is partial"
        assert self._partial.keys() <= self._parts, "a partial block without positions"
        self._children.check(empty)


# --- copies of parts of blocks ---------------------------------------------------------------------------------------


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

    def parents(self) -> list[bytes | None]:
        """Return by block the key of the prefix that it continues; None for a block without an entry."""
        return [None if place is None else place[: -self._min_bytes] for place in self._places]

    def longest(self, parent: bytes, tokens: Sequence[int], start: int, end: int) -> Donor | None:
        """Return the child of `parent` that shares the most leading tokens with `tokens[start:end]`."""
        wanted = token_bytes(tokens[start:end])
        least = self._min_bytes
        children = self._children.get(parent + wanted[:least]) if len(wanted) >= least else None
        if children is None:
            return None
        near = [(self._tokens[children], children)] if isinstance(children, int) else _neighbours(children, wanted)
        return max((Donor(block, _num_common(child, wanted)) for child, block in near), key=attrgetter("num_positions"))

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


def _num_common(tokens: bytes, others: bytes) -> int:
    length = min(len(tokens), len(others))
    differing = int.from_bytes(tokens[:length], "big") ^ int.from_bytes(others[:length], "big")
    return (8 * length - differing.bit_length()) // (8 * TOKEN_BYTES)
