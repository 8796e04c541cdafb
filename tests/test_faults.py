"""The matrix of faults: every row is held by tests that exist, or says why it is not; the page says the same."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
MATRIX = yaml.safe_load((TESTS / "faults.yaml").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = [row for section in MATRIX["sections"] for row in section["rows"]]
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
    assert row.keys() <= {"fault", "outcome", "figure", "tests", "untested"}
    assert row["fault"]
    assert row["outcome"].endswith(".")
    assert row.get("tests") or row.get("untested")
    assert "|" not in "".join(str(value) for value in row.values()), "would end a cell of the table"


def test_no_fault_is_there_twice() -> None:
    faults = [row["fault"] for row in ROWS]
    assert len(set(faults)) == len(faults)
    assert len(faults) > 40


def test_the_page_is_in_step() -> None:
    fresh = runpy.run_path(str(REPOSITORY / "docs" / "reliability.py"))["page"]()
    page = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert page == fresh, "run: python docs/generate.py"
