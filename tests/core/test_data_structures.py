"""Data structures of the core against small models, under random calls (Hypothesis state machines)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lineclear.scheduler.core.block_pool import BlockPool, ChildBlocks, OutOfBlocks
from lineclear.scheduler.core.prefix_keys import BlockHasher, token_bytes
from lineclear.scheduler.core.request_queue import SortedKeys


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
    with pytest.raises(OutOfBlocks):
        pool.take(3)
    assert sorted(pool.take(2)) == [6, 7]


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
            assert self.keys.after(key) == next(iter(self.model[index + 1 : index + 2]), None)
        with pytest.raises(KeyError):
            self.keys.remove((1.0, -1))


TestChildren = Children.TestCase
TestChildren.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestKeys = Keys.TestCase
TestKeys.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)
