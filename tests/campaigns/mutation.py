"""Change one expression of the product at a time, and list the changes that no test notices (mutation testing).

    cd tests && python -m campaigns.mutation --count 100 --seed 1              draw from all areas
    cd tests && python -m campaigns.mutation --count 20 --only core/planner    modules whose path contains this

All tests of an area run once to see what each executes. A mutant then runs those that execute its block: first those
of files that name the module, for the core simulated histories next, then the others. A failure counts if the test
passes without the mutant and fails with it again.
A mutant that changes no behaviour survives, so survivors are read by a person.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from campaigns.reach import Reach, executed, loaded, missing, place_of, plant_probes
from support.sources import REPOSITORY, ROOTS

_SCHEDULER = "scheduler_svc/lineclear/scheduler"
_WORKER = "gpu_worker/lineclear/worker"
_SECONDS = 900.0  # for the simulated histories
_ALL_SECONDS = 7200.0  # for all tests of the areas, once
_TEST_SECONDS = 60  # for a test that a mutant may have made wait forever
_FIRST_SECONDS = 10.0
_HISTORIES = "from simulation.sweep import sweep; sweep(range(300))"


class Area(NamedTuple):
    """Modules, and the tests that must notice a mutant of them. Paths and globs of the repository."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    is_simulated: bool = False


AREAS = (
    Area((f"{_SCHEDULER}/core/*.py",), ("tests/core", "tests/observe", "tests/embedded"), is_simulated=True),
    Area(
        (f"{_SCHEDULER}/requests/*.py",),
        ("tests/requests", "tests/grpc_api", "tests/security", "tests/process", "tests/client"),
    ),
    Area((f"{_SCHEDULER}/text/*.py",), ("tests/text", "tests/requests", "tests/e2e")),
    Area((f"{_SCHEDULER}/engine/*.py",), ("tests/process",)),
    Area(
        (f"{_WORKER}/*.py", f"{_WORKER}/drafts/*.py", f"{_WORKER}/lora/*.py"),
        ("tests/worker", "tests/process", "tests/e2e"),
    ),
)

_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"),
}  # fmt: skip
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """A change of one expression or statement."""

    file: Path
    line: int
    start: int
    """Byte offsets in the file."""
    end: int
    new: str

    def applied(self) -> tuple[bytes, str]:
        """Return the changed file, and the change in words."""
        text = self.file.read_bytes()
        old = text[self.start : self.end].decode()
        change = f"{self.file.relative_to(REPOSITORY)}:{self.line}: {old!r} becomes {self.new!r}"
        return text[: self.start] + self.new.encode() + text[self.end :], change


def mutants(file: Path) -> Iterator[Mutant]:
    """Yield every change of the functions in a file. Assertions, log lines and error sentences stay as they are."""
    source = file.read_bytes()
    starts = [0, *(match.end() for match in re.finditer(rb"\n", source))]

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.expr, right: ast.expr, operator: ast.AST) -> Iterator[Mutant]:
        old, new = _OPERATORS.get(type(operator), ("", ""))
        start, end = place(left)[1], place(right)[0]
        found = re.search(rb"(?<!\w)" + re.escape(old.encode()) + rb"(?!\w)", source[start:end]) if old else None
        if found is not None:
            yield Mutant(file, left.lineno, start + found.start(), start + found.end(), new)

    for node in _nodes(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from between(left, right, operator)
            case ast.BinOp(left=left, op=operator, right=right) | ast.BoolOp(op=operator, values=[left, right, *_]):
                yield from between(left, right, operator)
            case ast.Constant(value=bool() as value):
                yield Mutant(file, node.lineno, *place(node), str(not value))
            case ast.Constant(value=int() as value):
                yield Mutant(file, node.lineno, *place(node), str(value + 1))
            case ast.Call(func=ast.Name(id=name) as function) if name in _OPPOSITES:
                yield Mutant(file, node.lineno, *place(function), _OPPOSITES[name])
            case ast.If(test=test) | ast.IfExp(test=test):
                start, end = place(test)
                yield Mutant(file, test.lineno, start, end, f"not ({source[start:end].decode()})")
            case ast.AugAssign() | ast.Expr(value=ast.Call()):
                yield Mutant(file, node.lineno, *place(node), "pass")
            case _:
                pass


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes in functions, without those that no test needs to notice."""

    def walk(node: ast.AST, in_function: bool) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Assert, ast.Raise, ast.JoinedStr, ast.arguments)) or _is_log(child):
                continue
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and child is node.returns:
                continue
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if child.name not in ("__repr__", "dump", "load"):
                    yield from walk(child, True)
                continue
            if in_function:
                yield child
            yield from walk(child, in_function)

    return walk(tree, False)


def _is_log(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value).startswith("log.")
    )


def drawn(count: int, seed: int, only: str) -> list[tuple[Area, Mutant]]:
    """Draw `count` mutants, each module equally often."""
    chosen = random.Random(seed)
    modules = [
        (area, file)
        for area in AREAS
        for pattern in area.modules
        for file in sorted(REPOSITORY.glob(pattern))
        if only in str(file)
    ]
    lists = [(area, found) for area, file in modules if (found := list(mutants(file)))]
    chosen.shuffle(lists)
    return [(area, chosen.choice(found)) for area, found in (lists[i % len(lists)] for i in range(count))]


class Copy:
    """A copy of the sources in which mutants and probes are planted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._roots = [*(root.relative_to(REPOSITORY) for root in ROOTS), Path("tests")]
        for root in self._roots:
            shutil.copytree(REPOSITORY / root, folder / root, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        for path in REPOSITORY.iterdir():
            if not (folder / path.name).exists() and not path.name.startswith("."):
                (folder / path.name).symlink_to(path)
        # A mutant makes tests wait for an event that never happens, so shorten the wait.
        limits = folder / "tests/support/time_limits.py"
        limits.write_text("PATIENCE_SECONDS = SOON_SECONDS = 20.0\n", encoding="utf-8")

    def complete(self, reach: Reach, folders: Iterable[str]) -> None:
        """Run the test files below `folders` that `reach` lacks, with probes, and leave out tests that fail without."""
        files = missing(reach, folders)
        if not files:
            return
        print(f"{len(files)} test files run once, to see what each test executes", flush=True)
        product = {file for area in AREAS for pattern in area.modules for file in REPOSITORY.glob(pattern)}
        plant_probes(self._folder, product)
        self._fails(["-p", "probe_plugin", *files], _ALL_SECONDS)
        failed = executed(reach, self._folder, files)
        (self._folder / "sitecustomize.py").unlink()
        for file in product:
            shutil.copyfile(file, self._folder / file.relative_to(REPOSITORY))
        for test in failed:
            if self._fails([test], _limit([test], reach)):
                print(f"left out, it fails without a mutant: {test}", flush=True)
                del reach.seconds[test]

    def noticed_by(self, area: Area, mutant: Mutant, reach: Reach, wide: bool) -> str:
        """Return which tests fail with the mutant, or "" if none do."""
        self._plant(mutant)
        try:
            return self._noticed(area, mutant, reach, wide)
        finally:
            self._remove(mutant)

    def _plant(self, mutant: Mutant) -> None:
        (self._folder / mutant.file.relative_to(REPOSITORY)).write_bytes(mutant.applied()[0])

    def _remove(self, mutant: Mutant) -> None:
        shutil.copyfile(mutant.file, self._folder / mutant.file.relative_to(REPOSITORY))

    def _repeats(self, test: str, mutant: Mutant, reach: Reach) -> bool:
        """Return whether a test passes without the mutant and fails with it, however busy the machine is."""
        self._remove(mutant)
        passes = not self._fails([test], _limit([test], reach))
        self._plant(mutant)
        return passes and bool(self._fails([test], _limit([test], reach)))

    def _noticed(self, area: Area, mutant: Mutant, reach: Reach, wide: bool) -> str:
        module = str(mutant.file.relative_to(REPOSITORY))
        place = place_of(mutant.file.read_text(encoding="utf-8"), module, mutant.line)
        tests = reach.tests(place, area.tests)
        name = re.compile(rf"\b{mutant.file.stem}\b")
        near = [file for file in tests if name.search((REPOSITORY / file).read_text(encoding="utf-8"))]
        far = [file for file in tests if file not in near]
        if failed := self._confirmed([test for file in near for test in tests[file]], mutant, reach):
            return failed
        if area.is_simulated and self._fails_of(["-c", _HISTORIES], _SECONDS):
            return "simulation"
        if failed := self._confirmed([test for file in far for test in tests[file]], mutant, reach):
            return failed
        if wide:
            wider = reach.tests(place, sorted({folder for each in AREAS for folder in each.tests} - set(area.tests)))
            return self._confirmed([test for file in wider for test in wider[file]], mutant, reach)
        return ""

    def _confirmed(self, tests: list[str], mutant: Mutant, reach: Reach) -> str:
        """Return a test that fails because of the mutant, or "". The first ones run by themselves: most fail there."""
        while tests:
            soon = _within(_FIRST_SECONDS, tests, reach)
            for some in (tests[:soon], tests[soon:]):
                failed = self._fails(some, _limit(some, reach)) if some else ""
                if failed:
                    break
            if not failed:
                return ""
            # A failure before the first test is one of all tests.
            if failed not in tests or self._repeats(failed, mutant, reach):
                return failed
            tests = tests[tests.index(failed) + 1 :]
        return ""

    def _fails(self, tests: list[str], seconds: float) -> str:
        stop = [] if "probe_plugin" in tests else ["-x"]
        pytest = ["-m", "pytest", *stop, "-q", "--tb=no", "-p", "no:cacheprovider", f"--timeout={_TEST_SECONDS}"]
        return self._fails_of([*pytest, *tests], seconds)

    def _fails_of(self, arguments: list[str], seconds: float) -> str:
        roots = [self._folder, *(self._folder / root for root in self._roots)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots))}
        command = [sys.executable, *arguments]
        try:
            done = subprocess.run(  # the exit code is read below
                command,
                cwd=self._folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "no end within the time"
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        return "" if done.returncode in (0, 5) else failed[1] if failed else "error"


def _limit(tests: list[str], reach: Reach) -> float:
    """Return a time that the tests exceed only if one hangs at its end, where no timeout of pytest ends it."""
    return 2 * _TEST_SECONDS + 8.0 * sum(reach.seconds[test] for test in tests)


def _within(seconds: float, tests: list[str], reach: Reach) -> int:
    """Return how many leading tests run in this time, at least one."""
    total = 0.0
    for index, test in enumerate(tests):
        total += reach.seconds[test]
        if total > seconds and index:
            return index
    return len(tests)


def main() -> int:
    """Plant each drawn mutant and print whether a test failed; return 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of the path of the modules")
    parser.add_argument("--reach", type=Path, help="file that keeps what each test executes, for the next run")
    parser.add_argument("--wide", action="store_true", help="run the tests of all areas before a mutant survives")
    options = parser.parse_args()
    caught, tried = 0, 0
    chosen = drawn(options.count, options.seed, options.only)
    reach = loaded(options.reach)
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        copy = Copy(Path(folder))
        areas = AREAS if options.wide else [area for area, _ in chosen]
        copy.complete(reach, sorted({tests for area in areas for tests in area.tests}))
        if options.reach is not None:
            reach.save(options.reach)
        for area, mutant in chosen:
            began = time.monotonic()
            by = copy.noticed_by(area, mutant, reach, options.wide)
            tried += 1
            caught += bool(by)
            result = f"caught by {by}" if by else "SURVIVED"
            print(f"{time.monotonic() - began:5.1f} s  {mutant.applied()[1]}  {result}", flush=True)
    print(f"{caught} of {tried} caught", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
