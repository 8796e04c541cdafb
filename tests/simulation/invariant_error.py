"""How the oracle says that something did not hold; I1 to I25 are the numbers of the project's list of invariants."""

from __future__ import annotations


class Breach(AssertionError):
    """An invariant did not hold."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


def hold(condition: bool, invariant: str, message: str) -> None:
    """`invariant`, in words: `message`."""
    if not condition:
        raise Breach(invariant, message)
