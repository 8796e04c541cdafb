"""The error of a broken invariant; I1 to I29 number the invariants of docs/architecture.md and of the plan checks."""

from __future__ import annotations


class InvariantViolated(AssertionError):
    """An invariant did not hold."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


def require(condition: bool, invariant: str, message: str) -> None:
    """Raises InvariantViolated unless `condition` holds; `message` is the invariant in words."""
    if not condition:
        raise InvariantViolated(invariant, message)
