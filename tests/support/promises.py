"""Promises: sentences of the pages that say how the product behaves, with the tests that check them.

tests/promises.yaml quotes a page and names its tests. A sentence with a promising word and without a quote is
untraced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from support.sources import REPOSITORY

WORDS = re.compile(
    r"\b(never|always|exactly|at most|at least|every|cannot|nothing|nobody|no other|refuse[sd]?|ends? (with|within)"
    r"|within|only|alone|any number|whatever|bounded|same|lost|guarantee\w*|must|as often as|at once|is cut|ever)\b",
    re.IGNORECASE,
)
"""What makes a sentence a promise, unless it is listed as none."""
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])(?:\*\*|\*)? (?=[A-Z`*\[0-9])|\0")
_CELL = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Entry:
    """An entry of tests/promises.yaml for one quote: its tests, or the reason why it is no promise."""

    page: str
    quote: str
    tests: tuple[str, ...]
    not_a_promise: str


def entries() -> list[Entry]:
    """Return all entries of tests/promises.yaml."""
    pages = yaml.safe_load((REPOSITORY / "tests" / "promises.yaml").read_text(encoding="utf-8"))["pages"]
    return [_entry(page, row) for page, rows in pages.items() for row in rows]


def _entry(page: str, row: dict[str, Any]) -> Entry:
    assert row.keys() in ({"quote", "tests"}, {"quote", "not_a_promise"}), row
    return Entry(page, " ".join(row["quote"].split()), tuple(row.get("tests", ())), row.get("not_a_promise", ""))


def text_of(page: str) -> str:
    """Return the text of a page without code, as one line. Paragraphs, items and cells of tables end with NUL.

    Rows of docs/reliability.md are left out: tests/faults.yaml names their tests.
    """
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    return "\0".join(" ".join(piece.split()) for piece in _pieces(text, with_tables=page != "docs/reliability.md"))


def _pieces(text: str, *, with_tables: bool) -> Iterator[str]:
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_row = line.startswith("|")
        if is_row or not line.strip() or re.match(r"#|    |[*-] ", line):
            yield " ".join(lines)
            lines = []
        if is_row:
            yield from (_CELL.split(line)[1:-1] if with_tables else ())
        else:
            lines.append(re.sub(r"^[*-] ", "", line))


def untraced(text: str, quotes: list[str]) -> list[str]:
    """Return the sentences with a word of promise that no quote touches."""
    places = [match.span() for quote in quotes for match in re.finditer(re.escape(quote), text)]
    found, begin = [], 0
    for end, following in [*(m.span() for m in _END_OF_SENTENCE.finditer(text)), (len(text), len(text))]:
        sentence = text[begin:end]
        if WORDS.search(sentence) and not any(first < end and last > begin for first, last in places):
            found.append(sentence)
        begin = following
    return found
