"""Break the product as a row of tests/faults.yaml says, and check that the tests of the row fail.

A row may have `red_when`: the file `in` which the text `replace` becomes the text `by`. The row's tests run on a copy
of the sources with that change.

    cd tests && python -m support.mutants            every row that has one
    cd tests && python -m support.mutants NaN gone   those whose fault has one of these words
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support.sources import REPOSITORY, ROOTS

_SOURCES = tuple(root.name for root in ROOTS)
_BOUND_SECONDS = 300.0
_PATIENCE = 20.0


@dataclass(frozen=True)
class Mutant:
    """One change of one file that must make `tests` fail."""

    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def changed(self) -> str:
        """Return the text of the changed file. Raises AssertionError unless it contains `old` exactly once."""
        text = (REPOSITORY / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        assert count == 1, f"{self.file} has {self.old!r} {count} times: change red_when of {self.fault!r}"
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """Return the mutants of all rows that have `red_when`."""
    matrix = yaml.safe_load((REPOSITORY / "tests" / "faults.yaml").read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = [row for section in matrix["sections"] for row in section["rows"]]
    found = []
    for row in rows:
        if "red_when" in row:
            how = row["red_when"]
            tests = tuple(how.get("tests", row["tests"]))
            assert set(tests) <= set(row["tests"]), f"{row['fault']}: red_when names tests that the row does not"
            found.append(Mutant(row["fault"], how["in"], how["replace"], how["by"], tests))
    return found


def survivors(mutant: Mutant) -> list[str]:
    """Run the tests of `mutant` and return those that pass. A run that hangs counts as a failure of all."""
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        copy = Path(folder)
        for name in (*_SOURCES, "tests"):
            shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        for name in ("pyproject.toml", "demo", "docs", "deploy", "README.md", "CHANGELOG.md", "Makefile"):
            (copy / name).symlink_to(REPOSITORY / name)
        # A mutant makes tests wait for an event that never happens, so shorten the wait.
        (copy / "tests" / "support" / "time_limits.py").write_text(f"PATIENCE_SECONDS = SOON_SECONDS = {_PATIENCE}\n")
        (copy / mutant.file).write_text(mutant.changed(), encoding="utf-8")
        paths = [str(copy / name) for name in (*_SOURCES, "tests")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-p", "no:cacheprovider", "--timeout=120"]
        command += [f"tests/{test}" for test in mutant.tests]
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_BOUND_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return []
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: tests failed; other codes: pytest itself failed
    failed = set(re.findall(r"^(?:FAILED|ERROR) tests/(\S+?::\w+)", done.stdout, re.MULTILINE))
    return [test for test in mutant.tests if test not in failed]


def main(words: Sequence[str]) -> int:
    """Plant each mutant and print the results of its tests; return 1 if all tests of a mutant pass."""
    chosen = [m for m in mutants() if not words or any(word in m.fault for word in words)]
    alive = 0
    for mutant in chosen:
        began = time.monotonic()
        left = survivors(mutant)
        survived = len(left) == len(mutant.tests)
        alive += survived
        says = "SURVIVED" if survived else f"{len(mutant.tests) - len(left)} of {len(mutant.tests)} tests red"
        print(f"{says:22} {time.monotonic() - began:5.1f} s   {mutant.fault}", flush=True)
        for test in left:
            print(f"{'':32} green: {test}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} mutants of fault rows found")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
