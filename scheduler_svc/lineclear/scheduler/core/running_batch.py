"""Who runs, and what they hold: slots, blocks and cached prefixes. Decides nothing about who should.

The only place where a sequence takes a slot or gives it back, so that nothing can be lost between the states.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from lineclear.scheduler.core.block_pool import BlockPool, PendingWrites, chain_key, root_key
from lineclear.scheduler.core.decode_batch import DecodeBatch
from lineclear.scheduler.core.sequence import NOT_DECODING, Sequence, State


class InflightRows(PendingWrites):
    """Who left its blocks before all its rows were heard of; their values may turn out not to be finite."""

    def __init__(self, sequence: Sequence, last_step: int) -> None:
        self.sequence, self.last_step = sequence, last_step


class RunningBatch:
    """Running sequences over `num_slots` slots and a block pool: those that are `decoding`, and the `loose` others.

    Without a worker all are empty.
    """

    def __init__(self, secret: bytes, prefix_cache: bool) -> None:
        self._secret = secret
        self._prefix_cache = prefix_cache
        self.reset(0, 0, 1)

    def reset(self, num_slots: int, num_blocks: int, block_size: int) -> None:
        """Start empty, over the capacity of a worker that joined."""
        self.running: dict[Sequence, None] = {}  # an ordered set, by entering
        self.not_decoding: dict[Sequence, None] = {}
        self.decode_batch = DecodeBatch(block_size)
        self._pending: list[InflightRows] = []
        self.num_slots = num_slots
        self.free_slots = list(range(num_slots))  # a heap: low slots first
        self.pool = BlockPool(num_blocks, block_size)

    def admit(self, sequence: Sequence, shared: list[int], positions: int) -> list[int]:
        """WAITING -> RUNNING with blocks for `positions`: the `shared` ones of its cached prefix, and those returned.

        The caller has made sure of a slot and of enough free blocks, and has taken the sequence off its queue.
        """
        assert sequence.state is State.WAITING
        size = self.pool.block_size
        self.pool.share(shared)
        taken = self.pool.take(max(0, -(-positions // size) - len(shared)))
        sequence.state = State.RUNNING
        sequence.admission_count += 1
        sequence.slot = heapq.heappop(self.free_slots)
        sequence.blocks = [*shared, *taken]
        sequence.num_planned = sequence.num_computed = sequence.num_published = len(shared) * size
        self.running[sequence] = self.not_decoding[sequence] = None
        return taken

    def remove(self, sequence: Sequence, state: State, *, dirty: bool = False) -> None:
        """RUNNING -> `state`, giving back slot and blocks; `dirty` blocks are zeroed before anybody reuses them."""
        assert sequence.state is State.RUNNING
        if sequence.decode_joined_at != NOT_DECODING:
            self.leave_decode(sequence)
        del self.running[sequence], self.not_decoding[sequence]
        if dirty:
            self.pool.release_tainted(sequence.blocks)
        elif sequence.num_planned > sequence.num_computed:
            first = sequence.num_computed // self.pool.block_size
            doubt = InflightRows(sequence, sequence.planned_step)
            self._pending.append(doubt)
            self.pool.release_pending(sequence.blocks[first:], doubt)
            self.pool.release(sequence.blocks[:first])
        else:
            self.pool.release(sequence.blocks)
        heapq.heappush(self.free_slots, sequence.slot)
        _reset_sequence(sequence, state, computed=sequence.num_planned)  # plans in flight will run

    def resolve_pending(self, step: int, bad: Collection[Sequence]) -> None:
        """The rows of `step` are heard of; those of `bad` had values that are not finite."""
        if self._pending:
            for doubt in self._pending:
                if doubt.sequence in bad:
                    self.pool.resolve_pending(doubt, dirty=True)
                elif doubt.last_step <= step:
                    self.pool.resolve_pending(doubt, dirty=False)
            self._pending = [doubt for doubt in self._pending if doubt.last_step > step]

    def remove_all(self) -> list[Sequence]:
        """The worker is gone with all blocks: every running sequence waits again. Returns them, oldest first.

        The decode batch has been disbanded: what its members have computed must be written down first.
        """
        assert not len(self.decode_batch), "sequences that are decoding cannot be evicted"
        evicted = self.by_age()
        for sequence in evicted:
            _reset_sequence(sequence, State.WAITING, computed=sequence.num_computed)
        self.reset(0, 0, 1)
        return evicted

    def by_age(self) -> list[Sequence]:
        """All that run, the oldest first."""
        return sorted(self.running, key=lambda s: s.queue_key)

    def not_decoding_by_age(self) -> list[Sequence]:
        """Those of them that do not take part in beats."""
        return sorted(self.not_decoding, key=lambda s: s.queue_key)

    @property
    def positions(self) -> int:
        """Planned positions of all together: the keys and values that a step reads."""
        return self.decode_batch.positions + sum(s.num_planned for s in self.not_decoding)

    def join_decode(self, sequence: Sequence) -> None:
        """A loose sequence takes part in beats from now on."""
        del self.not_decoding[sequence]
        self.decode_batch.join(sequence)

    def leave_decode(self, sequence: Sequence) -> None:
        """It does not any more."""
        self.decode_batch.leave(sequence)
        self.not_decoding[sequence] = None

    def dissolve_decode(self) -> None:
        """Nobody does."""
        for sequence in self.decode_batch:
            self.leave_decode(sequence)

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
        if not self._prefix_cache or sequence.num_computed - sequence.num_published < size:
            return
        for index in range(sequence.num_published // size, sequence.num_computed // size):
            self.pool.publish(sequence.blocks[index], *self._block_content(sequence, index))
        sequence.num_published = sequence.num_computed // size * size

    def _block_content(self, sequence: Sequence, index: int) -> tuple[bytes, tuple[int, ...]]:
        """Prefix-cache key and tokens of its block `index`, all of whose tokens are confirmed."""
        size, keys = self.pool.block_size, sequence.block_keys
        tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
        if index == len(keys):
            keys.append(self.new_key(sequence, keys[-1] if keys else None, tokens))
        return keys[index], tokens

    def new_key(self, sequence: Sequence, parent: bytes | None, tokens: tuple[int, ...]) -> bytes:
        """The key of a block whose predecessor has the key `parent`."""
        return chain_key(parent or root_key(self._secret, sequence.request.cache_salt), tokens)


def _reset_sequence(sequence: Sequence, state: State, computed: int) -> None:
    sequence.state = state
    sequence.max_computed_before = max(sequence.max_computed_before, computed)
    sequence.slot = -1
    sequence.blocks = []
    sequence.num_planned = sequence.num_computed = sequence.num_published = sequence.planned_step = 0
