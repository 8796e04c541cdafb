"""Number of seeds: `pytest tests/simulation --seeds 50000`, or SIMULATION_SEEDS=50000 in the environment."""

from __future__ import annotations

import os

import pytest

# Within which a planted bug counts as caught; `make simulation` runs 20,000.
DEFAULT_SEEDS = 1000
_CHUNKS = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--seeds`, which pytest knows when this folder is on the command line."""
    parser.addoption("--seeds", type=int, default=None, help="how many seeds the simulation runs")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise `seeds` with the run's seeds in equal ranges; even seeds test safety, odd ones liveness."""
    if "seeds" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--seeds", default=None)
        count = int(os.environ.get("SIMULATION_SEEDS", DEFAULT_SEEDS)) if asked is None else asked
        step = -(-count // _CHUNKS)
        pieces = [range(begin, min(begin + step, count)) for begin in range(0, count, step)]
        metafunc.parametrize("seeds", pieces, ids=lambda r: f"{r.start}-{r.stop - 1}")
