"""The counted figures of the core reach their goals."""

from __future__ import annotations

import argparse

import pytest

from bench.micro_counts import LONGEST_ANSWERS, equal_prompts, figures, shared_prefix, slot_use


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("longest", LONGEST_ANSWERS)
def test_slots_have_a_row_in_nearly_every_step(longest: int, depth: int) -> None:
    assert slot_use(longest, depth) >= 0.97


@pytest.mark.parametrize("budget", [100, 256, 300, 2048, 8192])
def test_equal_prompts_are_computed_once(budget: int) -> None:
    assert equal_prompts(budget) <= 512 + 8 * 16


@pytest.mark.parametrize("num_slots", [8, 64])
@pytest.mark.parametrize("budget", [256, 2048, 8192])
def test_prefix_is_shared(budget: int, num_slots: int) -> None:
    assert shared_prefix(budget, num_slots) >= 0.99


def test_every_goal_is_met() -> None:
    missed = [figure for figure in figures(argparse.Namespace()) if figure.verdict.startswith("MISSED")]
    assert not missed
