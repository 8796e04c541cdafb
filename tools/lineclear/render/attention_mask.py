"""The block-diagonal attention mask of one packed step, as text and as SVG.

A step packs the positions of all requests into one row without padding. A query attends to the keys of its own request
up to its own position: those that earlier steps left in the KV cache, and those that this step writes. This is the mask
that FlashAttention's variable-length interface implies; no process builds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from lineclear.client import StepRow

from .svg_style import svg_document

CACHED, NEW, MASKED = "▒", "█", "·"
_MEANINGS = {
    CACHED: "key from an earlier step", NEW: "key of this step", MASKED: "masked: later position or other request",
}  # fmt: skip
_MAX_QUERIES = 12
"""Queries shown of one row."""
_LABEL = 26
_CELL, _SVG_LABEL, _SVG_HEAD = 14, 190, 46


class _Block(NamedTuple):
    """The keys of one request as columns of `scale` keys: first `old` ones from earlier steps."""

    row: StepRow
    title: str
    scale: int
    old: int
    width: int


class _Grid(NamedTuple):
    """Each line has a label, and the cells of each block; without cells it stands for queries that are left out."""

    blocks: list[_Block]
    lines: list[tuple[str, list[str]]]
    hidden: int
    """Rows that do not fit."""


def _title(row: StepRow) -> str:
    """Return the request, its keys in the cache and its new keys."""
    return f"[{row.request}] {row.start}+{row.num_tokens}"


def _grid(rows: Sequence[StepRow], columns: int) -> _Grid:
    shown = rows[: max(1, columns // (2 + max(map(len, map(_title, rows)), default=1)))]
    # Each block gets an equal share; what short blocks leave goes to the long ones.
    left, todo, widths = columns, len(shown), {}
    for index, row in sorted(enumerate(shown), key=lambda item: item[1].start + item[1].num_tokens):
        widths[index] = max(2, min(row.start + row.num_tokens, left // todo - 2))
        left, todo = left - max(widths[index], len(_title(row))) - 2, todo - 1
    blocks = [_block(row, widths[index]) for index, row in enumerate(shown)]
    return _Grid(blocks, [line for block in blocks for line in _lines(block, blocks)], len(rows) - len(shown))


def _block(row: StepRow, most_columns: int) -> _Block:
    scale = max(1, -(-(row.start + row.num_tokens) // most_columns))
    while -(-row.start // scale) + -(-row.num_tokens // scale) > most_columns > 1:
        scale += 1
    old = -(-row.start // scale)
    return _Block(row, _title(row), scale, old, old + -(-row.num_tokens // scale))


def _lines(block: _Block, blocks: Sequence[_Block]) -> Iterator[tuple[str, list[str]]]:
    row = block.row
    left_out = range(_MAX_QUERIES - 4, row.num_tokens - 3 if row.num_tokens > _MAX_QUERIES else 0)
    for query in range(row.num_tokens):
        if query not in left_out:
            new = query // block.scale + 1
            own = CACHED * block.old + NEW * new + MASKED * (block.width - block.old - new)
            cells = [own if other is block else MASKED * other.width for other in blocks]
            yield f"[{row.request}] {row.kind:<9} pos {row.start + query}", cells
        elif query == left_out.start:
            yield f"{len(left_out)} more queries of [{row.request}]", []


def mask_text(rows: Sequence[StepRow], width: int = 100) -> str:
    """Return the mask: a line for each query, a column for each key. `width`: characters of a line, about."""
    grid = _grid(rows, max(20, width - _LABEL))
    widths = [max(block.width, len(block.title)) for block in grid.blocks]
    lines = [_joined("query" + " " * 17 + "keys:", [block.title for block in grid.blocks], widths)]
    lines += (_joined(label, cells, widths) if cells else f"{'':10}{label}" for label, cells in grid.lines)
    lines.append("   ".join(f"{mark} {meaning}" for mark, meaning in _MEANINGS.items()))
    scaled = [f"[{block.row.request}] {block.scale}" for block in grid.blocks if block.scale > 1]
    if scaled:
        lines.append(f"keys in a column: {', '.join(scaled)}; 1 elsewhere")
    if grid.hidden:
        lines.append(f"{grid.hidden} more rows of this step are not shown")
    return "\n".join(lines) + "\n"


def _joined(label: str, texts: Sequence[str], widths: Sequence[int]) -> str:
    return (f"{label:<{_LABEL}}" + "  ".join(f"{text:<{w}}" for text, w in zip(texts, widths, strict=True))).rstrip()


def mask_svg(rows: Sequence[StepRow], title: str, columns: int = 80) -> str:
    """Draw the mask: a row of squares for each query, a column for each key."""
    grid = _grid(rows, columns)
    lefts, x = [], _SVG_LABEL
    for block in grid.blocks:
        lefts.append(x)
        x += max(block.width * _CELL, len(block.title) * 8) + _CELL
    height = _SVG_HEAD + len(grid.lines) * _CELL + 40
    parts = [f'<text class="title" x="8" y="20">{escape(title)}</text>']
    for left, block in zip(lefts, grid.blocks, strict=True):
        parts.append(f'<text class="dim" x="{left}" y="40">{block.title}</text>')
    for index, (label, cells) in enumerate(grid.lines):
        top, style = _SVG_HEAD + index * _CELL, "" if cells else ' class="dim"'
        parts.append(f'<text{style} x="8" y="{top + 11}">{label}</text>')
        for left, texts in zip(lefts, cells, strict=False):
            parts += _squares(texts, left, top)
    y = height - 24
    for left, mark in ((8, CACHED), (230, NEW), (400, MASKED)):
        parts.append(f'<rect class="{_CLASSES[mark]}" x="{left}" y="{y}" width="12" height="12"/>')
        parts.append(f'<text x="{left + 18}" y="{y + 11}">{_MEANINGS[mark]}</text>')
    return svg_document(parts, max(x, 700), height, title)


_CLASSES = {CACHED: "cached", NEW: "prefill", MASKED: "idle"}


def _squares(cells: str, left: int, y: int) -> Iterator[str]:
    for column, cell in enumerate(cells):
        x = left + column * _CELL
        yield f'<rect class="{_CLASSES[cell]}" x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}"/>'
