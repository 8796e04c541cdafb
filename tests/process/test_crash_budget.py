"""The crash budget: which sequences of deaths and progress end a server, as a table."""

from __future__ import annotations

import pytest

from lineclear.scheduler.engine.worker_process import Backoff
from lineclear.scheduler.engine.worker_supervisor import CrashBudget

DIES, GETS_ON = "D", "P"


def outcome(history: str, *, max_crashes: int = 5, window: float = 600.0, spacing: float = 1.0) -> int | None:
    """The number of the death that spends the budget; None if none does. Events are `spacing` seconds apart."""
    budget, deaths = CrashBudget(max_crashes, window), 0
    for index, event in enumerate(history):
        if event == GETS_ON:
            budget.progressed()
        else:
            deaths += 1
            if budget.crashed(index * spacing):
                return deaths
    return None


@pytest.mark.parametrize(
    ("history", "spent_at"),
    [
        ("D", None),
        ("DDDDD", None),
        ("DDDDDD", 6),
        ("PDDDDDD", 6),  # progress before the first crash does not count for the later ones
        ("DDDDDPD", None),
        ("DDDDDPDDDDDD", 11),
        ("DP" * 10_000, None),  # a server that is killed for ever and gets on in between
        ("DDDDDP" * 2_000, None),
        ("DDDDDP" * 2_000 + "DDDDDD", 10_006),
        ("DDPDDPDDPDDDDDD", 12),
    ],
)
def test_only_crashes_without_progress_spend_the_budget(history: str, spent_at: int | None) -> None:
    assert outcome(history) == spent_at


@pytest.mark.parametrize(("max_crashes", "spent_at"), [(0, 1), (1, 2), (1000, 1001)])
def test_max_crashes_are_survived(max_crashes: int, spent_at: int) -> None:
    assert outcome(DIES * 2000, max_crashes=max_crashes, spacing=0.1) == spent_at


@pytest.mark.parametrize(("spacing", "spent_at"), [(100.0, 6), (119.0, 6), (120.0, 6), (120.1, None), (1000.0, None)])
def test_crashes_older_than_the_window_are_forgotten(spacing: float, spent_at: int | None) -> None:
    assert outcome(DIES * 100, spacing=spacing) == spent_at


def test_progress_reported_after_the_crash_counts() -> None:
    budget = CrashBudget(0, 600.0)
    assert budget.crashed(1.0)
    budget.progressed()
    assert len(budget) == 0


def test_backoff_grows_to_its_maximum_and_never_overflows() -> None:
    backoff = Backoff(0.1, 10.0)
    pauses = [backoff.next_seconds() for _ in range(2000)]
    assert pauses[:6] == pytest.approx([0.1, 0.4, 1.6, 6.4, 10.0, 10.0])
    assert set(pauses[5:]) == {10.0}
    backoff.reset()
    assert backoff.next_seconds() == 0.1
    assert Backoff(0.1, 0.0).next_seconds() == 0.0
