"""The pauses of sequences whose drafts did not gain enough: in the decode batch until a step of the worker."""

from __future__ import annotations

from lineclear.scheduler.core.sequence import Sequence


class DraftPauses:
    """Sequences by the step at which their pause ends, so that a step costs nothing per sequence."""

    def __init__(self) -> None:
        self._by_step: dict[int, dict[Sequence, None]] = {}
        self._first = 0  # the earliest of these steps

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that joins the decode batch and pauses."""
        assert sequence.draft_history is not None
        step = sequence.draft_history.paused_until
        assert step is not None, "a sequence without a pause"
        self._first = min(self._first, step) if self._by_step else step
        self._by_step.setdefault(step, {})[sequence] = None

    def pop(self, step: int, epoch: int) -> list[Sequence]:
        """Remove the pauses that end by `step`; return the sequences that are still in the decode batch of `epoch`."""
        if not self._by_step or step < self._first:
            return []
        ended = [at for at in self._by_step if at <= step]
        found = [(at, sequence) for at in ended for sequence in self._by_step.pop(at)]
        self._first = min(self._by_step, default=0)
        return [s for at, s in found if s.in_decode_batch and s.epoch == epoch and _pauses_until(s, at)]


def _pauses_until(sequence: Sequence, step: int) -> bool:
    return sequence.draft_history is not None and sequence.draft_history.paused_until == step
