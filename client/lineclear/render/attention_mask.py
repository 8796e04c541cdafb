"""The block-diagonal attention mask of one packed step, as text and as SVG.

A step packs the positions of all requests into one row without padding. A query attends to the keys of its own request
up to its own position: those that earlier steps left in the KV cache, and those that this step writes. This is the mask
that FlashAttention's variable-length interface implies; no process builds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from lineclear.client import StepRow

from .svg_style import svg_document

CACHED, NEW, MASKED = "▒", "█", "·"
LEGEND = (
    f"{CACHED} key from an earlier step   {NEW} key of this step   {MASKED} masked: later position or other request"
)
_MAX_QUERIES = 12
"""Queries shown of one row."""
_LABEL = 26
_CELL, _SVG_LABEL, _SVG_HEAD = 14, 190, 46


@dataclass(frozen=True)
class _Block:
    """The keys of one request as columns. A column holds one key, or several if there are too many."""

    row: StepRow
    most_columns: int

    @cached_property
    def scale(self) -> int:
        """Return the keys of a column."""
        keys = self.row.start + self.row.num_tokens
        scale = max(1, -(-keys // self.most_columns))
        while -(-self.row.start // scale) + -(-self.row.num_tokens // scale) > self.most_columns > 1:
            scale += 1
        return scale

    @property
    def old(self) -> int:
        return -(-self.row.start // self.scale)

    @property
    def width(self) -> int:
        return self.old + -(-self.row.num_tokens // self.scale)

    @property
    def title(self) -> str:
        return _title(self.row)

    def cells(self, query: int | None) -> str:
        """Return a character for each column, for the query at this index of the row; None: of another request."""
        if query is None:
            return MASKED * self.width
        new = query // self.scale + 1
        return CACHED * self.old + NEW * new + MASKED * (self.width - self.old - new)


@dataclass(frozen=True)
class _Line:
    """A query, or a gap (`query` None) for `skipped` queries."""

    block: int
    query: int | None
    skipped: int = 0


@dataclass(frozen=True)
class _Grid:
    blocks: tuple[_Block, ...]
    lines: tuple[_Line, ...]
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
    blocks = tuple(_Block(row, widths[index]) for index, row in enumerate(shown))
    lines = tuple(line for index, row in enumerate(shown) for line in _lines(index, row.num_tokens))
    return _Grid(blocks, lines, len(rows) - len(shown))


def _lines(block: int, count: int) -> Iterator[_Line]:
    if count <= _MAX_QUERIES:
        yield from (_Line(block, query) for query in range(count))
        return
    head, tail = _MAX_QUERIES - 4, 3
    yield from (_Line(block, query) for query in range(head))
    yield _Line(block, None, count - head - tail)
    yield from (_Line(block, query) for query in range(count - tail, count))


def mask_text(rows: Sequence[StepRow], width: int = 100) -> str:
    """Return the mask: a line for each query, a column for each key. `width`: characters of a line, about."""
    grid = _grid(rows, max(20, width - _LABEL))
    widths = [max(block.width, len(block.title)) for block in grid.blocks]
    lines = [_joined("query" + " " * 17 + "keys:", (b.title for b in grid.blocks), widths)]
    for line in grid.lines:
        row = grid.blocks[line.block].row
        if line.query is None:
            lines.append(f"{'':10}{line.skipped} more queries of [{row.request}]")
            continue
        label = f"[{row.request}] {row.kind:<9} pos {row.start + line.query}"
        cells = (block.cells(line.query if index == line.block else None) for index, block in enumerate(grid.blocks))
        lines.append(_joined(label, cells, widths))
    lines.append(LEGEND)
    scaled = [f"[{block.row.request}] {block.scale}" for block in grid.blocks if block.scale > 1]
    if scaled:
        lines.append(f"keys in a column: {', '.join(scaled)}; 1 elsewhere")
    if grid.hidden:
        lines.append(f"{grid.hidden} more rows of this step are not shown")
    return "\n".join(lines) + "\n"


def _joined(label: str, texts: Iterator[str], widths: Sequence[int]) -> str:
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
    parts += (
        f'<text class="dim" x="{left}" y="40">{block.title}</text>'
        for left, block in zip(lefts, grid.blocks, strict=True)
    )
    for number, line in enumerate(grid.lines):
        y = _SVG_HEAD + number * _CELL
        row = grid.blocks[line.block].row
        if line.query is None:
            parts.append(f'<text class="dim" x="8" y="{y + 11}">{line.skipped} more queries of [{row.request}]</text>')
            continue
        parts.append(f'<text x="8" y="{y + 11}">[{row.request}] {row.kind} pos {row.start + line.query}</text>')
        for index, (left, block) in enumerate(zip(lefts, grid.blocks, strict=True)):
            parts += _squares(block.cells(line.query if index == line.block else None), left, y)
    y = height - 24
    for x_legend, mark, text in ((8, "cached", "key from an earlier step"), (230, "prefill", "key of this step"),
                                 (400, "idle", "masked: later position or other request")):  # fmt: skip
        parts.append(f'<rect class="{mark}" x="{x_legend}" y="{y}" width="12" height="12"/>')
        parts.append(f'<text x="{x_legend + 18}" y="{y + 11}">{text}</text>')
    return svg_document(parts, max(x, 700), height, title)


_CLASSES = {CACHED: "cached", NEW: "prefill", MASKED: "idle"}


def _squares(cells: str, left: int, y: int) -> Iterator[str]:
    for column, cell in enumerate(cells):
        x = left + column * _CELL
        yield f'<rect class="{_CLASSES[cell]}" x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}"/>'
