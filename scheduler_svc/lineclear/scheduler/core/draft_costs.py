"""What drafts cost on a worker, in tokens, and how many tokens their trials may lose.

The time of a step on the worker is not all: a plan that waits for the result before it also pays the way to the
scheduler and back, which plans made ahead do not. Both are measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lineclear.scheduler.core.step_time_model import StepTimeModel

_WEIGHT = 1 / 16
"""Of the newest step in a mean."""
_UNFITTED_COST, _MAX_UNFITTED_ROWS = 0.1, 4
"""Assumed cost of a position, and the most rows with drafts, before the step-time model can predict."""
_SHARE = 0.01
"""Of the tokens of a worker that trials may lose, besides what drafts gained."""
_FIRST_TOKENS, _MAX_TOKENS = 4.0, 8.0


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

    __slots__ = ("_ahead", "_counts", "_per_draft", "_waiting", "is_used")

    def __init__(self) -> None:
        self.is_used = False
        """A request asked for drafts: measure from now on."""
        self._ahead = self._waiting = 0.0  # beyond the step itself, of plans made ahead and of plans that waited
        self._per_draft = 0.0  # to make one
        self._counts = [0, 0, 0]

    def observe(self, step_seconds: float, total_seconds: float, *, is_ahead: bool) -> None:
        """Learn from a step that took `total_seconds` with its way to the worker and back.

        A plan made ahead has no way: its total begins at the result before. A pause of the machine counts at most as
        long as the step.
        """
        beyond = min(total_seconds - step_seconds, step_seconds)
        if is_ahead:
            self._ahead += self._weight(0) * (beyond - self._ahead)
        else:
            self._waiting += self._weight(1) * (beyond - self._waiting)

    def observe_drafts(self, num_drafts: int, seconds: float) -> None:
        """Learn that the worker made `num_drafts` drafts in `seconds`."""
        self._per_draft += self._weight(2) * (seconds / num_drafts - self._per_draft)

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
        waiting = max(0.0, self._waiting)
        beyond = waiting if depth == 1 else max(0.0, self._ahead)
        seconds = max(model.predict(rows, kv_tokens) + beyond, 1e-9)  # of a step without drafts
        position = rows * (per_token + self._per_draft) + kv_tokens * per_kv
        return DraftCosts(position / seconds, missed or max(0.0, waiting - beyond) / seconds)

    def dump(self) -> list[Any]:
        """Return a copy of the state."""
        return [self.is_used, self._ahead, self._waiting, self._per_draft, list(self._counts)]

    def load(self, state: list[Any]) -> None:
        """Restore a dump."""
        self.is_used, self._ahead, self._waiting, self._per_draft, self._counts = state


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

    def dump(self) -> list[Any]:
        """Return a copy of the state."""
        return [self.tokens, self._step]

    def load(self, state: list[Any]) -> None:
        """Restore a dump."""
        self.tokens, self._step = state
