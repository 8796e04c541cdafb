"""Who decodes: the sequences that take one position in every step, kept so that going on costs next to nothing.

All of them advance together, by one position a *beat*, so a member's place follows from the beat alone: its row
computes position `origin + beat`. Nothing is written to a member while it just goes on; what its fields would say is
made good by `settle`. What is due at a beat (a new block, the last row) is looked up, not looked for. Decides nothing:
planning lets in, takes out and beats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lineclear.scheduler.core.sequence import NOT_DECODING, Sequence, State


class DecodeRows(NamedTuple):
    """The rows of a beat, as columns; they serve every beat until somebody joins or leaves."""

    sequences: tuple[Sequence, ...] = ()
    request_ids: tuple[str, ...] = ()
    outputs: tuple[list[int], ...] = ()
    """Their `tokens`."""
    stops: tuple[frozenset[int], ...] = ()
    slots: tuple[int, ...] = ()
    origins: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()
    """Plus the beat: the index, among the outputs, of the token that the beat samples."""


class DecodeBatch:
    """The members, over blocks of `block_size` positions. Beats are counted from 1."""

    def __init__(self, block_size: int) -> None:
        self.beat = 0  # the last that was planned
        self._size = block_size
        self._step = 0  # in which it was planned
        self._rows: dict[Sequence, tuple[object, ...]] = {}  # member -> its entries in the columns, by joining
        self._cached_rows: DecodeRows | None = None  # until the next change
        self._sum_of_origins = 0
        self._wheel: list[dict[Sequence, None]] = [{} for _ in range(block_size)]  # by origin modulo the block size
        self._ends: dict[int, dict[Sequence, None]] = {}  # beat of the last row -> who
        self._confirmed = (0, 0, 0.0)  # the last beat whose tokens came back, its step, and when

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._rows))

    @property
    def positions(self) -> int:
        """Planned positions of all members together."""
        return self._sum_of_origins + len(self._rows) * (self.beat + 1)

    def join(self, sequence: Sequence) -> None:
        """`sequence`, which lacks one position and has sampled before, takes part from the next beat on."""
        assert sequence.state is State.RUNNING
        assert sequence.num_unplanned == 1
        offset = self.beat + 1
        origin = sequence.num_planned - offset
        sequence.decode_joined_at, sequence.decode_offset = offset, origin
        self._add(sequence)

    def _add(self, sequence: Sequence) -> None:
        """Put a sequence whose `joined` and `origin` are right where beats find it."""
        origin, request = sequence.decode_offset, sequence.request
        self._rows[sequence] = (
            sequence,
            request.request_id,
            sequence.tokens,
            sequence.stop_token_ids,
            sequence.slot,
            origin,
            origin + 1 - sequence.prompt_len,
        )
        self._sum_of_origins += origin
        self._wheel[origin % self._size][sequence] = None
        self._ends.setdefault(sequence.max_len - 2 - origin, {})[sequence] = None
        self._cached_rows = None

    def leave(self, sequence: Sequence) -> None:
        """A member takes no further part; its fields are made good."""
        self.sync(sequence)
        sequence.decode_joined_at = NOT_DECODING
        origin = sequence.decode_offset
        del self._rows[sequence]
        self._sum_of_origins -= origin
        del self._wheel[origin % self._size][sequence]
        end = sequence.max_len - 2 - origin
        del self._ends[end][sequence]
        if not self._ends[end]:
            del self._ends[end]
        self._cached_rows = None

    def sync(self, sequence: Sequence) -> None:
        """Write down what beats planned and heard have made of a member."""
        sequence.num_planned = sequence.decode_offset + self.beat + 1
        sequence.num_known = sequence.num_planned + 1
        if self.beat >= sequence.decode_joined_at:
            sequence.planned_step = self._step
        offset, step, at = self._confirmed
        if offset >= sequence.decode_joined_at:
            sequence.num_computed = sequence.decode_offset + offset + 1
            sequence.last_step, sequence.last_token_at = step, at

    # --- beats ------------------------------------------------------------------------------------------------------

    def needing_block(self) -> list[Sequence]:
        """Whose row in the next beat needs a further block."""
        beat, size = self.beat + 1, self._size
        return [s for s in self._wheel[-beat % size] if s.decode_offset + beat == len(s.blocks) * size]

    def next_step(self, step: int) -> DecodeRows:
        """One position more for every member, in `step`. The rows."""
        self.beat += 1
        self._step = step
        if self._cached_rows is None:
            self._cached_rows = DecodeRows(*zip(*self._rows.values(), strict=True))
        return self._cached_rows

    def finishing(self) -> list[Sequence]:
        """Who had the last row of all in the last beat."""
        return list(self._ends.get(self.beat, ()))

    def completing_block(self) -> list[Sequence]:
        """Whose block the last beat fills."""
        return list(self._wheel[-(self.beat + 1) % self._size])

    def on_result(self, beat: int, step: int, now: float) -> None:
        """The tokens of `beat` came back. To be called for every beat, in order."""
        self._confirmed = (beat, step, now)

    def check(self) -> None:
        """Every invariant of the settled members. AssertionError on a breach."""
        assert self.positions == sum(s.num_planned for s in self._rows)
        for s in self._rows:
            assert s.state is State.RUNNING
            assert s.decode_joined_at <= self.beat + 1
            assert s.num_unplanned == 1, "takes part and does not lack just one position"
            assert s in self._wheel[s.decode_offset % self._size]
            assert s in self._ends[s.max_len - 2 - s.decode_offset]
        assert sum(map(len, self._wheel)) == sum(map(len, self._ends.values())) == len(self._rows)
        if self._cached_rows is not None:
            assert self._cached_rows.sequences == tuple(self._rows)
