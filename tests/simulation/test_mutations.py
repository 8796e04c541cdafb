"""Proves the simulation: each bug planted in the core is caught within 1,000 seeds.

`python -m simulation.test_mutations` (`make mutants`) hunts every bug and records which seed catches it in
`planted_bug_seeds.json`. A hunt begins with the recorded seed, so that a bug takes one history instead of hundreds.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import pytest
from simulation.invariant_error import InvariantViolated
from simulation.mutations import Bug, drop, mutate, never, off_by_one, planted, without
from simulation.planted_bugs import BUGS
from simulation.simulated_run import SimulatedRun, run_seed
from simulation.sweep import SEEDS_FILE, planted_bug_seeds, regressions

from lineclear.scheduler.core import scheduler, wait_prediction
from lineclear.scheduler.core.sequence import Sequence

MAX_SEEDS = 1000
SEEDS = planted_bug_seeds()


def hunt(bug: Bug) -> tuple[str, int] | None:
    """Return what caught the bug and the seed, or None. A bug that cannot run is an error."""
    recorded = [SEEDS[bug.title]] if bug.title in SEEDS else []
    with planted(bug):
        for seed in (*recorded, *regressions(), *range(MAX_SEEDS)):
            try:
                run_seed(seed, twice=False)
            except Exception as error:
                if isinstance(error, NameError) or (isinstance(error, AttributeError) and error.obj is not None):
                    raise  # a mistake in the bug itself
                return _description(error), seed
    return None


def _description(error: Exception) -> str:
    if isinstance(error, InvariantViolated):
        return str(error)[:100]
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if not f.filename.startswith("<")), frames[-1])
    return f"{Path(place.filename).name} {place.name}: {type(error).__name__} {error}"[:100]


def test_each_bug_has_a_seed() -> None:
    assert len({bug.title for bug in BUGS}) == len(BUGS)
    assert SEEDS.keys() == {bug.title for bug in BUGS}, "`make mutants`"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.title.replace(" ", "-"))
def test_planted_bug_is_caught(bug: Bug) -> None:
    assert hunt(bug) is not None, f"not caught in {MAX_SEEDS} seeds"


def test_plan_with_expired_request_is_caught() -> None:
    """A bug of the driver: it plans before it expires requests."""

    def breach(seed: int) -> str:
        try:
            run_seed(seed, twice=False)
        except InvariantViolated as error:
            return str(error)
        return ""

    with planted(Bug("deadlines do not pass", SimulatedRun, drop("self._expire()"))):
        assert "I16: no plan has a request whose deadline has passed" in map(breach, range(60))


def test_bugs_are_removed_afterwards() -> None:
    for bug in BUGS[::20]:
        with planted(bug):
            pass
    run_seed(1)


def test_bug_is_planted_where_its_function_is_imported() -> None:
    original = wait_prediction.queue_position
    with planted(Bug("no place", wait_prediction.queue_position, off_by_one("_1.num_before(key) + _2"))):
        assert wait_prediction.queue_position is not original
        assert vars(scheduler)["queue_position"] is wait_prediction.queue_position
    assert vars(scheduler)["queue_position"] is wait_prediction.queue_position is original


@pytest.mark.parametrize(
    "bug",
    [
        Bug("no such statement", Sequence.stats, drop("self.x = 1")),
        Bug("two matches, not one", Sequence.num_unplanned, off_by_one("_")),
        Bug("no such operand", Sequence.num_unplanned, without("self.x")),
        Bug("in two methods of a class", Sequence, never("self.has_scores_left")),
        Bug("after another statement", Sequence, drop("return 0", after="self.x = 1")),
    ],
    ids=lambda bug: bug.title,
)
def test_bug_without_target_is_refused(bug: Bug) -> None:
    with pytest.raises(AssertionError, match="matches of the pattern"):
        mutate(bug)


def main() -> int:
    """Plant every bug, print what caught it, and record the seeds; 1 if one was not caught."""
    seeds = {}
    for bug in BUGS:
        reason, seed = hunt(bug) or ("NOT CAUGHT", None)
        if seed is not None:
            run_seed(seed)  # it must hold without the bug
            seeds[bug.title] = seed
        print(f"{bug.title:60} {'----' if seed is None else seed:>4}   {reason}", flush=True)
    SEEDS_FILE.write_text(json.dumps(seeds, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(seeds)} of {len(BUGS)} planted bugs caught, {100 * len(seeds) / len(BUGS):.1f} %")
    return 0 if len(seeds) == len(BUGS) else 1


if __name__ == "__main__":
    sys.exit(main())
