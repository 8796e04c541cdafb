"""The counted figures of the core reach their goals."""

from __future__ import annotations

import argparse

import pytest

from bench.micro_counts import LONGEST_ANSWERS, figures, slot_use


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("longest", LONGEST_ANSWERS)
def test_slots_have_a_row_in_nearly_every_step(longest: int, depth: int) -> None:
    assert slot_use(longest, depth) >= 0.97


def test_every_goal_is_met() -> None:
    missed = [figure for figure in figures(argparse.Namespace()) if figure.verdict.startswith("MISSED")]
    assert not missed
