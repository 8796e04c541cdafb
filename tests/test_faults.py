"""The fault matrix, tests/faults.yaml: each row names tests that exist and can fail, or the reason why it has none."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from campaigns.mutation import listed, survivors

TESTS = Path(__file__).parent
MATRIX = yaml.safe_load((TESTS / "faults.yaml").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = [row for section in MATRIX["sections"] for row in section["rows"]]
SAMPLE = (
    "One request crashes each worker that runs it",
    "A deadline passes, in the queue or while running",
    "A frame is lost, duplicated, damaged, cut or reordered, or there is noise between frames",
)
IMPORTED_CHECKS = frozenset({"check", "wait_for", "exit_code", "assert_close", "sweep"})
"""Imported functions that raise on a wrong value: of tests/support, tests/simulation and torch."""
WITHOUT_ERROR = frozenset(
    {
        "process/test_worker_link.py::test_wait_accepts_any_time",
        "worker/test_safetensors_check.py::test_damaged_headers_raise_only_checkpoint_broken",
    }
)
"""Tests that pass when nothing is raised; they have no value to compare."""
NAMED = sorted(
    {t for row in [*ROWS, *MATRIX["work"]] for t in row.get("tests", ())}
    | {e["reproducer"] for e in MATRIX["track_record"]}
)


@cache
def functions(file: Path) -> set[str]:
    """Return the names of the tests in `file` that are neither skipped nor expected to fail."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not {"pytest.mark.skip", "pytest.mark.xfail"} & {ast.unparse(d).split("(")[0] for d in node.decorator_list}
    }


def missing(tests: Iterable[str]) -> list[str]:
    """Return those of `tests`, each file::function, that do not exist or are switched off."""
    places = ((test, *test.split("::")) for test in tests)
    return [test for test, file, name in places if name not in functions(TESTS / file)]


def test_named_tests_exist() -> None:
    assert missing(NAMED) == []
    assert missing(["test_faults.py::test_no_such"]) == ["test_faults.py::test_no_such"]


@pytest.mark.parametrize(
    ("rows", "title", "needed", "more"),
    [
        (ROWS, "fault", {"outcome"}, {"figure", "red_when"}),
        (MATRIX["work"], "work", {"chosen_by", "bound", "cost"}, set()),
    ],
    ids=["faults", "work"],
)
def test_each_row_has_tests_or_a_reason(
    rows: list[dict[str, Any]], title: str, needed: set[str], more: set[str]
) -> None:
    for row in rows:
        assert row.keys() <= {title, "tests", "untested"} | needed | more, row[title]
        assert all(row[name] for name in needed), row[title]
        assert row.get("tests") or row.get("untested"), row[title]
        cells = (str(value) for key, value in row.items() if key != "red_when")
        assert "|" not in "".join(cells), f"{row[title]}: a bar ends the cell of a table"


def test_faults_are_unique() -> None:
    assert [fault for fault, count in Counter(row["fault"] for row in ROWS).items() if count > 1] == []


def test_each_mutant_applies() -> None:
    for fault in listed():
        compile(fault.changed(), fault.file, "exec")


@pytest.mark.parametrize("fault", SAMPLE)
def test_mutant_turns_row_red(fault: str) -> None:
    """A sample with quick tests; `make mutants` plants them all."""
    (planted,) = [each for each in listed() if each.title == fault]
    assert survivors(planted) == []


def test_named_tests_assert() -> None:
    places = ((test, *test.split("::")) for test in {*NAMED} - WITHOUT_ERROR)
    assert [test for test, file, name in places if name not in asserting(TESTS / file)] == []


@cache
def asserting(file: Path) -> set[str]:
    """Return the functions in `file` that assert or expect an error, or call a function of the file that does."""
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


def test_mutant_that_hangs_counts_as_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("campaigns.mutation._LISTED_SECONDS", 0.05)
    assert survivors(listed()[0]) == []
