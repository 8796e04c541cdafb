"""How many drafts a sequence verifies in a row (speculative decoding, Leviathan et al. 2023), 0 included.

A row with drafts computes several positions and samples at each. It returns the leading drafts that equal their samples
and one token more. A sample depends on logits, seed and position only, so the tokens are those of plain decoding.

The length of a sequence with drafts in flight is unknown, so it has one row in flight and is not in the decode batch.
Drafts must pay for that: the tokens that they add, by what this sequence accepted so far, against the time that they
add to the step, by the step-time model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lineclear.scheduler.core.step_time_model import StepTimeModel

_WEIGHT = 0.1
"""Of the newest draft in the share of accepted ones, and of the newest row in the share of rows with drafts."""
_MIN_GAIN = 0.03
"""Tokens that a row with drafts must add on average: before the next one, the worker waits for the scheduler."""
_UNFITTED_COST, _MAX_UNFITTED_ROWS = 0.1, 4
"""Assumed cost of a position, and the most rows with drafts, before the step-time model can predict."""
_FIRST_PAUSE, _MAX_PAUSE = 16, 512
"""Steps without drafts before the next trial; doubled after each trial in vain."""
_TRIAL_ROWS = 4
_TRIAL_FOUND, _TRIAL_ACCEPTED = 0.15, 0.6
"""The shares that a trial assumes at least."""


class DraftCosts(NamedTuple):
    """What drafts cost in a step, in tokens that the step yields without them."""

    per_position: float
    """Of each position to verify."""
    per_row: float
    """Of a row with drafts: 1 if the step after it goes on without the sequence, else 0."""


def draft_costs(model: StepTimeModel, rows: int, kv_tokens: int, *, is_pipelined: bool) -> DraftCosts:
    """Return the costs in a step that decodes `rows` sequences and reads `kv_tokens` positions.

    `is_pipelined`: other sequences are planned ahead of the result.
    """
    per_row = 1.0 if is_pipelined else 0.0
    if not model.is_fitted or rows < 1:
        return DraftCosts(_UNFITTED_COST if rows <= _MAX_UNFITTED_ROWS else 1.0, per_row)
    _, per_token, per_kv = model.coefficients
    seconds = rows * per_token + kv_tokens * per_kv  # of as many further positions
    return DraftCosts(seconds / max(model.predict(rows, kv_tokens), 1e-9), per_row)


class DraftHistory:
    """What a sequence learned about its drafts, and the pause after drafts that did not pay."""

    __slots__ = ("accepted", "found", "has_gained", "pause", "paused_until", "trial_rows")

    def __init__(self) -> None:
        self.found = 0.3  # share of rows for which the worker found drafts
        self.accepted = 0.7  # share of accepted drafts, of those whose predecessors were accepted
        self.trial_rows = _TRIAL_ROWS  # rows left of a trial, in which `per_row` is not counted
        self.has_gained = False  # a draft was accepted since the trial began
        self.pause = _FIRST_PAUSE
        self.paused_until: int | None = None  # a step of the worker; None: no pause

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a row with drafts."""
        self.trial_rows = max(0, self.trial_rows - 1)
        self.found += _WEIGHT * ((num_drafted > 0) - self.found)
        if num_accepted:
            self.has_gained, self.pause = True, _FIRST_PAUSE
        for _ in range(num_accepted):
            self.accepted += _WEIGHT * (1.0 - self.accepted)
        if num_accepted < num_drafted:
            self.accepted -= _WEIGHT * self.accepted

    def best_length(self, longest: int, costs: DraftCosts) -> int:
        """Return the number of drafts that gains most, at most `longest`; 0 if none gains enough."""
        if not (self.trial_rows or self.has_gained):
            return 0
        length, gain, chance = 0, 0.0, self.accepted
        while length < longest and chance > costs.per_position:
            gain += self.found * (chance - costs.per_position)
            length += 1
            chance *= self.accepted
        least = _MIN_GAIN if self.trial_rows else _MIN_GAIN + costs.per_row
        return length if gain > least else 0

    def rest(self, step: int) -> None:
        """Pause after `step`, twice as long as the last time unless a draft was accepted since then."""
        self.paused_until = step + self.pause
        self.pause = min(2 * self.pause, _MAX_PAUSE)

    def resume(self) -> None:
        """Begin a trial."""
        self.paused_until, self.trial_rows, self.has_gained = None, _TRIAL_ROWS, False
        self.found, self.accepted = max(self.found, _TRIAL_FOUND), max(self.accepted, _TRIAL_ACCEPTED)

    def dump(self) -> list[Any]:
        """Return a copy of the state."""
        return [getattr(self, name) for name in self.__slots__]

    @classmethod
    def load(cls, state: list[Any]) -> DraftHistory:
        """Return the history of a dump."""
        history = cls()
        for name, value in zip(cls.__slots__, state, strict=True):
            setattr(history, name, value)
        return history
