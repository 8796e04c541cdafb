"""The running sequences with their slots, KV blocks and cached prefixes.

Only this class gives a sequence a slot or takes it back, so that no slot or block is lost between two states.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from lineclear.scheduler.core.block_pool import BlockPool, Donor, PendingWrites
from lineclear.scheduler.core.decode_batch import DecodeBatch
from lineclear.scheduler.core.prefix_keys import BlockHash, token_bytes
from lineclear.scheduler.core.sequence import Sequence, State
from lineclear.scheduler.core.state_pool import StatePool
from lineclear.scheduler.core.swap_space import SwapSpace

_ANSWER_BLOCKS = 4
"""Of an answer: a state is kept behind so many of its blocks, which costs a copy of the state in that many steps."""
ChooseDonor = Callable[[Donor | None], Donor | None]
"""The block to copy from that was found -> the block to copy from. Recordings note it, and replays restore it."""


class InflightRows(PendingWrites):
    """Rows in flight of one admission of a sequence; up to `last_step` they may prove to be non-finite.

    One is made for each row that writes blocks which others may share or copy, and one for a sequence that is removed
    with rows in flight.
    """

    def __init__(self, sequence: Sequence, admission: int, last_step: int) -> None:
        super().__init__()
        self.sequence, self.admission, self.last_step = sequence, admission, last_step
        self.readers: dict[Sequence, int] = {}
        """Sequences that share or copy the blocks, with admission_count: if a row is bad, they are computed again."""


class RunningBatch:
    """Running sequences over slots and a block pool: those in the decode batch, and the others.

    A sequence whose last row is planned is *finishing*. It needs no further row, so the next plan may give its slot to
    another sequence (law 3 orders their rows); its blocks stay until the result. At most `num_slots` of the worker's
    `max_slots` slots are used at once. Empty without a worker.
    """

    def __init__(self, block_hash: BlockHash, prefix_cache: bool, choose_donor: ChooseDonor | None = None) -> None:
        self._block_hash = block_hash
        self._choose_donor = choose_donor
        self._prefix_cache = prefix_cache
        self.reset(0, 0, 0, 1)

    def reset(
        self, num_slots: int, max_slots: int, num_blocks: int, block_size: int, states: StatePool | None = None
    ) -> None:
        """Start empty, with the capacity of a worker that joined."""
        self.running: dict[Sequence, None] = {}  # an ordered set, by admission
        self.not_decoding: dict[Sequence, None] = {}
        self.finishing: dict[Sequence, None] = {}  # not in `running`
        self.decode_batch = DecodeBatch(block_size)
        self._pending: list[InflightRows] = []
        self.num_slots = num_slots
        self.max_slots = max_slots
        self.unused_slots = list(range(max_slots))  # a heap: low slots first
        self.pool = BlockPool(num_blocks, block_size, states)
        self.swap: SwapSpace | None = None
        """The host blocks of a worker that has some."""

    @property
    def num_free_slots(self) -> int:
        """Number of sequences that may join."""
        return max(0, len(self.unused_slots) - self.max_slots + self.num_slots)

    def admit(self, sequence: Sequence, shared: list[int], donors: list[Donor], positions: int) -> list[int]:
        """WAITING -> RUNNING with blocks for `positions`: the `shared` blocks of its cached prefix and those returned.

        The first of these get copies of the positions of `donors`. The caller has checked that a slot and enough blocks
        are free, and has removed the sequence from its queue.
        """
        assert sequence.state is State.WAITING
        size = self.pool.block_size
        self.pool.share(shared)
        taken = self.pool.take(max(0, -(-positions // size) - len(shared)))
        sequence.state = State.RUNNING
        sequence.admission_count += 1
        sequence.slot = heapq.heappop(self.unused_slots)
        sequence.blocks = [*shared, *taken]
        for writes in self.pool.pending_writes([*shared, *(donor.block for donor in donors)]):
            assert isinstance(writes, InflightRows)
            writes.readers[sequence] = sequence.admission_count
        num_cached = len(shared) * size + sum(donor.num_positions for donor in donors)
        sequence.num_planned = sequence.num_computed = num_cached
        sequence.num_published = sequence.num_offered = len(shared) * size
        self.running[sequence] = self.not_decoding[sequence] = None
        return taken

    def free(self, sequence: Sequence, state: State, *, tainted: bool = False) -> None:
        """Free the slot and the blocks of `sequence`: RUNNING -> `state`. `tainted` blocks are zeroed before reuse."""
        assert sequence.state is State.RUNNING
        if sequence in self.finishing:
            del self.finishing[sequence]
        else:
            self._remove_from_slot(sequence)
        if tainted:
            self.pool.release_tainted(sequence.blocks)
        elif sequence.num_planned > sequence.num_computed:
            first = sequence.num_computed // self.pool.block_size
            writes = InflightRows(sequence, sequence.admission_count, sequence.planned_step)
            self._pending.append(writes)
            self.pool.release_pending(sequence.blocks[first:], writes)
            self.pool.release(sequence.blocks[:first])
        else:
            self.pool.release(sequence.blocks)
        _reset_sequence(sequence, state, computed=sequence.num_planned)  # plans in flight will run

    def release_slot(self, sequence: Sequence) -> None:
        """Free the slot of a sequence whose last row is in the plan being made. Later plans may hand it out."""
        self._remove_from_slot(sequence)
        assert sequence.num_planned == sequence.max_len - 1
        self.finishing[sequence] = None

    def _remove_from_slot(self, sequence: Sequence) -> None:
        if sequence.in_decode_batch:
            self.leave_decode(sequence)
        del self.running[sequence], self.not_decoding[sequence]
        if self.pool.states is not None:
            self.pool.states.leave(sequence.slot)
        heapq.heappush(self.unused_slots, sequence.slot)
        sequence.slot = -1

    def add_readers(self, bad: dict[Sequence, int]) -> list[Sequence]:
        """Add the sequences that share or copy blocks of the `bad` rows and return those, oldest first.

        Sequences are given with their admission_count. The blocks of a reader may hold copies, so its own readers are
        found too: they were admitted after it, and their entries follow.
        """
        found: dict[Sequence, int] = {}
        for writes in self._pending:
            if writes.admission in (bad.get(writes.sequence), found.get(writes.sequence)):
                found |= writes.readers
        bad |= found
        return sorted((s for s, count in found.items() if s.admission_count == count), key=lambda s: s.queue_key)

    def resolve_pending(self, step: int, bad: Mapping[Sequence, int]) -> None:
        """Settle the pending writes up to `step`; rows of the admissions in `bad` had non-finite values."""
        if self._pending:
            kept = []
            for writes in self._pending:
                if bad.get(writes.sequence) == writes.admission:
                    self.pool.resolve_pending(writes, tainted=True)
                elif writes.last_step <= step:
                    self.pool.resolve_pending(writes, tainted=False)
                else:
                    kept.append(writes)
            self._pending = kept

    def remove_all(self) -> list[Sequence]:
        """Move every running sequence to WAITING after a worker loss and drop all blocks. Returns them, oldest first.

        Dissolve the decode batch first, so that the sequences' fields are up to date.
        """
        assert not len(self.decode_batch), "dissolve the decode batch before remove_all"
        removed = sorted((*self.running, *self.finishing), key=lambda s: s.queue_key)
        for sequence in removed:
            _reset_sequence(sequence, State.WAITING, computed=sequence.num_computed)
        self.reset(0, 0, 0, 1)
        return removed

    @property
    def num_running(self) -> int:
        """Number of sequences with a slot or with their last row in flight."""
        return len(self.running) + len(self.finishing)

    def by_age(self) -> list[Sequence]:
        """Return the sequences with a slot, oldest first."""
        return sorted(self.running, key=lambda s: s.queue_key)

    def not_decoding_by_age(self) -> list[Sequence]:
        """Return the running sequences outside the decode batch, oldest first."""
        return sorted(self.not_decoding, key=lambda s: s.queue_key)

    @property
    def num_positions(self) -> int:
        """Planned positions of all running sequences: the keys and values that a step reads."""
        return self.decode_batch.num_positions + sum(s.num_planned for s in self.not_decoding)

    @property
    def num_held_positions(self) -> int:
        """Planned positions of all sequences with blocks, those with their last row in flight included."""
        held = self.decode_batch.num_positions
        for sequence in self.not_decoding:
            held += sequence.num_planned
        for sequence in self.finishing:
            held += sequence.num_planned
        return held

    def join_decode(self, sequence: Sequence) -> None:
        del self.not_decoding[sequence]
        self.decode_batch.join(sequence)

    def leave_decode(self, sequence: Sequence) -> None:
        """Remove a sequence from the decode batch; it keeps running."""
        self.decode_batch.leave(sequence)
        self.not_decoding[sequence] = None

    def dissolve_decode(self) -> None:
        """Remove every sequence from the decode batch."""
        for sequence in self.decode_batch:
            self.leave_decode(sequence)

    def cached_prefix(self, sequence: Sequence, *, with_state: bool = True) -> list[int]:
        """Return the published blocks with the leading tokens of `sequence`, never with a token that needs a row.

        Where the worker has recurrent state, those up to the last one with a state, unless `with_state` is False.
        """
        found: list[int] = []
        if self._prefix_cache:
            size = self.pool.block_size
            for index in range(sequence.num_skippable // size):
                key, tokens = self._block_content(sequence, index)
                block = self.pool.find(key, tokens)
                if block is None:
                    break
                found.append(block)
        if self.pool.states is not None and with_state:
            del found[self.pool.states.num_usable(found) :]
        return found

    def set_boundaries(self, sequence: Sequence, shared: list[int]) -> int:
        """Decide where the states of a sequence that starts behind `shared` blocks are kept.

        Returns how many positions behind these blocks are cached without a state.
        """
        assert self.pool.states is not None
        size, num_cached = self.pool.block_size, len(self.cached_prefix(sequence, with_state=False))
        counts = self.pool.states.boundaries(len(shared), num_cached, sequence.num_skippable // size)
        sequence.boundaries, sequence.state_at = tuple(n * size for n in counts), len(shared) * size
        return (num_cached - len(shared)) * size

    def awaits_state(self, sequence: Sequence) -> bool:
        """Return whether the plan being made leaves a state that `sequence` can begin with in the next plan.

        If it waits, it computes less: the outputs of one prompt begin behind the first of them.
        """
        states = self.pool.states
        if states is None or not states.has_coming:
            return False
        return states.is_coming(self.cached_prefix(sequence, with_state=False))

    def find_donors(self, sequence: Sequence, shared: list[int]) -> list[Donor]:
        """Return what to copy to the blocks of `sequence` behind its `shared` blocks.

        Those are its host blocks, or the block that shares the most positions. The positions need no row of their own,
        and were planned in an earlier step.
        """
        if self.swap is not None and (swapped := self.swap.find(sequence, len(shared))):
            return swapped
        start, tokens = len(shared) * self.pool.block_size, sequence.tokens
        end = min(start + self.pool.block_size, sequence.num_skippable)
        if not self._prefix_cache or start >= end:
            return []
        found = self.pool.find_donor(self._keys(sequence)[len(shared)], tokens, start, end)
        found = found if self._choose_donor is None else self._choose_donor(found)
        return [] if found is None else [found]

    def confirmed_blocks(self, sequence: Sequence) -> list[int]:
        """Return the leading blocks of a sequence outside the decode batch that no row or result in flight changes.

        No blocks if it shares or copied one that is not confirmed.
        """
        assert not sequence.in_decode_batch
        if any(writes.readers.get(sequence) == sequence.admission_count for writes in self._pending):
            return []
        return sequence.blocks[: min(sequence.num_computed, sequence.num_skippable) // self.pool.block_size]

    def has_room(self, sequence: Sequence, shared: list[int], headroom: int) -> bool:
        """Return whether enough blocks are free for all known positions and one more, leaving `headroom`.

        The `shared` blocks of the cached prefix count as present. A protected one needs all that it can ever use.
        """
        positions = sequence.max_len - 1 if sequence.protected else min(sequence.num_known + 1, sequence.max_len - 1)
        needed = -(-max(positions, 1) // self.pool.block_size)
        available = self.pool.num_free - headroom
        return available >= needed or available - sum(map(self.pool.is_free, shared)) >= needed - len(shared)

    @property
    def headroom(self) -> int:
        """Blocks that admission leaves free: each running sequence needs one every `block_size` steps."""
        return -(-len(self.running) // 4)

    def publish(self, sequence: Sequence) -> None:
        """Publish the blocks that computed positions have filled, and that were not published when planned.

        Of these, copies take the blocks with a prompt position.
        """
        size = self.pool.block_size
        if not self._prefix_cache or sequence.num_computed - sequence.num_published < size:
            return
        for index in range(sequence.num_offered // size, sequence.num_computed // size):
            block, (key, tokens) = sequence.blocks[index], self._block_content(sequence, index)
            if self.pool.publish(block, key, tokens) and index * size < sequence.prompt_len:
                self.pool.offer(block, self._keys(sequence)[index], tokens)
        sequence.num_published = sequence.num_computed // size * size
        sequence.num_offered = max(sequence.num_offered, sequence.num_published)

    def publish_planned(self, sequence: Sequence, step: int, *, is_prompt: bool) -> None:
        """Publish the blocks that the row of `sequence` in the plan `step` fills with confirmed tokens.

        A row of a prompt also offers the block that it fills in part to copies. The last position of a sequence with a
        grammar counts from its result on: its row may be deferred and computed again, and no shared block is written.
        """
        num_known = len(sequence.tokens) - int(sequence.request.is_constrained)
        size, end = self.pool.block_size, min(sequence.num_planned, num_known)
        num_partial = end % size if is_prompt else 0
        if not self._prefix_cache or (end - sequence.num_offered < size and not num_partial):
            return
        writes = InflightRows(sequence, sequence.admission_count, step)
        blocks, keys = sequence.blocks, self._keys(sequence)
        for index in range(sequence.num_offered // size, end // size):
            key, tokens = self._block_content(sequence, index)
            if self.pool.publish(blocks[index], key, tokens):
                self.pool.note_writes(blocks[index], keys[index], tokens, writes)
        sequence.num_offered = end // size * size
        if num_partial:
            tokens = token_bytes(sequence.tokens[end - num_partial : end])
            self.pool.note_writes(blocks[end // size], keys[end // size], tokens, writes)
        if sequence.boundaries and sequence.boundaries[0] == end:
            self._keep_state(sequence)
        if writes.blocks:
            self._pending.append(writes)

    def _keep_state(self, sequence: Sequence) -> None:
        """Have the state behind a row kept that ends at a boundary, unless one is kept behind another such block."""
        end, *rest = sequence.boundaries
        sequence.boundaries, sequence.state_at = tuple(rest), end
        block = sequence.blocks[end // self.pool.block_size - 1]
        if self.pool.states is not None and self.pool.is_published(block):
            self.pool.states.reach(block, sequence.slot)

    def keep_answer_state(self, sequence: Sequence, end: int) -> None:
        """Have the state behind a decode row kept that fills every fourth block: a chat continues there.

        Of each sequence the last two are kept, and none where these might take more than half of all snapshots.
        """
        states, size = self.pool.states, self.pool.block_size
        interval = _ANSWER_BLOCKS * size
        if states is None or end % interval or 4 * len(self.running) > states.num_snapshots:
            return
        sequence.state_at = end
        block = sequence.blocks[end // size - 1]
        if end > sequence.num_offered or self.pool.is_published(block):  # else another block has this state
            states.reach(block, sequence.slot)
        if (old := end - 2 * interval) > sequence.prompt_len:
            states.drop(sequence.blocks[old // size - 1])

    def drop_later_states(self, sequence: Sequence) -> None:
        """Drop the states behind positions of a sequence that are planned again."""
        if (states := self.pool.states) is not None and sequence.state_at is not None:
            for block in sequence.blocks[sequence.num_planned // self.pool.block_size :]:
                states.drop(block)
            sequence.state_at = min(sequence.state_at, sequence.num_planned)

    def _block_content(self, sequence: Sequence, index: int) -> tuple[bytes, bytes]:
        """Return prefix-cache key and `token_bytes` of block `index`, whose tokens are all confirmed."""
        size = self.pool.block_size
        keys, contents = sequence.leading_blocks.get(size) or self._leading_blocks(sequence)
        if index == len(contents):
            tokens = token_bytes(sequence.tokens[index * size : (index + 1) * size])
            contents.append(tokens)
            keys.append(self._block_hash(sequence.request.cache_scope, keys[-1], tokens))
        return keys[index + 1], contents[index]

    def _keys(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of its leading blocks that are made so far, behind the key that starts the chain."""
        return (sequence.leading_blocks.get(self.pool.block_size) or self._leading_blocks(sequence))[0]

    def _leading_blocks(self, sequence: Sequence) -> tuple[list[bytes], list[bytes]]:
        root = self._block_hash(sequence.request.cache_scope, None, b"")
        return sequence.leading_blocks.setdefault(self.pool.block_size, ([root], []))


def _reset_sequence(sequence: Sequence, state: State, computed: int) -> None:
    sequence.state = state
    sequence.max_computed_before = max(sequence.max_computed_before, computed)
    sequence.slot = -1
    sequence.blocks = []
    sequence.num_planned = sequence.num_computed = sequence.planned_step = 0
    sequence.num_drafts = 0
    sequence.num_published = sequence.num_offered = 0
