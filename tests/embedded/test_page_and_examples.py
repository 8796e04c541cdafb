"""docs/embedding.md and the examples run, and the package imports the core and the standard library only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS

from lineclear import embedded
from lineclear.embedded import BatcherStats, Completion, Options, SlotRow, StepBatch

PAGE = REPOSITORY / "docs/embedding.md"
QUERIES = REPOSITORY / "examples/batch_queries.py"


def run(*arguments: str | Path) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_the_core_and_the_standard_library() -> None:
    code = "import sys; before = set(sys.modules); import lineclear.embedded; print(*set(sys.modules) - before)"
    loaded = {name for name in run("-c", code).split() if name.partition(".")[0] not in sys.stdlib_module_names}
    assert {name for name in loaded if name.partition(".")[0] != "lineclear"} == set()
    rooms = {".".join(name.split(".")[1:3]) for name in loaded if name.count(".")}
    assert {room.partition(".")[0] for room in rooms} == {"embedded", "errors", "scheduler", "wire"}
    assert {room for room in rooms if room.startswith("scheduler.")} == {"scheduler.core"}


def test_example_batches_what_is_no_language_model() -> None:
    assert len(QUERIES.read_text().splitlines()) <= 30
    *names, missing, queries = run(QUERIES).strip().split(", ")
    assert (names, missing) == (["city 0", "city 199"], "KeyError(5000)")
    assert 5 <= int(queries.split()[0]) <= 10


def test_example_model_answers_as_it_does_alone() -> None:
    pytest.importorskip("numpy")
    example = REPOSITORY / "examples/recurrent_model.py"
    *batched, total = run(example).splitlines()
    source = example.read_text().replace("VOCABULARY, WIDTH, SLOTS = 50, 32, 4", "VOCABULARY, WIDTH, SLOTS = 50, 32, 1")
    *alone, steps = run("-c", source).splitlines()
    assert batched == alone
    assert steps == "76 steps for 76 tokens"
    assert 20 <= int(total.split()[0]) < 30


def test_page_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, "embedding.md", "exec"), {})
    assert capsys.readouterr().out == "city 0 city 199\n"


def test_page_names_what_exists() -> None:
    page = PAGE.read_text(encoding="utf-8")
    known = {*embedded.__all__, *Options.__annotations__}
    for public in (BatcherStats, Completion, SlotRow, StepBatch):
        known |= {*public.__annotations__, *vars(public)}
    for name in ("Batcher", "ItemBatcher", "SlotRow", "StepBatch", "Completion", "MORE", *Options.__annotations__):
        assert name in page, name
    table = re.findall(
        r"^\| `(\w+)`(?:, `(\w+)`)*", page.partition("| field of `SlotRow`")[2].partition("\n\n")[0], re.M
    )
    assert table
    assert {name for row in table for name in row if name} - known == set()
