"""Make docs/reliability.md from tests/faults.yaml: the promise, the fault matrix, and the bugs found so far."""

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

The rows below rest on four rules:

- *A worker can be rebuilt.* All its state follows from the scheduler's tokens. A worker joins for one epoch; any error
  between the processes ends the epoch, and the next one starts empty.
- *A token is sent only once it is confirmed*, that is by the result of the oldest plan in flight, of the current epoch.
  So a crash loses steps that no client has seen, never tokens.
- *Every response has the index of its first token*, so a gap or a repetition cannot go unnoticed: the client library
  raises DATA_LOSS.
- *Delivered tokens never change.* A recovery continues from the delivered tokens with the same noise. Where rounding
  differs between batches (bfloat16), a near tie may be decided differently.

Every row names its tests. `make chaos`, `make fuzz` and `make soak` run the long versions.
"""

_WORK = (
    "",
    "## Work whose size a request chooses",
    "",
    "Work of each step that grows with what a request sends. Costs are of one row at its bound, beside a decode step.",
    "",
    "| work | chosen by | bound | cost at the bound | tests |",
    "|---|---|---|---|---|",
)


def page() -> str:
    """Return the page."""
    matrix = yaml.safe_load(MATRIX.read_text(encoding="utf-8"))
    return "\n".join(_lines(matrix)) + "\n"


def _lines(matrix: dict[str, Any]) -> Iterator[str]:
    yield _PROMISE
    rows = [row for section in matrix["sections"] for row in section["rows"]]
    without = [row for row in rows if "tests" not in row]
    yield f"{len(rows)} faults, {len(without)} of them without tests."
    for section in matrix["sections"]:
        yield from (
            "",
            f"## {section['title']}",
            "",
            "| fault | outcome | figure | tests |",
            "|---|---|---|---|",
        )
        for row in section["rows"]:
            yield f"| {row['fault']} | {row['outcome']} | {row.get('figure', '')} | {_tests(row)} |"
    yield from _WORK
    for row in matrix["work"]:
        yield f"| {row['work']} | {row['chosen_by']} | {row['bound']} | {row['cost']} | {_tests(row)} |"
    yield from (
        "",
        "## Bugs found",
        "",
        "Bugs that broke a promise, how they were found, and the test that reproduces them.",
        "",
    )
    yield from ("| bug | found by | reproducer |", "|---|---|---|")
    for entry in matrix["track_record"]:
        yield f"| {entry['bug']} | {entry['found_by']} | {_link(entry['reproducer'])} |"


def _tests(row: dict[str, Any]) -> str:
    tests = "<br>".join(map(_link, row.get("tests", ())))
    untested = f"**not tested**: {row['untested']}" if "untested" in row else ""
    return "<br>".join(filter(None, (tests, untested)))


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{name}](../tests/{file})"
