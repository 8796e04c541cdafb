"""Who runs, and what they hold: slots, blocks and cached prefixes. Decides nothing about who should.

The only place where a sequence takes a slot or gives it back, so that nothing can be lost between the states.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from lineclear.scheduler.scheduling.blocks import BlockPool, Doubt, chain_key, root_key
from lineclear.scheduler.scheduling.decoding import Decoding
from lineclear.scheduler.scheduling.sequence import NEVER, Sequence, State


class RowsInFlight(Doubt):
    """Who left its blocks before all its rows were heard of; their values may turn out not to be finite."""

    def __init__(self, sequence: Sequence, last_step: int) -> None:
        self.sequence, self.last_step = sequence, last_step


class Residents:
    """Running sequences over `num_slots` slots and a block pool: those that are `decoding`, and the `loose` others.

    Without a worker all are empty.
    """

    def __init__(self, secret: bytes, prefix_cache: bool) -> None:
        self._secret = secret
        self._prefix_cache = prefix_cache
        self.open(0, 0, 1)

    def open(self, num_slots: int, num_blocks: int, block_size: int) -> None:
        """Start empty, over the capacity of a worker that joined."""
        self.running: dict[Sequence, None] = {}  # an ordered set, by entering
        self.loose: dict[Sequence, None] = {}
        self.decoding = Decoding(block_size)
        self._doubts: list[RowsInFlight] = []
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots))  # a heap: low slots first
        self.pool = BlockPool(num_blocks, block_size)

    def enter(self, sequence: Sequence, shared: list[int], positions: int) -> list[int]:
        """WAITING -> RUNNING with blocks for `positions`: the `shared` ones of its cached prefix, and those returned.

        The caller has made sure of a slot and of enough free blocks, and has taken the sequence off its queue.
        """
        assert sequence.state is State.WAITING
        size = self.pool.block_size
        self.pool.share(shared)
        taken = self.pool.take(max(0, -(-positions // size) - len(shared)))
        sequence.state = State.RUNNING
        sequence.residence += 1
        sequence.slot = heapq.heappop(self.free_slots)
        sequence.blocks = [*shared, *taken]
        sequence.planned = sequence.computed = sequence.saved = len(shared) * size
        self.running[sequence] = self.loose[sequence] = None
        return taken

    def leave(self, sequence: Sequence, state: State, *, dirty: bool = False) -> None:
        """RUNNING -> `state`, giving back slot and blocks; `dirty` blocks are zeroed before anybody reuses them."""
        assert sequence.state is State.RUNNING
        if sequence.joined != NEVER:
            self.loosen(sequence)
        del self.running[sequence], self.loose[sequence]
        if dirty:
            self.pool.release_dirty(sequence.blocks)
        elif sequence.planned > sequence.computed:
            first = sequence.computed // self.pool.block_size
            doubt = RowsInFlight(sequence, sequence.planned_step)
            self._doubts.append(doubt)
            self.pool.release_doubtful(sequence.blocks[first:], doubt)
            self.pool.release(sequence.blocks[:first])
        else:
            self.pool.release(sequence.blocks)
        heapq.heappush(self.free_slots, sequence.slot)
        _strip(sequence, state, computed=sequence.planned)  # plans in flight will run

    def settle_doubts(self, step: int, bad: Collection[Sequence]) -> None:
        """The rows of `step` are heard of; those of `bad` had values that are not finite."""
        if self._doubts:
            for doubt in self._doubts:
                if doubt.sequence in bad:
                    self.pool.settle(doubt, dirty=True)
                elif doubt.last_step <= step:
                    self.pool.settle(doubt, dirty=False)
            self._doubts = [doubt for doubt in self._doubts if doubt.last_step > step]

    def evict_all(self) -> list[Sequence]:
        """The worker is gone with all blocks: every running sequence waits again. Returns them, oldest first.

        The decode batch has been disbanded: what its members have computed must be written down first.
        """
        assert not len(self.decoding), "sequences that are decoding cannot be evicted"
        evicted = self.by_age()
        for sequence in evicted:
            _strip(sequence, State.WAITING, computed=sequence.computed)
        self.open(0, 0, 1)
        return evicted

    def by_age(self) -> list[Sequence]:
        """All that run, the oldest first."""
        return sorted(self.running, key=lambda s: s.rank)

    def loose_by_age(self) -> list[Sequence]:
        """Those of them that do not take part in beats."""
        return sorted(self.loose, key=lambda s: s.rank)

    @property
    def positions(self) -> int:
        """Planned positions of all together: the keys and values that a step reads."""
        return self.decoding.positions + sum(s.planned for s in self.loose)

    def tie(self, sequence: Sequence) -> None:
        """A loose sequence takes part in beats from now on."""
        del self.loose[sequence]
        self.decoding.join(sequence)

    def loosen(self, sequence: Sequence) -> None:
        """It does not any more."""
        self.decoding.leave(sequence)
        self.loose[sequence] = None

    def disband(self) -> None:
        """Nobody does."""
        for sequence in self.decoding:
            self.loosen(sequence)

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
            keys.append(self.new_key(sequence, keys[-1] if keys else None, tokens))
        return keys[index], tokens

    def new_key(self, sequence: Sequence, parent: bytes | None, tokens: tuple[int, ...]) -> bytes:
        """The key of a block whose predecessor has the key `parent`."""
        return chain_key(parent or root_key(self._secret, sequence.request.cache_salt), tokens)


def _strip(sequence: Sequence, state: State, computed: int) -> None:
    sequence.state = state
    sequence.high_water = max(sequence.high_water, computed)
    sequence.slot = -1
    sequence.blocks = []
    sequence.planned = sequence.computed = sequence.saved = sequence.planned_step = 0
