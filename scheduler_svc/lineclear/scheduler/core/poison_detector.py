"""Finds the request that crashes workers (a poison pill).

When a worker is lost, every sequence with a row in flight gets a crash count. After two crashes without progress past
the position of the first, a sequence is isolated: it runs alone until it passes that position or the worker is lost
again. Only a crash while it runs alone proves a request poisonous. So a poison request costs three workers, and other
requests lose only time.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from lineclear.scheduler.core.inflight_step import InflightStep
from lineclear.scheduler.core.sequence import Sequence, State

_CLEAR_POSITIONS = 2  # positions to compute after those in flight at the loss, so that the last is a decode row


class WorkerLoss(Enum):
    """How a worker was lost."""

    CLEAN = 0
    """It said goodbye or has to join again: no request is suspected."""
    KILLED = 1
    """It was killed, or the cause is unknown. Only several kills in a row count against a request that ran alone."""
    CRASHED = 2
    """It exited by itself, hung, or failed a step."""


class PoisonDetector:
    """Counts crashes. No request of a server without them comes here."""

    def __init__(self, max_isolated_crashes: int, max_isolated_kills: int) -> None:
        self._max_crashes, self._max_kills = max_isolated_crashes, max_isolated_kills
        self.suspects: dict[Sequence, None] = {}
        """Live sequences with a crash count."""

    def record_crash(self, steps: Iterable[InflightStep]) -> Sequence | None:
        """Count a crash for every live sequence with a row in `steps`; return the sequence if it ran alone.

        Call it first of all after a loss, with the decode batch dissolved.
        """
        in_flight = list({sequence: None for inflight in steps for sequence in inflight.sequences()})
        for sequence in in_flight:
            if sequence.state is not State.FINISHED:
                sequence.crash_count += 1
                reached = sequence.num_planned or sequence.num_known - 1  # after a preemption nothing is planned
                reached += sequence.num_drafts
                clear = min(reached + _CLEAR_POSITIONS, sequence.max_len - 1)
                sequence.clear_position = max(sequence.clear_position, clear)
                self.suspects[sequence] = None
        if len(in_flight) != 1 or in_flight[0].state is State.FINISHED:
            return None
        return in_flight[0]

    def is_poison(self, sequence: Sequence, loss: WorkerLoss) -> bool:
        """Return whether a loss while `sequence` ran alone proves it poisonous. Its first crash never counts."""
        if sequence.crash_count > 1:
            sequence.isolated_crashes += loss is WorkerLoss.CRASHED
            sequence.isolated_kills += loss is WorkerLoss.KILLED
        return sequence.isolated_crashes / self._max_crashes + sequence.isolated_kills / self._max_kills >= 1.0

    def isolated_by_age(self) -> list[Sequence]:
        """Return the sequences that must run alone, oldest first."""
        return sorted((s for s in self.suspects if s.must_isolate), key=lambda s: s.queue_key)

    def clear_passed(self) -> None:
        """Clear every suspect that computed past its `clear_position`."""
        for sequence in [s for s in self.suspects if s.num_computed >= s.clear_position]:
            self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Clear a sequence that passed its position or has ended."""
        self.suspects.pop(sequence, None)
        sequence.crash_count = sequence.isolated_crashes = sequence.isolated_kills = sequence.clear_position = 0
