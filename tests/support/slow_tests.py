"""The slow tests, which tests/conftest.py marks."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
SLOW = (
    *("campaigns", "fuzz", "simulation/test_mutations.py", "test_faults.py::test_mutant_turns_row_red"),
    *("process/test_wire_faults.py", "e2e/test_drafts.py", "worker/test_other_machines.py"),
)
"""Folders, files and functions that `make test` leaves to `make test-slow`. Each explores more of what a quicker test
holds: more seeds, more combinations, more kinds of drafts, other processors, or planted errors."""
