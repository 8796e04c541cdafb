"""Who may have brought a worker down. Strikes only select suspects; a verdict needs a crash while running alone.

When a worker is lost with plans in flight, everybody who had a row in them is struck. Who is struck twice without
having got past the place of the first time is run alone, one suspect at a time, until it has got past it or the worker
is lost again. So a request that kills workers costs three of them and fails, and the others lose nothing but time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from lineclear.scheduler.core.inflight_step import InflightStep
from lineclear.scheduler.core.sequence import Sequence, State

_FATAL_CRASHES = 2  # from so many on, a suspect runs alone
_PROBATION = 2  # positions past those in flight at the loss: the last of them is surely a decode of its own


class WorkerLoss(Enum):
    """How a worker was lost."""

    CLEAN = 0
    """It said goodbye, or has to join again: nobody is struck."""
    KILLED = 1
    """Somebody killed it, or nobody knows. It takes many in a row to say something against who was running."""
    CRASHED = 2
    """It died by itself, hung, or a step of it failed."""


class PoisonDetector:
    """The struck among the live sequences."""

    def __init__(self, max_lone_crashes: int, max_lone_kills: int) -> None:
        self._max_crashes, self._max_kills = max_lone_crashes, max_lone_kills
        self._suspects: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    def record_crash(self, flights: Iterable[InflightStep]) -> Sequence | None:
        """Everybody who has a row in `flights` gets a strike. Returns the one that ran alone, if it was one.

        To be called before anything else is done about the loss, and with nobody decoding in beats.
        """
        everybody = {sequence: None for flight in flights for sequence in flight.sequences()}
        for sequence in everybody:
            if sequence.state is not State.FINISHED:
                sequence.crash_count += 1
                reached = (
                    sequence.num_planned or sequence.num_known - 1
                )  # nothing is planned of who was preempted meanwhile
                sequence.clear_position = min(max(sequence.clear_position, reached + _PROBATION), sequence.max_len - 1)
                self._suspects[sequence] = None
        (*others, last) = everybody or (None,)
        return None if others or last is None or last.state is State.FINISHED else last

    def is_poison(self, sequence: Sequence, loss: WorkerLoss) -> bool:
        """A worker was lost while `sequence`, just struck, ran alone. The first time of all proves nothing."""
        if sequence.crash_count > 1:
            sequence.isolated_crashes += loss is WorkerLoss.CRASHED
            sequence.isolated_kills += loss is WorkerLoss.KILLED
        return sequence.isolated_crashes / self._max_crashes + sequence.isolated_kills / self._max_kills >= 1.0

    def next_isolated(self) -> Sequence | None:
        """Who has to run with nobody beside it: the oldest of those struck too often."""
        if not self._suspects:
            return None
        return min(
            (s for s in self._suspects if s.crash_count >= _FATAL_CRASHES), key=lambda s: s.queue_key, default=None
        )

    def clear_passed(self) -> None:
        """Forget the strikes of those who have got past the place where they were struck."""
        for sequence in [s for s in self._suspects if s.num_computed >= s.clear_position]:
            self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It is innocent, or has ended."""
        if self._suspects:
            self._suspects.pop(sequence, None)
            sequence.crash_count = sequence.isolated_crashes = sequence.isolated_kills = sequence.clear_position = 0

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._suspects)
