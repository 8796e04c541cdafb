"""The slow tests, which tests/conftest.py marks."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
SLOW = (
    *("campaigns", "fuzz", "simulation/test_mutations.py", "test_faults.py::test_mutant_turns_row_red"),
    *("process/test_wire_faults.py", "worker/test_other_machines.py"),
    "worker/test_triton_kernels.py::test_kernels_compile_without_spills",
    "worker/test_lora.py::test_batch_of_two_adapters_and_the_model_equals_peft",
    "e2e/test_drafts.py::test_answers_survive_killed_workers",
)
"""Folders, files and functions that `make test` leaves to `make test-slow`. Each explores more of what a quicker test
holds: more seeds and combinations, all model families with adapters, other processors, or planted errors."""
