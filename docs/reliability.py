"""docs/reliability.md from tests/faults.yaml: the promise, the matrix of faults, and the track record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MATRIX = Path(__file__).resolve().parents[1] / "tests" / "faults.yaml"

_PROMISE = """\
# Reliability

Made from `tests/faults.yaml` by `docs/generate.py`; do not edit.

**Kill the worker at any moment: every admitted stream continues; no token index is lost, repeated or changed. Kill the
scheduler or the pod: the client library continues the same answer from the last index it holds. One request can fail
only itself.**

What the rows below rest on:

- *The worker owes nothing to memory.* All it knows can be rebuilt from the scheduler's tokens. A worker lives for an
  epoch; whatever goes wrong between the processes ends it, and the next one begins with nothing.
- *A token is sent only once it is confirmed*, and is confirmed only from the result of the oldest plan in flight, of
  this epoch. So a crash loses steps that nobody has seen, never tokens.
- *Every response says the index of its first token*, so a gap or a repetition cannot go unnoticed: the client library
  raises DATA_LOSS.
- *What was delivered is never rewritten.* The continuation after a recovery is computed from the delivered tokens. It
  has the same noise; where rounding differs between one batch and another (bfloat16), a near tie may still fall the
  other way.

Every row names the tests that hold it. `make chaos`, `make fuzz` and `make soak` run the long versions.
"""


def page() -> str:
    """The whole page."""
    matrix = yaml.safe_load(MATRIX.read_text(encoding="utf-8"))
    return "\n".join(_lines(matrix)) + "\n"


def _lines(matrix: dict[str, Any]) -> Iterator[str]:
    yield _PROMISE
    rows = [row for section in matrix["sections"] for row in section["rows"]]
    without = [row for row in rows if "tests" not in row]
    yield f"{len(rows)} faults; {len(rows) - len(without)} are held by tests, {len(without)} are not."
    for section in matrix["sections"]:
        yield from (
            "",
            f"## {section['title']}",
            "",
            "| fault | what happens | figure | held by |",
            "|---|---|---|---|",
        )
        for row in section["rows"]:
            yield f"| {row['fault']} | {row['outcome']} | {row.get('figure', '')} | {_held_by(row)} |"
    yield from ("", "## Track record", "", "Bugs that broke a promise, who found them, and what holds it now.", "")
    yield from ("| bug | found by | reproducer |", "|---|---|---|")
    for entry in matrix["track_record"]:
        yield f"| {entry['bug']} | {entry['found_by']} | {_link(entry['reproducer'])} |"


def _held_by(row: dict[str, Any]) -> str:
    tests = "<br>".join(map(_link, row.get("tests", ())))
    untested = f"**not tested**: {row['untested']}" if "untested" in row else ""
    return "<br>".join(filter(None, (tests, untested)))


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{name}](../tests/{file})"
