"""The attention mask of a step: each query sees the keys of its own request up to its own position."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from support.steps import decode, prefill

from lineclear.client import StepRow
from lineclear.render.attention_mask import CACHED, MASKED, NEW, mask_svg, mask_text

DECODE = decode(0, 1, 5)
PREFILL = prefill(1, 2, 0, 3)
CHUNK = prefill(2, 3, 4, 2, cached=4)


def cells(line: str) -> list[str]:
    """Return the blocks of a line of the mask."""
    return re.findall(rf"[{CACHED}{NEW}{MASKED}]+", line)


def test_mask_is_block_diagonal() -> None:
    lines = mask_text([DECODE, PREFILL, CHUNK]).splitlines()
    assert lines[0].split()[1:] == ["keys:[1]", "5+1", "[2]", "0+3", "[3]", "4+2"]
    assert [cells(line) for line in lines[1:7]] == [
        ["▒▒▒▒▒█", "···", "······"],
        ["······", "█··", "······"],
        ["······", "██·", "······"],
        ["······", "███", "······"],
        ["······", "···", "▒▒▒▒█·"],
        ["······", "···", "▒▒▒▒██"],
    ]
    assert [line.split("pos ")[1].split()[0] for line in lines[1:7]] == ["5", "0", "1", "2", "4", "5"]


def test_keys_of_long_requests_share_columns() -> None:
    long = decode(3, 4, 900)
    text = mask_text([DECODE, long, PREFILL], width=100)
    lines = text.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert "[4] 900+1" in lines[0]
    scale = int(re.search(r"keys in a column: \[4\] (\d+);", text)[1])  # type: ignore[index]
    own = cells(lines[2])[1]
    assert own == CACHED * -(-900 // scale) + NEW


def test_long_prompts_are_shortened_and_counted() -> None:
    text = mask_text([prefill(0, 7, 0, 500)])
    shown = [line for line in text.splitlines() if line.startswith("[7]")]
    skipped = int(re.search(r"(\d+) more queries of \[7\]", text)[1])  # type: ignore[index]
    assert len(shown) + skipped == 500
    assert "pos 499" in shown[-1]


def test_rows_that_do_not_fit_are_counted() -> None:
    rows = [decode(slot, slot + 1, 30) for slot in range(64)]
    text = mask_text(rows, width=80)
    assert all(len(line) <= 100 for line in text.splitlines())
    shown = sum(line.startswith("[") for line in text.splitlines())
    assert f"{64 - shown} more rows of this step are not shown" in text


@pytest.mark.parametrize("rows", [[DECODE], [DECODE, PREFILL, CHUNK], [prefill(0, 1, 5000, 900)]])
def test_svg_has_a_square_for_each_cell(rows: list[StepRow]) -> None:
    root = ET.fromstring(mask_svg(rows, "a <title> & more"))
    text = mask_text(rows, width=106)
    squares = [e.get("class") for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("width") == "13"]
    drawn = "".join("".join(cells(line)) for line in text.splitlines() if line.startswith("["))
    assert squares == [{CACHED: "cached", NEW: "prefill", MASKED: "idle"}[cell] for cell in drawn]
