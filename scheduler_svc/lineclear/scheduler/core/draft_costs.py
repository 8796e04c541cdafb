"""What drafts cost on a worker, in tokens, and how many tokens their trials may lose.

The time that the step-time model predicts is not all. A plan that waits for a result also pays the way to the scheduler
and back, and rows with drafts are handled one by one. So the time from result to result is measured.
"""

from __future__ import annotations

from typing import NamedTuple

from lineclear.scheduler.core.step_time_model import StepTimeModel

_WEIGHT = 1 / 16
"""Of the newest step in a mean."""
_UNFITTED_COST, _MAX_UNFITTED_ROWS = 0.1, 4
"""Assumed cost of a position, and the most rows with drafts, before the step-time model can predict."""
_SHARE = 0.005
"""Of the tokens of a worker that trials may lose, besides what drafts gained."""
_FIRST_TOKENS, _MAX_TOKENS = 3.0, 6.0


class DraftCosts(NamedTuple):
    """What drafts cost in a step, in tokens that the step yields without them."""

    per_position: float
    """Of each position to verify."""
    per_row: float
    """Of a row with drafts: it waits for the result before it."""

    def of(self, num_drafts: int) -> float:
        """Return the cost of a row with so many drafts."""
        return self.per_row + num_drafts * self.per_position


class DraftTimes:
    """Means of measured times of one worker, in seconds."""

    __slots__ = ("_beyond", "_counts", "_per_draft", "_row_ahead", "_row_waiting", "is_used")

    def __init__(self) -> None:
        self.is_used = False
        """A request asked for drafts: measure from now on."""
        self._beyond = 0.0  # between two steps without drafts
        self._row_ahead = self._row_waiting = 0.0  # of a row with drafts, in a plan made ahead and in one that waited
        self._per_draft = 0.0  # to make one
        self._counts = [0, 0, 0, 0]

    def observe(self, predicted_seconds: float, total_seconds: float) -> None:
        """Learn from a step without drafts: `total_seconds` passed from the result before it to its own.

        Here and below, a pause of the machine counts at most as long as the step.
        """
        self._beyond += self._weight(0) * (min(total_seconds - predicted_seconds, predicted_seconds) - self._beyond)

    def observe_rows(self, num_rows: int, predicted_seconds: float, total_seconds: float, *, is_ahead: bool) -> None:
        """Learn from a step with `num_rows` rows that might verify drafts. A plan that waited has the time since then.

        `predicted_seconds` includes the time to make the drafts.
        """
        extra = min(total_seconds - predicted_seconds - max(0.0, self._beyond), predicted_seconds) / num_rows
        if is_ahead:
            self._row_ahead += self._weight(1) * (extra - self._row_ahead)
        else:
            self._row_waiting += self._weight(2) * (extra - self._row_waiting)

    def observe_drafts(self, num_drafts: int, seconds: float) -> None:
        """Learn that the worker made `num_drafts` drafts in `seconds`."""
        self._per_draft += self._weight(3) * (seconds / num_drafts - self._per_draft)

    def _weight(self, kind: int) -> float:
        self._counts[kind] = min(self._counts[kind] + 1, round(1 / _WEIGHT))
        return 1 / self._counts[kind]

    def costs(self, model: StepTimeModel, rows: int, kv_tokens: int, depth: int, *, is_pipelined: bool) -> DraftCosts:
        """Return the costs in a step that decodes `rows` sequences and reads `kv_tokens` positions.

        `depth` plans may be in flight. `is_pipelined`: other sequences are planned ahead of the result, so that a row
        with drafts misses the plans in between.
        """
        missed = float(depth - 1) if is_pipelined else 0.0
        if not model.is_fitted or rows < 1:
            return DraftCosts(_UNFITTED_COST if rows <= _MAX_UNFITTED_ROWS else 1.0, missed)
        _, per_token, per_kv = model.coefficients
        seconds = max(model.predict(rows, kv_tokens) + max(0.0, self._beyond), 1e-9)  # of a step without drafts
        position = rows * (per_token + self._per_draft) + kv_tokens * per_kv
        row = rows * max(0.0, self._row_ahead if is_pipelined else self._row_waiting)
        return DraftCosts(position / seconds, missed + row / seconds)


class TrialBudget:
    """The tokens that trials of drafts may lose on one worker: a share of all tokens, and what drafts gained.

    Trials of many requests that start together so begin one after the other, and where drafts gain nothing they cost
    little, whatever the number of requests.
    """

    __slots__ = ("_step", "tokens")

    def __init__(self) -> None:
        self.tokens = _FIRST_TOKENS
        self._step = 0

    def earn(self, step: int, rows: int) -> None:
        """Add the share of the steps since the last call; each had about `rows` rows."""
        self.add(_SHARE * rows * (step - self._step))
        self._step = step

    def add(self, tokens: float) -> None:
        """Add what drafts gained; negative: what they cost."""
        self.tokens = min(self.tokens + tokens, _MAX_TOKENS)
