"""Runs of many seeds, for the tests."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from simulation.scenario import draw
from simulation.world import World, run_seed


def regressions() -> list[int]:
    """Seeds that once showed something rare."""
    text = Path(__file__).with_name("regressions.txt").read_text()
    return [int(line.split()[0]) for line in text.splitlines() if line and not line.startswith("#")]


def sweep(seeds: Iterable[int]) -> Counter[str]:
    """Run every seed and count what happened in them. Raises AssertionError that says how to see the first breach."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            happened += run_seed(seed).happened
        except Exception as error:
            message = (
                f"seed {seed}: {type(error).__name__}: {error}\nto see it: python tests/simulation/replay.py {seed}"
            )
            raise AssertionError(message) from error
    return happened


def digest(seeds: Iterable[int]) -> int:
    """One number for all plans and events of some seeds."""
    number = 0
    for seed in seeds:
        number = zlib.crc32(repr(World(draw(seed), watch=False).run().transcript).encode(), number)
    return number
