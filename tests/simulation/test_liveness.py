"""After faults stop, every admitted request ends within a bound of steps. Odd seeds; even ones: test_safety."""

from __future__ import annotations

import os
import subprocess
import sys

from simulation.sweep import sweep
from support.sources import REPOSITORY

_DIGEST = """
import sys
sys.path.insert(0, "tests")
from simulation.sweep import digest
print(digest(range(1, 21)))
"""


def test_all_requests_end_without_faults(seeds: range) -> None:
    sweep(seed for seed in seeds if seed % 2 == 1)


def test_plans_do_not_depend_on_hash_seed() -> None:
    # Python salts hashes per process, so a plan that depends on the order of a set would differ.
    digests = set()
    for salt in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": salt}
        command = [sys.executable, "-c", _DIGEST]
        done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        digests.add(done.stdout)
    assert len(digests) == 1
