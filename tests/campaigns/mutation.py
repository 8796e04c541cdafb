"""Change the product and look for changes that no test notices (mutation testing).

    cd tests && python -m campaigns.mutation --listed                          each `red_when` of tests/faults.yaml
    cd tests && python -m campaigns.mutation --listed NaN gone                 of faults with one of these words
    cd tests && python -m campaigns.mutation --count 100 --seed 1              expressions drawn from all areas
    cd tests && python -m campaigns.mutation --count 20 --only core/planner    modules whose path contains this

A row of tests/faults.yaml may have `red_when`: the file `in` which the text `replace` becomes the text `by`. The row's
tests must fail with that change. A drawn mutant runs the test files of its area: first those that name its module, for
the core simulated histories next, then the others. A failure counts if the test passes without the mutant and fails
with it again. A mutant that changes no behaviour survives, so survivors are read by a person.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from support.sources import REPOSITORY, ROOTS

_SCHEDULER = "scheduler_svc/lineclear/scheduler"
_WORKER = "gpu_worker/lineclear/worker"
_SECONDS = 900.0  # for one test file, or the simulated histories
_LISTED_SECONDS = 300.0
_HISTORIES = "from simulation.sweep import sweep; sweep(range(300))"


class Fault(NamedTuple):
    """A change of one file that must make `tests` fail."""

    title: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def changed(self) -> str:
        """Return the text of the changed file. Raises AssertionError unless it contains `old` exactly once."""
        text = (REPOSITORY / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        assert count == 1, f"{self.file} has {self.old!r} {count} times: change red_when of {self.title!r}"
        return text.replace(self.old, self.new)


def listed() -> list[Fault]:
    """Return the changes of all rows of tests/faults.yaml that have `red_when`."""
    matrix = yaml.safe_load((REPOSITORY / "tests" / "faults.yaml").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = [row for section in matrix["sections"] for row in section["rows"]]
    found = []
    for row in rows:
        if "red_when" in row:
            how = row["red_when"]
            tests = tuple(how.get("tests", row["tests"]))
            assert set(tests) <= set(row["tests"]), f"{row['fault']}: red_when names tests that the row does not"
            found.append(Fault(row["fault"], how["in"], how["replace"], how["by"], tests))
    return found


class Area(NamedTuple):
    """Modules, and the tests that must notice a mutant of them. Paths and globs of the repository."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    is_simulated: bool = False


AREAS = (
    Area((f"{_SCHEDULER}/core/*.py",), ("tests/core", "tests/observe", "tests/embedded"), is_simulated=True),
    Area(
        (f"{_SCHEDULER}/requests/**/*.py",),
        ("tests/requests", "tests/grpc_api", "tests/security", "tests/process", "tests/client"),
    ),
    Area((f"{_SCHEDULER}/text/*.py",), ("tests/text", "tests/requests", "tests/e2e")),
    Area((f"{_SCHEDULER}/engine/*.py",), ("tests/process",)),
    Area((f"{_SCHEDULER}/grpc_api/*.py",), ("tests/grpc_api", "tests/security", "tests/scheduler")),
    Area((f"{_SCHEDULER}/observe/*.py", f"{_SCHEDULER}/status_page/*.py"), ("tests/observe", "tests/grpc_api")),
    Area((f"{_SCHEDULER}/flight_recorder/*.py",), ("tests/core", "tests/process", "tests/simulation")),
    Area((f"{_WORKER}/**/*.py",), ("tests/worker", "tests/process", "tests/e2e")),
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
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._roots = [*(root.relative_to(REPOSITORY) for root in ROOTS), Path("tests")]
        for root in self._roots:
            shutil.copytree(REPOSITORY / root, folder / root, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        for path in REPOSITORY.iterdir():
            if not (folder / path.name).exists() and not path.name.startswith("."):
                (folder / path.name).symlink_to(path)
        # A mutant makes tests wait for an event that never happens, so shorten the wait.
        (folder / "tests/support/time_limits.py").write_text("PATIENCE_SECONDS = SOON_SECONDS = 20.0\n")

    @contextmanager
    def planted(self, file: str, text: str | bytes) -> Iterator[None]:
        """Replace `file` during the block."""
        path = self._folder / file
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        try:
            yield
        finally:
            shutil.copyfile(REPOSITORY / file, path)

    def failed(self, tests: Sequence[str], seconds: float, *flags: str) -> list[str] | None:
        """Return the tests that fail. None if they do not end within `seconds`."""
        pytest = ["-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "--timeout=120", *flags]
        done = self._run([*pytest, *tests], seconds)
        if done is None:
            return None
        assert done.returncode in (0, 1, 5), done.stdout + done.stderr  # 1: tests failed; others: pytest itself did
        return re.findall(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)

    def _run(self, arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
        roots = [self._folder, *(self._folder / root for root in self._roots)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, roots))}
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
        try:
            return subprocess.run(
                [sys.executable, *arguments], cwd=self._folder, env=environment, timeout=seconds, **options
            )
        except subprocess.TimeoutExpired:
            return None

    def noticed_by(self, area: Area, mutant: Mutant) -> str:
        """Return which tests fail with the mutant, or "" if none do."""
        file, (text, _) = str(mutant.file.relative_to(REPOSITORY)), mutant.applied()
        name = re.compile(rf"\b{mutant.file.stem}\b")
        paths = [path for each in area.tests for path in sorted((REPOSITORY / each).glob("test_*.py"))]
        near = [path for path in paths if name.search(path.read_text(encoding="utf-8"))]
        for path in near:
            if by := self._confirmed(file, text, path):
                return by
        if area.is_simulated:
            with self.planted(file, text):
                done = self._run(["-c", _HISTORIES], _SECONDS)
            if done is None or done.returncode:
                return "simulation"
        return next((by for path in paths if path not in near and (by := self._confirmed(file, text, path))), "")

    def _confirmed(self, file: str, text: bytes, path: Path) -> str:
        """Return a test of a file that fails because of the change, however busy the machine is, or ""."""
        with self.planted(file, text):
            failed = self.failed([str(path.relative_to(REPOSITORY))], _SECONDS, "-x")
        if failed is None:
            return "no end within the time"
        for test in failed:
            passes = self.failed([test], _SECONDS) == []
            with self.planted(file, text):
                if passes and self.failed([test], _SECONDS) != []:
                    return test
        return ""


def survivors(fault: Fault) -> list[str]:
    """Run the tests of `fault` and return those that pass. A run that hangs counts as a failure of all."""
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        copy = Copy(Path(folder))
        with copy.planted(fault.file, fault.changed()):
            failed = copy.failed([f"tests/{test}" for test in fault.tests], _LISTED_SECONDS)
    if failed is None:
        return []
    red = {test.removeprefix("tests/").partition("[")[0] for test in failed}
    return [test for test in fault.tests if test not in red]


def _plant_listed(words: Sequence[str]) -> bool:
    """Plant each listed fault and print the results of its tests. Return whether no fault survives all of them."""
    chosen = [fault for fault in listed() if not words or any(word in fault.title for word in words)]
    alive = 0
    for fault in chosen:
        left = survivors(fault)
        alive += len(left) == len(fault.tests)
        print(f"{len(fault.tests) - len(left)} of {len(fault.tests)} tests red  {fault.title}", flush=True)
        for test in left:
            print(f"    green: {test}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} listed faults found")
    return not alive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listed", nargs="*", metavar="WORD", help="plant the faults of tests/faults.yaml")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of the path of the modules")
    options = parser.parse_args()
    if options.listed is not None:
        return 0 if _plant_listed(options.listed) else 1
    caught = 0
    chosen = drawn(options.count, options.seed, options.only)
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        copy = Copy(Path(folder))
        for area, mutant in chosen:
            began = time.monotonic()
            by = copy.noticed_by(area, mutant)
            caught += bool(by)
            result = f"caught by {by}" if by else "SURVIVED"
            print(f"{time.monotonic() - began:5.1f} s  {mutant.applied()[1]}  {result}", flush=True)
    print(f"{caught} of {len(chosen)} caught", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
