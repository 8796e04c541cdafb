"""The token budget of a step: halved by an out-of-memory step, doubled again after 200 steps without one."""

from __future__ import annotations

_RECOVERY_STEPS = 200


class TokenBudget:
    """Counts the halvings."""

    def __init__(self) -> None:
        self._halvings = 0
        self._steps_to_doubling = 0  # while it is halved

    def tokens(self, max_tokens: int) -> int:
        """Return how many of `max_tokens` tokens the next step may compute."""
        return max(1, max_tokens >> self._halvings)

    def halve(self) -> None:
        """Halve the budget, after an out-of-memory step of several requests."""
        self._halvings += 1
        self._steps_to_doubling = _RECOVERY_STEPS

    def restore(self) -> None:
        """Restore the whole budget: the size of the batch was not the cause."""
        self._halvings = 0

    def count_step(self) -> None:
        """Count a step that was planned."""
        if self._halvings:
            self._steps_to_doubling -= 1
            if self._steps_to_doubling == 0:
                self._halvings -= 1
                self._steps_to_doubling = _RECOVERY_STEPS
