"""The matrix of faults: every row is held by tests that exist, or says why it is not; the page says the same."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.mutants import Mutant, mutants, survivors

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
MATRIX = yaml.safe_load((TESTS / "faults.yaml").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = [row for section in MATRIX["sections"] for row in section["rows"]]
SAMPLE = (
    "One request kills whichever worker runs it",
    "A deadline passes, in the queue or while running",
    "A frame lost, doubled, damaged, cut, out of order, or noise between frames",
)
IMPORTED_CHECKS = frozenset({"check", "wait_for", "exit_code", "assert_close", "sweep"})
"""Of tests/support, tests/service, tests/simulation and torch: they raise where something is not as it must be."""
WITHOUT_ERROR = frozenset(
    {
        "process/test_worker_link.py::test_a_wait_may_be_asked_to_last_for_any_time",
        "worker/test_safetensors_check.py::test_no_damage_to_a_header_raises_anything_else",
    }
)
"""What they call must raise nothing, or nothing else; there is no value to compare."""
NAMED = sorted({t for row in ROWS for t in row.get("tests", ())} | {e["reproducer"] for e in MATRIX["track_record"]})


def functions(file: Path) -> set[str]:
    """The tests in a file, also those in classes, unless they are switched off."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not {"pytest.mark.skip", "pytest.mark.xfail"} & {ast.unparse(d).split("(")[0] for d in node.decorator_list}
    }


@pytest.mark.parametrize("test", NAMED)
def test_what_is_named_exists(test: str) -> None:
    file, separator, name = test.partition("::")
    assert separator, "a test is file::function"
    assert (TESTS / file).is_file()
    assert name in functions(TESTS / file)


@pytest.mark.parametrize("row", ROWS, ids=[row["fault"] for row in ROWS])
def test_a_row_is_held_by_tests_or_says_why_not(row: dict[str, Any]) -> None:
    assert row.keys() <= {"fault", "outcome", "figure", "tests", "untested", "red_when"}
    assert row["fault"]
    assert row["outcome"].endswith(".")
    assert row.get("tests") or row.get("untested")
    cells = (str(value) for key, value in row.items() if key != "red_when")
    assert "|" not in "".join(cells), "would end a cell of the table"


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.fault)
def test_a_change_that_must_turn_a_row_red_can_be_made(mutant: Mutant) -> None:
    compile(mutant.changed(), mutant.file, "exec")


@pytest.mark.parametrize("fault", SAMPLE)
def test_a_row_turns_red(fault: str) -> None:
    """A sample whose tests are quick; `make mutants` plants all."""
    (mutant,) = [mutant for mutant in mutants() if mutant.fault == fault]
    assert survivors(mutant) == []


@pytest.mark.parametrize("test", sorted({*NAMED} - WITHOUT_ERROR))
def test_what_is_named_can_fail(test: str) -> None:
    """It asserts something itself, or calls something of its own tests that does."""
    file, _, name = test.partition("::")
    assert name in asserting(TESTS / file), f"{test} asserts nothing"


def asserting(file: Path) -> set[str]:
    """The functions in a file that assert or expect an error, themselves or in what they call of the same file."""
    found, calls = set(IMPORTED_CHECKS), dict[str, set[str]]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            called = {_name(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
            calls[node.name] = called | calls.get(node.name, set())
            if any(isinstance(part, ast.Assert) for part in ast.walk(node)) or called & {"raises", "warns"}:
                found.add(node.name)
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return found


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_no_fault_is_there_twice() -> None:
    faults = [row["fault"] for row in ROWS]
    assert len(set(faults)) == len(faults)
    assert len(faults) > 40


def test_the_page_is_in_step() -> None:
    fresh = runpy.run_path(str(REPOSITORY / "docs" / "reliability.py"))["page"]()
    page = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert page == fresh, "run: python docs/generate.py"


def test_a_mutant_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.mutants._BOUND_SECONDS", 0.05)
    assert survivors(mutants()[0]) == []
