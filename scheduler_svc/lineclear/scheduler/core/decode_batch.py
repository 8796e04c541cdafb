"""The decode batch: every running sequence that computes one position in each step, kept as columns.

All members advance together by one position per *decode step*, so the position of a member's row follows from the
number of the decode step alone: `decode_offset + decode_step`. A member's own fields are not written while it stays in
the batch; `sync` brings them up to date. Members that need a block or have their last row are looked up by remainder
and by decode step, so a step costs nothing per member in Python calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lineclear.scheduler.core.sequence import Sequence, State


class DecodeRows(NamedTuple):
    """The rows of a decode step as columns, one entry a sequence; valid until a sequence joins or leaves."""

    sequences: tuple[Sequence, ...] = ()
    request_ids: tuple[str, ...] = ()
    token_lists: tuple[list[int], ...] = ()
    """Each sequence's `tokens`, to append to."""
    stop_token_ids: tuple[frozenset[int], ...] = ()
    slots: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    """Each sequence's `decode_offset`: plus the decode step, the position of its row."""
    index_offsets: tuple[int, ...] = ()
    """Plus the decode step: the index, among the output tokens, of the token that the row samples."""


class DecodeBatch:
    """The members, over blocks of `block_size` positions. Decode steps are counted from 1."""

    def __init__(self, block_size: int) -> None:
        self.decode_step = 0  # the last one planned
        self._block_size = block_size
        self._step = 0  # the step that has it
        self._rows: dict[Sequence, tuple[object, ...]] = {}  # member -> its entries in the columns, in joining order
        self.resting: dict[Sequence, None] = {}  # members whose request asks for drafts, in joining order
        self._cached_rows: DecodeRows | None = None  # until a member joins or leaves
        self._sum_of_offsets = 0
        self._by_remainder: list[dict[Sequence, None]] = [{} for _ in range(block_size)]  # decode_offset % block_size
        self._by_last_step: dict[int, dict[Sequence, None]] = {}  # decode step of the last row -> members
        self._confirmed = (0, 0, 0.0)  # the last decode step with a result, the step that had it, and the time

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._rows))

    @property
    def num_positions(self) -> int:
        """Planned positions of all members together."""
        return self._sum_of_offsets + len(self._rows) * (self.decode_step + 1)

    def join(self, sequence: Sequence) -> None:
        """Add a running sequence that lacks one position and has sampled before, from the next decode step on."""
        assert sequence.state is State.RUNNING
        assert sequence.num_unplanned == 1
        sequence.in_decode_batch = True
        sequence.decode_joined_at = self.decode_step + 1
        sequence.decode_offset = sequence.num_planned - sequence.decode_joined_at
        self._add(sequence)

    def _add(self, sequence: Sequence) -> None:
        """Index a sequence whose decode fields are set."""
        offset, request = sequence.decode_offset, sequence.request
        self._rows[sequence] = (
            sequence,
            request.request_id,
            sequence.tokens,
            sequence.stop_token_ids,
            sequence.slot,
            offset,
            offset + 1 - sequence.prompt_len,
        )
        if request.max_drafts:
            self.resting[sequence] = None
        self._sum_of_offsets += offset
        self._by_remainder[offset % self._block_size][sequence] = None
        self._by_last_step.setdefault(sequence.max_len - 2 - offset, {})[sequence] = None
        self._cached_rows = None

    def leave(self, sequence: Sequence) -> None:
        """Remove a member and bring its fields up to date."""
        self.sync(sequence)
        sequence.in_decode_batch = False
        offset = sequence.decode_offset
        del self._rows[sequence]
        self.resting.pop(sequence, None)
        self._sum_of_offsets -= offset
        del self._by_remainder[offset % self._block_size][sequence]
        last = sequence.max_len - 2 - offset
        del self._by_last_step[last][sequence]
        if not self._by_last_step[last]:
            del self._by_last_step[last]
        self._cached_rows = None

    def sync(self, sequence: Sequence) -> None:
        """Write what decode steps planned and confirmed into the fields of a member."""
        sequence.num_planned = sequence.decode_offset + self.decode_step + 1
        sequence.num_known = sequence.num_planned + 1
        if self.decode_step >= sequence.decode_joined_at:
            sequence.planned_step = self._step
        decode_step, step, at = self._confirmed
        if decode_step >= sequence.decode_joined_at:
            sequence.num_computed = sequence.decode_offset + decode_step + 1
            sequence.last_step, sequence.last_token_at = step, at

    def needing_block(self) -> list[Sequence]:
        """Return the members whose row in the next decode step needs a further block."""
        step, size = self.decode_step + 1, self._block_size
        return [s for s in self._by_remainder[-step % size] if s.decode_offset + step == len(s.blocks) * size]

    def next_step(self, step: int) -> DecodeRows:
        """Advance every member by one position, in plan `step`, and return the rows."""
        self.decode_step += 1
        self._step = step
        if self._cached_rows is None:
            self._cached_rows = DecodeRows(*zip(*self._rows.values(), strict=True))
        return self._cached_rows

    def finishing(self) -> list[Sequence]:
        """Return the members whose last row of all is in the last decode step."""
        return list(self._by_last_step.get(self.decode_step, ()))

    def completing_block(self) -> list[Sequence]:
        """Return the members whose row in the last decode step fills a block."""
        return list(self._by_remainder[-(self.decode_step + 1) % self._block_size])

    def left_since(self, rows: DecodeRows, decode_step: int) -> list[int]:
        """Return the indices in `rows`, planned as `decode_step`, of the sequences that left the batch afterwards."""
        if rows is self._cached_rows:
            return []
        return [
            index
            for index, sequence in enumerate(rows.sequences)
            if not sequence.in_decode_batch or sequence.decode_joined_at > decode_step
        ]

    def on_result(self, decode_step: int, step: int, now: float) -> None:
        """Confirm the tokens of `decode_step`. Call it for every decode step, in order."""
        self._confirmed = (decode_step, step, now)

    def check(self) -> None:
        """Check every invariant of members that are up to date. Raises AssertionError."""
        assert self.num_positions == sum(s.num_planned for s in self._rows)
        for s in self._rows:
            assert s.state is State.RUNNING
            assert s.in_decode_batch
            assert s.decode_joined_at <= self.decode_step + 1
            assert s.num_unplanned == 1, "a member that does not lack exactly one position"
            assert s in self._by_remainder[s.decode_offset % self._block_size]
            assert s in self._by_last_step[s.max_len - 2 - s.decode_offset]
        indexed = sum(map(len, self._by_remainder)), sum(map(len, self._by_last_step.values()))
        assert indexed == (len(self._rows), len(self._rows))
        assert [*self.resting] == [s for s in self._rows if s.request.max_drafts]
        if self._cached_rows is not None:
            assert self._cached_rows.sequences == tuple(self._rows)
