"""Draw the table "Beside other servers" of the README as bars."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lineclear.render.svg_style import svg_document

README = Path(__file__).resolve().parents[1] / "README.md"
MARKS = ("decode", "prefill", "cached", "recompute")  # the colour of each column
LABELS_WIDTH, BARS_WIDTH, BAR_HEIGHT, TOP = 190, 480, 16, 44


def chart() -> str:
    """Return the SVG. The longest bar is the largest figure of the table."""
    section = README.read_text(encoding="utf-8").partition("\n## Beside other servers\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\|.*\|$", section, re.MULTILINE)
    (_, *names), _, *rows = ([cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines)
    scale = BARS_WIDTH / max(int(cell) for row in rows for cell in row[1:] if cell)
    parts, y = list(legend(names)), TOP
    for label, *cells in rows:
        parts.append(f'<text x="12" y="{y + 12}">{label}</text>')
        for mark, cell in zip(MARKS, cells, strict=True):
            if cell:
                width = round(int(cell) * scale)
                parts.append(
                    f'<rect class="{mark}" x="{LABELS_WIDTH}" y="{y}" width="{width}" height="{BAR_HEIGHT - 2}"/>'
                )
                parts.append(f'<text class="dim" x="{LABELS_WIDTH + width + 6}" y="{y + 12}">{cell}</text>')
                y += BAR_HEIGHT
        y += BAR_HEIGHT
    return svg_document(
        parts, LABELS_WIDTH + BARS_WIDTH + 50, y, "Output tokens a second: the table of the README as bars"
    )


def legend(names: list[str]) -> Iterator[str]:
    for index, (mark, name) in enumerate(zip(MARKS, names, strict=True)):
        x = LABELS_WIDTH + index * 125
        yield f'<rect class="{mark}" x="{x}" y="14" width="12" height="12"/><text x="{x + 18}" y="24">{name}</text>'
