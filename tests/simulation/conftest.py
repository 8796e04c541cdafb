"""Number of seeds: `pytest tests/simulation --seeds 50000`."""

from __future__ import annotations

import pytest
from simulation.sweep import NUM_SEEDS, pieces


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--seeds`, which pytest knows when this folder is on the command line."""
    parser.addoption("--seeds", type=int, default=NUM_SEEDS, help="how many seeds the simulation runs")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise `seeds` with the run's seeds in equal ranges; even seeds test safety, odd ones liveness."""
    if "seeds" in metafunc.fixturenames:
        count = metafunc.config.getoption("--seeds", default=NUM_SEEDS)
        metafunc.parametrize("seeds", pieces(count), ids=lambda r: f"{r.start}-{r.stop - 1}")
