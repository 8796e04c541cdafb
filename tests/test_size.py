"""Budgets: lines of each root, and of each file, class and function of the product.

tests/size.yaml has the figures and the exceptions. `python tests/test_size.py` prints the table.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from support.sources import REPOSITORY, ROOTS
from support.time_limits import PATIENCE_SECONDS

PRODUCT = tuple(root.name for root in ROOTS)
SIZE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("size.yaml").read_text())

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: str) -> list[Path]:
    """Return the Python files of `root` that people write."""
    generated = ("_pb2.py", "_pb2_grpc.py")
    paths = sorted((REPOSITORY / root).rglob("*.py"))
    return [p for p in paths if not p.name.endswith(generated) and "_sync" not in p.parts]


@cache
def root_lines(root: str) -> int:
    return sum(path.read_text().count("\n") for path in sources(root))


def code_lines(source: str) -> int:
    """Return the lines of `source` with code: no comments, blank lines and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        for statement in node.body if isinstance(node, _DOCUMENTED) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                lines.difference_update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return len(lines)


class Excess(NamedTuple):
    what: str
    where: str
    figure: int


def excesses(where: str, source: str) -> Iterator[Excess]:
    """Yield the file, classes and functions of `source` above the limits. The docstring of a function is free."""
    limits, tree = SIZE["limits"], ast.parse(source)
    found = [Excess("file_lines", where, source.count("\n"))]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            found.append(Excess("class_methods", f"{where}:{node.name}", len(methods)))
            owned = [(f"{node.name}.", method) for method in methods]
        elif isinstance(node, ast.Module):
            owned = [("", part) for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
        else:
            continue
        for owner, function in owned:
            lines = (function.end_lineno or 0) - function.lineno + 1
            if ast.get_docstring(function) is not None:
                lines -= (function.body[0].end_lineno or 0) - function.body[0].lineno + 1
            found.append(Excess("function_lines", f"{where}:{owner}{function.name}", lines))
    yield from (excess for excess in found if excess.figure > limits[excess.what])


@cache
def product_excesses() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for root in PRODUCT:
        for path in sources(root):
            for excess in excesses(str(path.relative_to(REPOSITORY)), path.read_text()):
                found[excess.what][excess.where] = excess.figure
    return found


@pytest.mark.parametrize("what", SIZE["limits"])
def test_known_exceptions_only(what: str) -> None:
    """An exception may shrink but not grow, and leaves the list when it is within the limit."""
    found, known = product_excesses()[what], SIZE["exceptions"][what] or {}
    grown = {where: figure for where, figure in found.items() if figure > known.get(where, 0)}
    assert grown == {}, f"more {what} than {SIZE['limits'][what]}, or than tests/size.yaml allows"
    assert sorted(known.keys() - found.keys()) == [], "within the limit now: remove them from tests/size.yaml"


def test_names_of_files_differ_between_roots() -> None:
    roots: dict[str, set[str]] = defaultdict(set)
    for root in PRODUCT:
        for path in sources(root):
            roots[path.name].add(root)
    shared = {name for name, places in roots.items() if len(places) > 1} - {"__init__.py", "__main__.py"}
    assert shared == set(SIZE["names_in_several_roots"])


@pytest.mark.parametrize("root", SIZE["lines"])
def test_root_keeps_its_budget(root: str) -> None:
    lines, budget = root_lines(root), SIZE["lines"][root]["budget"]
    assert lines <= budget, f"{root} has {lines} lines, its budget is {budget}\n{table()}"


def test_ruff_exceptions_are_needed() -> None:
    """A file that breaks no limit any more leaves the per-file-ignores of pyproject.toml."""
    ruff = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["ruff"]
    limits = {"C901", "PLR0913", "PLR0915"}
    ignored = {
        (path, code) for path, codes in ruff["lint"]["per-file-ignores"].items() for code in codes if code in limits
    }
    command = [sys.executable, "-m", "ruff", "check", "--isolated", f"--select={','.join(sorted(limits))}"]
    command += [f"--config=lint.mccabe.max-complexity={ruff['lint']['mccabe']['max-complexity']}"]
    command += [f"--config=lint.pylint.max-args={ruff['lint']['pylint']['max-args']}"]
    command += ["--output-format=json", "--exclude=_sync"]
    done = subprocess.run([*command, "."], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    found = {(str(Path(error["filename"]).relative_to(REPOSITORY)), error["code"]) for error in json.loads(done.stdout)}
    assert sorted(ignored - found) == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def f():\n" + "    x = 1\n" * 40, "function_lines"),
        ("class C:\n    async def f(self):\n" + "        x = 1\n" * 40, "function_lines"),
        ("class C:\n" + "    def f(self): ...\n" * 16, "class_methods"),
        ("x = 1\n" * 451, "file_lines"),
    ],
)
def test_excess_is_found(source: str, what: str) -> None:
    assert [excess.what for excess in excesses("x.py", source)] == [what]


def test_count_leaves_out_text() -> None:
    source = '"""Title.\n\nText.\n"""\n\n# why\nx = 1  # one\n\n\ndef f():\n    """Do."""\n    return (\n        1)\n'
    assert code_lines(source) == 4


def table() -> str:
    rows = [f"{'root':<14}{'lines':>8}{'code':>8}{'release':>9}{'budget':>8}"]
    totals: Counter[str] = Counter()
    for root, figures in SIZE["lines"].items():
        lines, code = root_lines(root), sum(code_lines(path.read_text()) for path in sources(root))
        rows.append(f"{root:<14}{lines:>8,}{code:>8,}{figures['release']:>9,}{figures['budget']:>8,}")
        totals.update(lines=lines, code=code, release=figures["release"], budget=figures["budget"])
    rows.append(f"{'all':<14}{totals['lines']:>8,}{totals['code']:>8,}{totals['release']:>9,}{totals['budget']:>8,}")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
