"""Run many seeds, for the tests."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from simulation.scenario_draw import draw
from simulation.simulated_run import SimulatedRun, run_seed

SEEDS_FILE = Path(__file__).with_name("planted_bug_seeds.json")
NUM_SEEDS = 200
"""Number of seeds that the tests run, unless told otherwise; `make simulation` runs 20,000."""


def pieces(count: int) -> list[range]:
    """Return the first `count` seeds in ranges of up to 50."""
    return [range(begin, min(begin + 50, count)) for begin in range(0, count, 50)]


def regressions() -> list[int]:
    """Return the seeds of regressions.txt."""
    text = Path(__file__).with_name("regressions.txt").read_text()
    return [int(line.split()[0]) for line in text.splitlines() if line and not line.startswith("#")]


def planted_bug_seeds() -> dict[str, int]:
    """Return the seed that caught each planted bug in the last hunt, by title of the bug."""
    seeds: dict[str, int] = json.loads(SEEDS_FILE.read_text())
    return seeds


def sweep(seeds: Iterable[int], *, twice: bool = True) -> Counter[str]:
    """Run every seed by `run_seed` and count its events. Raises AssertionError that says how to replay a failure."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += run_seed(seed, twice=twice).counts
        except Exception as error:
            message = f"seed {seed}: {type(error).__name__}: {error}\nreplay: python tests/simulation/replay.py {seed}"
            raise AssertionError(message) from error
    return counts


def digest(seeds: Iterable[int]) -> int:
    """Return a checksum of all plans and events of some seeds."""
    number = 0
    for seed in seeds:
        number = zlib.crc32(repr(SimulatedRun(draw(seed), checked=False).run().transcript).encode(), number)
    return number
