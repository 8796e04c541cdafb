"""How many drafts a sequence verifies in a row (speculative decoding, Leviathan et al. 2023), 0 included.

A row with drafts computes several positions and samples at each. It returns the leading drafts that equal their samples
and one token more. A sample depends on logits, seed and position only, so the tokens are those of plain decoding.

The length of a sequence with drafts in flight is unknown, so it has one row in flight and is not in the decode batch.
Drafts must pay for that: the tokens that they add, by what this sequence accepted so far, against what they cost.
"""

from __future__ import annotations

from lineclear.scheduler.core.draft_costs import DraftCosts

_WEIGHT = 0.1
"""Of the newest draft in the share of accepted ones, and of the newest row in the share of rows with drafts."""
_MIN_GAIN = 0.03
"""Tokens that a row with drafts must add on average, beyond its cost."""
_FIRST_PAUSE, _MAX_PAUSE = 16, 512
"""Steps without drafts before the next trial; doubled after each trial that lost tokens."""
_TRIAL_ROWS = 4
_LOOKUP = 0.3, 0.7
"""The shares, found and accepted, that a sequence begins with where drafts come from its own text."""
_MAX_BALANCE = 4.0
"""Tokens of gain after which as many of loss end the drafts."""


class DraftHistory:
    """What a sequence learned about its drafts, and the pause after drafts that did not pay."""

    __slots__ = (
        "accepted",
        "balance",
        "charged",
        "found",
        "least",
        "pause",
        "paused_until",
        "position_cost",
        "trial_rows",
    )

    def __init__(self, found: float = _LOOKUP[0], accepted: float = _LOOKUP[1]) -> None:
        self.found = found  # share of rows for which the worker found drafts
        self.accepted = accepted  # share of accepted drafts, of those whose predecessors were accepted
        self.least = found / 2, accepted - 0.1  # the shares that a trial assumes at least
        self.trial_rows = _TRIAL_ROWS  # rows left of a trial, in which `per_row` is not counted
        self.balance = 0.0  # tokens gained since the trial began, less what the drafts cost
        self.charged = self.position_cost = 0.0  # of the row in flight
        self.pause = _FIRST_PAUSE
        self.paused_until: int | None = None  # a step of the worker; None: no pause

    @property
    def begins_trial(self) -> bool:
        """Whether its next row with drafts is the first of a trial."""
        return self.trial_rows == _TRIAL_ROWS

    def charge(self, costs: DraftCosts, num_drafts: int) -> float:
        """Note the costs of a planned row, and return what it costs if the worker finds all drafts."""
        self.charged, self.position_cost = costs.of(num_drafts), costs.per_position
        return self.charged

    def observe(self, num_allowed: int, num_drafted: int, num_accepted: int) -> float:
        """Learn from a row that might verify `num_allowed` drafts; return the tokens that it gained beyond `charged`.

        The worker found `num_drafted` drafts.
        """
        returned = num_accepted + (num_allowed - num_drafted) * self.position_cost
        self.balance = min(self.balance + returned - self.charged, _MAX_BALANCE)
        if self.balance == _MAX_BALANCE:
            self.pause = _FIRST_PAUSE
        self.trial_rows = max(0, self.trial_rows - 1)
        self.found += _WEIGHT * ((num_drafted > 0) - self.found)
        for _ in range(num_accepted):
            self.accepted += _WEIGHT * (1.0 - self.accepted)
        if num_accepted < num_drafted:
            self.accepted -= _WEIGHT * self.accepted
        return returned

    def best_length(self, longest: int, costs: DraftCosts) -> int:
        """Return the number of drafts that gains most, at most `longest`; 0 if none gains enough."""
        if not self.trial_rows and self.balance <= 0.0:
            return 0
        length, gain, chance = 0, 0.0, self.accepted
        while length < longest and chance > costs.per_position:
            gain += self.found * (chance - costs.per_position)
            length += 1
            chance *= self.accepted
        least = _MIN_GAIN if self.trial_rows else _MIN_GAIN + costs.per_row
        return length if gain > least else 0

    def postpone(self, step: int) -> None:
        """Begin the trial some steps after `step`: others use up what trials may lose."""
        self.paused_until = step + _FIRST_PAUSE

    def rest(self, step: int) -> None:
        """Pause after `step`, twice as long as the last time unless drafts paid well since then."""
        self.paused_until = step + self.pause
        self.pause = min(2 * self.pause, _MAX_PAUSE)

    def resume(self) -> None:
        """Begin a trial."""
        self.paused_until, self.trial_rows, self.balance = None, _TRIAL_ROWS, 0.0
        found, accepted = self.least
        self.found, self.accepted = max(self.found, found), max(self.accepted, accepted)
