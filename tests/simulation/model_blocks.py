"""Model of the block pool: the users of each block, the prefix cache, what may be copied, and what must be zeroed."""

from __future__ import annotations

from collections.abc import Sequence

from simulation.invariant_error import require
from simulation.model_sequence import ModelSequence
from simulation.model_states import ModelStates

from lineclear.wire.messages import BlockCopy

Key = tuple[bytes, tuple[int, ...]]
"""Cache salt and all tokens up to the end of the block, or of its positions that are filled."""


Write = tuple[ModelSequence, int, int]
"""A row in flight: its sequence, the admission, and the step."""


class ModelBlocks:
    """The blocks of one worker; empty without a worker."""

    def __init__(self, prefix_cache: bool, states: ModelStates) -> None:
        self._prefix_cache, self.states = prefix_cache, states
        self.reset(0, 1)

    def reset(self, num_blocks: int, size: int) -> None:
        """Start with free blocks of `size` positions."""
        self.size = size
        self.num_dropped = 0  # blocks that left the prefix cache
        self._users: list[set[ModelSequence]] = [set() for _ in range(num_blocks)]
        self._index: dict[Key, int] = {}  # the prefix cache
        self._key_of: dict[int, Key] = {}
        self._unused: dict[int, None] = {}  # blocks in the index without user, least recently used first
        self._sources: dict[int, Key] = {}  # blocks with positions that a request may copy
        self._partial: dict[int, None] = {}  # of these, the free ones outside of the index, oldest first
        self._planned: dict[int, Key] = {}  # the same, written by the plan that is being checked
        self._tainted: set[int] = set()
        # Free block -> the admission that left it with rows in flight, and the step of the last row.
        self._pending: dict[int, Write] = {}
        self._unconfirmed: dict[int, Write] = {}  # used block that was published before the result of its row
        self._reads: list[tuple[ModelSequence, int, set[Write]]] = []  # admissions that share unconfirmed blocks

    def clear_cache(self) -> None:
        self.num_dropped += len(self._index)
        for block in self._key_of:
            self.states.drop(block)
        self._index.clear()
        self._key_of.clear()
        self._unused.clear()
        self._partial.clear()
        self._sources.clear()

    @property
    def num_used(self) -> int:
        return sum(map(bool, self._users))

    @property
    def num_free(self) -> int:
        return len(self._users) - self.num_used

    @property
    def num_cached(self) -> int:
        """Number of free blocks that keep a prefix."""
        return sum(not self._users[block] for block in self._key_of)

    def num_unused(self, blocks: Sequence[int]) -> int:
        return sum(not self._users[block] for block in blocks)

    def cached_prefix(self, sequence: ModelSequence) -> list[int]:
        """Return the longest cached prefix that a request can begin with: with recurrent state, one with a state."""
        found = self.whole_prefix(sequence)
        return found[: self.states.num_usable(found)] if self.states.is_recurrent else found

    def whole_prefix(self, sequence: ModelSequence) -> list[int]:
        """Return the longest cached prefix, never with a position that has to be reported."""
        found: list[int] = []
        tokens = sequence.tokens
        if self._prefix_cache:
            for end in range(self.size, sequence.num_cacheable + 1, self.size):
                block = self._index.get((scope(sequence), tokens[:end]))
                if block is None:
                    break
                found.append(block)
        return found

    def num_common(self, sequence: ModelSequence, start: int) -> dict[int, int]:
        """Return how many positions of `sequence` from `start` on each block has: those with a quarter of a block."""
        tokens = sequence.tokens
        found: dict[int, int] = {}
        if self.states.is_recurrent:
            return found  # no state is kept inside of a block
        for block, (salt, others) in self._sources.items():
            if salt == scope(sequence) and start < len(others) <= start + self.size:
                equal = [a == b for a, b in zip(others, tokens[: sequence.num_cacheable], strict=False)]
                common = equal.index(False) if False in equal else len(equal)
                if common - start >= max(1, self.size // 4):
                    found[block] = common - start
        return found

    def check_copy(self, sequence: ModelSequence, copy: BlockCopy | None) -> Write | None:
        """Check that a request that starts copies as many positions as any block of an earlier plan has.

        Return the row in flight that writes them.
        """
        num_copied = copy.num_positions if copy else 0
        found = self.num_common(sequence, sequence.num_shared)
        longest = max(found.values(), default=0)
        require(
            num_copied == longest, "I4", f"{num_copied} positions are copied, the longest common part has {longest}"
        )
        if copy is None:
            return None
        require(found.get(copy.source) == longest, "I4", "the source has the copied positions since an earlier plan")
        return self.writes_to(copy.source)

    def users(self, block: int) -> set[ModelSequence]:
        return self._users[block]

    def reads_unconfirmed(self, sequence: ModelSequence) -> bool:
        """Return whether a running sequence shares or copied blocks whose row is in flight."""
        return any(entry[:2] == (sequence, sequence.admission_count) for entry in self._reads)

    def writes_to(self, block: int) -> Write | None:
        """Return the row in flight that writes to a used block."""
        return self._unconfirmed.get(block)

    def end_plan(self) -> None:
        """Let later plans copy what this one writes."""
        self._sources |= self._planned
        self._planned = {}

    def share(self, blocks: Sequence[int], sequence: ModelSequence, copied: Write | None) -> None:
        """Start the block table of `sequence` with its cached prefix; the row `copied` writes what it copies."""
        sequence.blocks = list(blocks)
        for block in blocks:
            self._users[block].add(sequence)
            self._unused.pop(block, None)
        reads = {self._unconfirmed[block] for block in blocks if block in self._unconfirmed}
        if reads := reads | ({copied} if copied else set()):
            self._reads.append((sequence, sequence.admission_count, reads))

    def take(self, block: int, sequence: ModelSequence, zeroed: set[int], *, is_copied: bool) -> None:
        """Give a free block to `sequence`, and remove it from `zeroed`. If `is_copied`, a copy replaces its cells."""
        require(0 <= block < len(self._users) and not self._users[block], "I1", "a taken block is free")
        if block in self._key_of or block in self._partial:
            kept = self._key_of.keys() | self._partial.keys()
            empty = sum(not users and b not in kept for b, users in enumerate(self._users))
            require(empty == 0, "I4", "a cached or partial block is evicted only without empty blocks")
        if block in self._partial:
            require(next(iter(self._partial)) == block, "I4", "the oldest partial block is evicted")
            del self._partial[block]
        elif block in self._key_of:
            require(not self._partial, "I4", "partial blocks are evicted before cached ones")
            require(next(iter(self._unused)) == block, "I4", "the least recently used cached block is evicted")
            self.states.drop(block)
            del self._unused[block], self._index[self._key_of.pop(block)]
            self.num_dropped += 1
        self._sources.pop(block, None)
        if block in self._tainted or block in self._pending:
            require(block in zeroed or is_copied, "I18", "a tainted block is zeroed before it is used again")
            self._tainted.discard(block)
            self._pending.pop(block, None)
            zeroed.discard(block)
        self._users[block].add(sequence)
        sequence.blocks.append(block)

    def check_write(self, sequence: ModelSequence, start: int, end: int) -> None:
        """Check that `sequence` may compute positions [start, end)."""
        for block in sequence.blocks[start // self.size : -(-end // self.size)]:
            require(self._users[block] == {sequence}, "I3", "a shared block is never written")
            require(block not in self._key_of, "I3", "a published block is never written")

    def publish_planned(self, sequence: ModelSequence, step: int, *, is_prompt: bool) -> None:
        """Publish the full blocks of confirmed tokens that are planned; they are unconfirmed until the result.

        Of a prompt, the block that is filled in part may be copied from the next plan on.
        """
        num_known = len(sequence.tokens) - (sequence.request.sampling.grammar != "")  # its last row may be deferred
        end = min(sequence.num_planned, num_known)
        written = {block: self._key_of[block] for block in self._publish(sequence, end)}
        if sequence.boundaries and sequence.boundaries[0] == end:
            sequence.state_at, block = sequence.boundaries.pop(0), sequence.blocks[end // self.size - 1]
            if block in self._key_of:
                self.states.leave(block, sequence, self._key_of[block])
        if self._prefix_cache and is_prompt and end % self.size:
            written[sequence.blocks[end // self.size]] = scope(sequence), sequence.tokens[:end]
        self._unconfirmed |= dict.fromkeys(written, (sequence, sequence.admission_count, step))
        self._planned |= written

    def publish(self, sequence: ModelSequence, end: int) -> None:
        """Publish the full blocks below `end`, up to which all positions are computed."""
        published = {block: self._key_of[block] for block in self._publish(sequence, end)}
        # Blocks without a prompt position are shared as a whole only.
        first_output = len(sequence.request.prompt)
        self._sources |= {b: (salt, key) for b, (salt, key) in published.items() if len(key) - self.size < first_output}
        sequence.num_computed = end
        sequence.num_published = max(sequence.num_published, end // self.size * self.size)

    def _publish(self, sequence: ModelSequence, end: int) -> list[int]:
        published = []
        if self._prefix_cache:
            tokens = sequence.tokens
            for index in range(sequence.num_offered // self.size, end // self.size):
                key, block = (scope(sequence), tokens[: (index + 1) * self.size]), sequence.blocks[index]
                if self.states.is_recurrent and not self.states.has_state(self._index.get(key, block)):
                    self._give_way(key)
                if key not in self._index and block not in self._key_of and block not in self._tainted:
                    self._index[key] = block
                    self._key_of[block] = key
                    published.append(block)
                elif block not in self._key_of:
                    self.states.drop(block)
            sequence.num_offered = max(sequence.num_offered, end // self.size * self.size)
        return published

    def _give_way(self, key: Key) -> None:
        """Take the block with a key out of the prefix cache: the last one that was computed takes its place."""
        if key in self._index:
            block = self._index[key]
            self._unpublish(block)
            self._unused.pop(block, None)

    def keep_answer_state(self, sequence: ModelSequence, end: int, num_running: int) -> None:
        """Note that a decode row leaves a state, behind every fourth block; the last two of a sequence are kept."""
        interval = 4 * self.size
        if not self.states.is_recurrent or end % interval or 4 * num_running > self.states.num_places:
            return
        block = sequence.blocks[end // self.size - 1]
        if block in self._key_of or end > sequence.num_offered:  # it is published, or may be later
            self.states.leave(block, sequence, self._key_of.get(block))
        sequence.state_at = end
        if end - 2 * interval > len(sequence.request.prompt):
            self.states.drop(sequence.blocks[(end - 2 * interval) // self.size - 1])

    def num_lost_positions(self, sequence: ModelSequence) -> int:
        """Return how many planned positions no cached block would keep after a preemption."""
        if self.states.is_recurrent:
            return sequence.num_planned - sequence.state_at
        if not self._prefix_cache:
            return sequence.num_planned
        return sequence.num_planned - sequence.num_published

    def _has_part(self, block: int) -> bool:
        """Return whether positions of the block may be copied: a quarter of a block at least."""
        return (
            not self.states.is_recurrent
            and block in self._sources
            and (len(self._sources[block][1]) - 1) % self.size + 1 >= max(1, self.size // 4)
        )

    def taint(self, sequence: ModelSequence) -> None:
        """Unpublish the blocks of a sequence with non-finite values, and zero them before reuse."""
        sequence.tainted = True
        for block in sequence.blocks:
            self._unpublish(block)
            self._unconfirmed.pop(block, None)
            self._tainted.add(block)

    def _unpublish(self, block: int) -> None:
        self._sources.pop(block, None)
        if block in self._key_of:
            del self._index[self._key_of.pop(block)]
            self.states.drop(block)
            self.num_dropped += 1

    def readers(self, bad: set[tuple[ModelSequence, int]]) -> set[tuple[ModelSequence, int]]:
        """Return the admissions that share blocks of `bad` ones, or of one of themselves."""
        found: set[tuple[ModelSequence, int]] = set()
        while True:
            reached = bad | found
            new = {(s, n) for s, n, reads in self._reads if any((w[0], w[1]) in reached for w in reads)}
            if new <= found:
                return found
            found |= new

    def resolve_pending(self, step: int, tainted: set[tuple[ModelSequence, int]]) -> None:
        """Settle the writes up to `step`; those of the `tainted` admissions were non-finite."""
        for blocks in (self._pending, self._unconfirmed):
            for block, (sequence, admission, last) in list(blocks.items()):
                is_tainted = (sequence, admission) in tainted
                if is_tainted or last <= step:
                    del blocks[block]
                    if is_tainted:
                        self._unpublish(block)
                        self._tainted.add(block)
        for entry in self._reads:
            entry[2].difference_update([w for w in entry[2] if w[2] <= step or (w[0], w[1]) in tainted])
        self._reads = [entry for entry in self._reads if entry[2]]

    def release(self, sequence: ModelSequence) -> None:
        if sequence.num_planned > sequence.num_computed and not sequence.tainted:
            writes = sequence, sequence.admission_count, sequence.planned_step
            for block in sequence.blocks[sequence.num_computed // self.size :]:
                if self._users[block] == {sequence}:
                    self._unpublish(block)
                    self._unconfirmed.pop(block, None)
                    self._pending[block] = writes
        for block in reversed(sequence.blocks):
            self._users[block].discard(sequence)
            if not self._users[block] and (block not in self._key_of or block in self._unconfirmed):
                self.states.drop(block)
            if not self._users[block] and block in self._unconfirmed:
                self._unpublish(block)
                self._pending[block] = self._unconfirmed.pop(block)
            elif not self._users[block] and block in self._key_of:
                self._unused[block] = None
            elif not self._users[block] and self._has_part(block):
                self._partial[block] = None
            elif not self._users[block]:
                self._sources.pop(block, None)
        sequence.blocks = []


def scope(sequence: ModelSequence) -> tuple[bytes, bytes]:
    """Return what requests must have in common to share blocks."""
    return sequence.request.cache_salt, sequence.request.adapter
