"""The block pool and the request queue against small models, under random calls (Hypothesis state machines)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from lineclear.scheduler.core.block_pool import BlockHasher, BlockPool, OutOfBlocks
from lineclear.scheduler.core.child_blocks import ChildBlocks, token_bytes
from lineclear.scheduler.core.request_queue import RequestQueue
from lineclear.scheduler.core.sequence import Request, Sequence
from lineclear.scheduler.core.sorted_keys import SortedKeys
from lineclear.wire.messages import Sampling

_SETTINGS = settings(max_examples=100, stateful_step_count=40, deadline=None)
# Salt and tokens of a block.
_CONTENTS = st.sampled_from([(b"x", token_bytes((0, 0))), (b"x", token_bytes((0, 1))), (b"y", token_bytes((0, 0)))])


def test_pool_hands_out_low_and_used_blocks_first() -> None:
    """The worker prefaults KV memory in this order."""
    pool = BlockPool(8, 2)
    first = pool.take(4)
    assert first == [0, 1, 2, 3]
    pool.publish(0, BlockHasher(b"")(b"", None, bytes(8)), bytes(8))
    pool.release(first)
    assert sorted(pool.take(3)) == [1, 2, 3], "a cached prefix stays"
    assert pool.take(1) == [4]
    pool.release([2])
    pool.clear_cache()
    assert sorted(pool.take(2)) == [0, 2]
    assert pool.take(1) == [5]


class Pool(RuleBasedStateMachine):
    """Take, share, publish and release; the model keeps block tables and the prefix cache."""

    tables: Bundle[list[int]] = Bundle("tables")

    @initialize(num_blocks=st.integers(1, 12))
    def open(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 2)
        self.held: list[list[int]] = []
        self.contents: dict[bytes, tuple[int, bytes]] = {}  # key -> block, tokens
        self.unused: list[int] = []  # free and cached, longest unused first
        self.dirty: set[int] = set()

    @rule(target=tables, count=st.integers(0, 6))
    def take(self, count: int) -> list[int]:
        free = self.pool.num_blocks - len({b for table in self.held for b in table})
        assert self.pool.num_free == free
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.pool.take(count)
            return []
        evicted = self.unused[: max(0, count - (free - len(self.unused)))]
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert set(taken) & set(self.unused) == set(evicted)
        self.unused = self.unused[len(evicted) :]
        self.contents = {k: (b, t) for k, (b, t) in self.contents.items() if b not in taken}
        assert set(self.pool.drain_to_zero()) == self.dirty & set(taken)
        self.dirty -= set(taken)
        self.held.append(taken)
        return taken

    @rule(table=tables, content=_CONTENTS)
    def publish(self, table: list[int], content: tuple[bytes, bytes]) -> None:
        if table and any(held is table for held in self.held):
            salt, tokens = content
            key = BlockHasher(b"")(salt, None, tokens)
            is_new = self.pool.publish(table[0], key, tokens)
            known = [block for block, _ in self.contents.values()]
            assert is_new == (key not in self.contents and table[0] not in known and table[0] not in self.dirty)
            if is_new:
                self.contents[key] = (table[0], tokens)
                self.pool.offer(table[0], BlockHasher(b"")(salt, None, b""), tokens)

    @rule(target=tables, content=_CONTENTS)
    def share(self, content: tuple[bytes, bytes]) -> list[int]:
        salt, tokens = content
        key = BlockHasher(b"")(salt, None, tokens)
        block = self.pool.find(key, tokens)
        assert (block is not None) == (key in self.contents)
        if block is None:
            return []
        assert self.contents[key][0] == block
        self.pool.share([block])
        self.unused = [b for b in self.unused if b != block]
        table = [block]
        self.held.append(table)
        return table

    @rule(table=consumes(tables), dirty=st.booleans())
    def release(self, table: list[int], dirty: bool) -> None:
        index = next((i for i, held in enumerate(self.held) if held is table), None)
        if index is None or not table:
            return
        del self.held[index]
        if dirty:
            self.contents = {k: (b, t) for k, (b, t) in self.contents.items() if b not in table}
            self.dirty |= set(table)
            self.pool.release_tainted(table)
        else:
            self.pool.release(table)
        found = {block for block, _ in self.contents.values()}
        still = {b for held in self.held for b in held}
        self.unused += [b for b in reversed(table) if b in found and b not in still]

    @rule()
    def forget(self) -> None:
        self.pool.clear_cache()
        self.contents.clear()
        self.unused.clear()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check(self.held)
            assert self.pool.num_cached == len(self.unused)
            assert self.pool.num_used == len({b for table in self.held for b in table})


class Children(RuleBasedStateMachine):
    """Add, replace and discard blocks; the longest common prefix of two tokens or more is that of a search in all."""

    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
    parents = st.sampled_from([b"x", b"y"])

    def __init__(self) -> None:
        super().__init__()
        self.children = ChildBlocks(num_blocks=13, min_positions=2)
        self.model: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    @rule(block=st.integers(0, 12), parent=parents, tokens=tokens)
    def add(self, block: int, parent: bytes, tokens: tuple[int, ...]) -> None:
        self.children.add(block, parent, token_bytes(tokens))
        if len(tokens) >= 2:
            self.model[block] = parent, tokens
        else:
            self.model.pop(block, None)

    @rule(block=st.integers(0, 12))
    def discard(self, block: int) -> None:
        self.children.discard(block)
        self.model.pop(block, None)

    @rule(parent=parents, wanted=tokens)
    def find(self, parent: bytes, wanted: tuple[int, ...]) -> None:
        common = {
            block: next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), shortest)
            for block, (other, tokens) in self.model.items()
            if other == parent and (shortest := min(len(tokens), len(wanted))) >= 0
        }
        longest = max(common.values(), default=0)
        found = self.children.longest(parent, (7, *wanted, 8), 1, 1 + len(wanted))
        assert (found is None) == (longest < 2)
        assert found is None or (common[found.block], found.num_positions) == (longest, longest)

    @invariant()
    def holds(self) -> None:
        self.children.check(set(range(13)) - self.model.keys())


class Queue(RuleBasedStateMachine):
    """Push, remove and read, against a sorted list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue()
        self.waiting: list[Sequence] = []  # by arrival in the queue
        self.away: list[Sequence] = []
        self.number = 0

    @rule(key=st.integers(0, 3), length=st.integers(1, 5))
    def push_new(self, key: int, length: int) -> None:
        self.number += 1
        request = Request(f"r{self.number}", (1,) * length, Sampling(), 1)
        self._push(Sequence(request, (float(key), self.number), 0.0))

    @precondition(lambda self: self.away)
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        self._push(self.away.pop(data.draw(st.integers(0, len(self.away) - 1))))

    def _push(self, sequence: Sequence) -> None:
        self.queue.push(sequence)
        self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), back=st.booleans())
    def remove(self, data: st.DataObject, back: bool) -> None:
        sequence = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.queue.remove(sequence)
        if back:
            self.away.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.waiting))
        sequence.tokens.append(1)
        self.queue.grow(sequence)

    @rule(count=st.integers(0, 9))
    def look(self, count: int) -> None:
        assert self.queue.first(count) == sorted(self.waiting, key=lambda s: s.queue_key)[:count]

    @invariant()
    def holds(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert self.queue.oldest() is (self.waiting[0] if self.waiting else None)
        assert self.queue.num_tokens == sum(len(s.tokens) for s in self.waiting)
        assert all((s in self.queue) == (s in self.waiting) for s in (*self.waiting, *self.away))
        assert self.queue.expected_len == sum(s.request.expected_len for s in self.waiting)
        for sequence in (*self.waiting, *self.away):
            key = sequence.queue_key
            assert self.queue.num_before(key) == sum(s.queue_key < key for s in self.waiting)


class Keys(RuleBasedStateMachine):
    """Many keys, so that lists are halved and emptied, against a sorted list."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = SortedKeys()
        self.model: list[tuple[float, int]] = []
        self.number = 0

    @rule(count=st.integers(1, 3000), spread=st.integers(1, 50))
    def add(self, count: int, spread: int) -> None:
        for _ in range(count):
            self.number += 1
            key = (float(self.number * 7919 % spread), self.number)
            self.keys.add(key)
            self.model.append(key)
        self.model.sort()

    @rule(begin=st.floats(0, 1), share=st.floats(0, 1))
    def remove(self, begin: float, share: float) -> None:
        first = int(begin * len(self.model))
        last = first + int(share * (len(self.model) - first))
        for key in self.model[first:last]:
            self.keys.remove(key)
        del self.model[first:last]

    @invariant()
    def holds(self) -> None:
        assert list(self.keys) == self.model
        assert len(self.keys) == len(self.model)
        for index, key in list(enumerate(self.model))[:: max(1, len(self.model) // 20)]:
            assert self.keys.rank(key) == index
        with pytest.raises(KeyError):
            self.keys.remove((1.0, -1))


TestPool = Pool.TestCase
TestPool.settings = _SETTINGS
TestChildren = Children.TestCase
TestChildren.settings = _SETTINGS
TestQueue = Queue.TestCase
TestQueue.settings = _SETTINGS
TestKeys = Keys.TestCase
TestKeys.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)
