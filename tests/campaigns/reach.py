"""Find which tests execute a statement, so that a mutant runs only the tests that can notice it.

The tests run once on a copy of the sources in which each block of a function calls a probe. A statement that a test
executes itself belongs to that test. One that a process, or the set-up of a test, executes belongs to all tests of the
file, because they may share that process or set-up.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from support.sources import REPOSITORY, ROOTS

_PROBE = """
import builtins, os
SEEN, CURRENT, PROCESS = set(), [""], [0]
def probe(place):
    if place in SEEN: return
    SEEN.add(place)
    try:
        if os.getpid() == PROCESS[0]:
            test = CURRENT[0]
        else:
            with open({current!r}) as file: test = file.read().split(" ")[0].split("::")[0]
        descriptor = os.open({hits!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, (place + "\\t" + test + "\\n").encode())
        os.close(descriptor)
    except OSError: pass
builtins._probe = probe
"""

_PLUGIN = """
import json, os, sitecustomize as probes
import pytest
def enter(name):
    probes.PROCESS[0], probes.CURRENT[0] = os.getpid(), name
    probes.SEEN.clear()
    with open({current!r}, "w") as file: file.write(name)
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item): enter(item.nodeid.split("::")[0])
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item): enter(item.nodeid)
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item): enter(item.nodeid)
def pytest_runtest_logreport(report):
    outcome = json.dumps([report.nodeid, report.outcome, report.duration])
    with open({outcomes!r}, "a") as file: file.write(outcome + "\\n")
"""


class Reach(NamedTuple):
    """Which tests executed which statement, and how long each test takes."""

    product: str
    """Digest of the product's sources. The places mean nothing for others."""
    files: dict[str, str]
    """Digest of each test file."""
    seconds: dict[str, float]
    """Of each test that passes on unchanged sources."""
    places: dict[str, list[str]]
    """Tests, and test files all of whose tests count, by `file:line` of the first statement of a block."""

    def tests(self, place: str, folders: Sequence[str]) -> dict[str, list[str]]:
        """Return the tests below `folders` that execute the block at `place`, by file: the fastest files first."""
        named = set(self.places.get(place, ()))
        found: dict[str, list[str]] = {}
        for test in self.seconds:
            file = test.split("::")[0]
            if (test in named or file in named) and file.startswith(tuple(f"{each}/" for each in folders)):
                found.setdefault(file, []).append(test)
        return dict(sorted(found.items(), key=lambda each: sum(self.seconds[test] for test in each[1])))

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(self._asdict()), encoding="utf-8")


def loaded(path: Path | None) -> Reach:
    """Return what an earlier run saved, without the test files that changed since. Nothing if the product changed."""
    product = _digest(*(file for root in ROOTS for file in sorted(root.rglob("*.py"))))
    if path is None or not path.exists():
        return Reach(product, {}, {}, {})
    old = Reach(**json.loads(path.read_text(encoding="utf-8")))
    if old.product != product:
        return Reach(product, {}, {}, {})
    kept = {name: digest for name, digest in old.files.items() if digest == _file_digest(name)}

    def keeps(test: str) -> bool:
        return test.split("::")[0] in kept

    return Reach(
        product,
        kept,
        {test: seconds for test, seconds in old.seconds.items() if keeps(test)},
        {place: [test for test in tests if keeps(test)] for place, tests in old.places.items()},
    )


def _file_digest(name: str) -> str:
    path = REPOSITORY / name
    return _digest(path) if path.exists() else ""


def _digest(*files: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def missing(reach: Reach, folders: Iterable[str]) -> list[str]:
    """Return the test files below `folders` that no run has executed."""
    files = [
        str(file.relative_to(REPOSITORY)) for each in folders for file in sorted((REPOSITORY / each).glob("test_*.py"))
    ]
    return [file for file in files if file not in reach.files]


def plant_probes(folder: Path, files: Iterable[Path]) -> None:
    """Write `files` of the product with probes into the copy in `folder`, and the plugin `probe_plugin` for pytest."""
    names = {name: str(folder / name) for name in ("current", "hits", "outcomes")}
    (folder / "sitecustomize.py").write_text(_PROBE.format(**names), encoding="utf-8")
    (folder / "probe_plugin.py").write_text(_PLUGIN.format(**names), encoding="utf-8")
    for path in names.values():
        Path(path).write_text("", encoding="utf-8")
    for file in files:
        relative = str(file.relative_to(REPOSITORY))
        (folder / relative).write_text(with_probes(file.read_text(encoding="utf-8"), relative), encoding="utf-8")


def with_probes(source: str, name: str) -> str:
    """Return a module's source that calls `_probe("name:line")` at each block of a function."""
    tree = ast.parse(source)
    for body, index in reversed(_block_starts(tree)):
        body.insert(index, ast.parse(f"_probe({f'{name}:{body[index].lineno}'!r})").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def executed(reach: Reach, folder: Path, tested: Iterable[str]) -> list[str]:
    """Add what the test files `tested` did in the copy, and return the tests that failed."""
    reach.files.update({name: _file_digest(name) for name in tested})
    hits: dict[str, set[str]] = {place: set(tests) for place, tests in reach.places.items()}
    for line in (folder / "hits").read_text(encoding="utf-8").splitlines():
        place, _, test = line.partition("\t")
        if test:
            hits.setdefault(place, set()).add(test)
    reach.places.update({place: sorted(tests) for place, tests in hits.items()})
    seconds: dict[str, float] = {}
    failed = set()
    for line in (folder / "outcomes").read_text(encoding="utf-8").splitlines():
        test, outcome, duration = json.loads(line)
        seconds[test] = seconds.get(test, 0.0) + duration
        if outcome == "failed":
            failed.add(test)
    reach.seconds.update(seconds)
    return sorted(failed)


def _block_starts(tree: ast.AST) -> list[tuple[list[ast.stmt], int]]:
    """Return the places of statements in functions that do not run whenever the statement before them does."""
    found: list[tuple[list[ast.stmt], int]] = []

    def walk(node: ast.AST, in_function: bool) -> None:
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        inside = in_function or is_function
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if not isinstance(body, list) or not inside:
                continue
            first = 1 if is_function and ast.get_docstring(node) is not None else 0  # type: ignore[arg-type]
            for index, statement in enumerate(body):
                follows = index > first and isinstance(body[index - 1], _COMPOUND)
                if (index == first or follows) and not isinstance(statement, (ast.Nonlocal, ast.Global)):
                    found.append((body, index))
        for child in ast.iter_child_nodes(node):
            walk(child, inside)

    walk(tree, False)
    return found


_COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith, ast.Match)


def place_of(source: str, name: str, line: int) -> str:
    """Return the place, "name:line", of the block that holds the statement of a line, or "" if no block does."""
    best, best_size = "", 10**9
    starts = _block_starts(ast.parse(source))
    for body, index in starts:
        later = [other for each, other in starts if each is body and other > index]
        last = body[min(later) - 1] if later else body[-1]
        begin, end = body[index].lineno, last.end_lineno or last.lineno
        if begin <= line <= end and end - begin < best_size:
            best, best_size = f"{name}:{begin}", end - begin
    return best
