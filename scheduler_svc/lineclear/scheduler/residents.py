"""Who runs, and what they hold: slots, blocks and cached prefixes. Decides nothing about who should.

The only place where a sequence takes a slot or gives it back, so that nothing can be lost between the states.
"""

from __future__ import annotations

import heapq
from bisect import insort

from lineclear.scheduler.blocks import BlockPool, chain_key, root_key
from lineclear.scheduler.sequence import Sequence, State


class Residents:
    """Running sequences, oldest first, over `num_slots` slots and a block pool. Without a worker all are empty."""

    def __init__(self, secret: bytes, prefix_cache: bool) -> None:
        self._secret = secret
        self._prefix_cache = prefix_cache
        self.open(0, 0, 1)

    def open(self, num_slots: int, num_blocks: int, block_size: int) -> None:
        """Start empty, over the capacity of a worker that joined."""
        self.running: list[Sequence] = []
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots))  # a heap: low slots first
        self.pool = BlockPool(num_blocks, block_size)

    def enter(self, sequence: Sequence, positions: int) -> tuple[list[int], list[int]]:
        """WAITING -> RUNNING with blocks for `positions`: (those found in the prefix cache, those taken).

        The caller has made sure of a slot and of enough free blocks, and has taken the sequence off its queue.
        """
        assert sequence.state is State.WAITING
        size = self.pool.block_size
        shared = self.cached_prefix(sequence)
        self.pool.share(shared)
        taken = self.pool.take(max(0, -(-positions // size) - len(shared)))
        sequence.state = State.RUNNING
        sequence.residence += 1
        sequence.slot = heapq.heappop(self.free_slots)
        sequence.blocks = [*shared, *taken]
        sequence.planned = sequence.computed = sequence.saved = len(shared) * size
        insort(self.running, sequence, key=lambda s: s.rank)
        return shared, taken

    def leave(self, sequence: Sequence, state: State, *, dirty: bool = False) -> None:
        """RUNNING -> `state`, giving back slot and blocks; `dirty` blocks are zeroed before anybody reuses them."""
        assert sequence.state is State.RUNNING
        self.running.remove(sequence)
        if dirty:
            self.pool.release_dirty(sequence.blocks)
        else:
            self.pool.release(sequence.blocks)
        heapq.heappush(self.free_slots, sequence.slot)
        _strip(sequence, state, computed=sequence.planned)  # plans in flight will run

    def evict_all(self) -> list[Sequence]:
        """The worker is gone with all blocks: every running sequence waits again. Returns them, oldest first."""
        evicted, self.running = self.running, []
        for sequence in evicted:
            _strip(sequence, State.WAITING, computed=sequence.computed)
        self.open(0, 0, 1)
        return evicted

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Published blocks that hold its leading tokens; never the last token, which must be computed."""
        found: list[int] = []
        if self._prefix_cache:
            size = self.pool.block_size
            for index in range((len(sequence.tokens) - 1) // size):
                key, tokens = self._block_content(sequence, index)
                block = self.pool.find(key, tokens)
                if block is None:
                    break
                found.append(block)
        return found

    def publish(self, sequence: Sequence) -> None:
        """Offer the blocks that computed positions have filled since the last call to the prefix cache."""
        size = self.pool.block_size
        if not self._prefix_cache or sequence.computed - sequence.saved < size:
            return
        for index in range(sequence.saved // size, sequence.computed // size):
            self.pool.publish(sequence.blocks[index], *self._block_content(sequence, index))
        sequence.saved = sequence.computed // size * size

    def _block_content(self, sequence: Sequence, index: int) -> tuple[bytes, tuple[int, ...]]:
        """Prefix-cache key and tokens of its block `index`, all of whose tokens are confirmed."""
        size, keys = self.pool.block_size, sequence.keys
        tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
        if index == len(keys):
            parent = keys[-1] if keys else root_key(self._secret, sequence.request.cache_salt)
            keys.append(chain_key(parent, tokens))
        return keys[index], tokens


def _strip(sequence: Sequence, state: State, computed: int) -> None:
    sequence.state = state
    sequence.high_water = max(sequence.high_water, computed)
    sequence.slot = -1
    sequence.blocks = []
    sequence.planned = sequence.computed = sequence.saved = sequence.planned_step = 0
