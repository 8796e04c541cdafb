"""A simulation that finds nothing proves nothing: each bug planted in the core must be caught, and soon."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest
from simulation.invariant_error import Breach
from simulation.mutations import BUGS, Bug, planted
from simulation.sweep import regressions
from simulation.world import World, run_seed

MOST_SEEDS = 1000


def hunt(bug: Bug) -> tuple[str, int] | None:
    """What caught the bug, and how many seeds it took; None when nothing did."""
    with planted(bug):
        for count, seed in enumerate((*regressions(), *range(MOST_SEEDS)), 1):
            try:
                run_seed(seed, twice="random" in bug.new)
            except Exception as error:
                return _who(error), count
    return None


def _who(error: Exception) -> str:
    if isinstance(error, Breach):
        return str(error)[:100]
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if not f.filename.startswith("<")), frames[-1])
    return f"{Path(place.filename).name} {place.name}: {type(error).__name__} {error}"[:100]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.title.replace(" ", "-"))
def test_every_planted_bug_is_caught(bug: Bug) -> None:
    caught = hunt(bug)
    assert caught is not None, f"{MOST_SEEDS} seeds and nothing noticed: {bug.title}"
    print(f"{bug.title:55} {caught[1]:4} seeds   {caught[0]}")


def test_a_plan_for_who_has_expired_is_seen() -> None:
    """The driver's bug, not the core's: an engine that plans without letting deadlines pass before."""
    said = set()
    with planted(Bug("deadlines do not pass", World, "_turn", "self._let_deadlines_pass()", "pass")):
        for seed in range(60):
            try:
                run_seed(seed, twice=False)
            except Breach as breach:
                said.add(str(breach))
    assert "I16: no plan has a request whose deadline has passed" in said


def test_nothing_is_left_planted() -> None:
    for bug in BUGS:
        with planted(bug):
            pass
    run_seed(1)


def main() -> int:
    """Plant every bug of planted.txt and print what caught it; 1 when one was not caught."""
    missed = 0
    for bug in BUGS:
        found = hunt(bug)
        missed += found is None
        seeds, caught = (found[1], found[0]) if found else ("----", "NOT CAUGHT")
        print(f"{bug.title:55} {seeds:>4}   {caught}", flush=True)
    print(f"{len(BUGS) - missed} of {len(BUGS)} planted bugs caught, {100 * (1 - missed / len(BUGS)):.1f} %")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
