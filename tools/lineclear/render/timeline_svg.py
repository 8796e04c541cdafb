"""Draw the lanes of several panels as one SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .svg_style import svg_document
from .timeline import Barrier, Mark, Panel, Segment, Tick

WIDTH = 1000
_LEFT, _RIGHT = 60, 16
_PLOT = WIDTH - _LEFT - _RIGHT
_LANE, _GAP = 24, 4
_HEAD, _FOOT = 46, 30
_LEGEND = 58
_CHARACTER = 6.6
"""Width of a character of a label, to see which label fits its segment."""

_LEGEND_TEXTS = {
    Mark.PREFILL: "prefill (prompt)",
    Mark.CACHED: "cached part of a prompt",
    Mark.DECODE: "decode (one token a step)",
    Mark.RECOMPUTE: "computed again",
    Mark.PADDING: "padding",
    Mark.END: "end of an answer",
    Mark.PREEMPTED: "preempted",
    Mark.IDLE: "idle",
}


def timeline_svg(panels: Sequence[Panel]) -> str:
    """Draw the panels below each other, on one scale of steps. Raises ValueError without panels."""
    if not panels:
        raise ValueError("there are no steps to draw")
    columns = max(panel.columns for panel in panels)
    heights = [_HEAD + len(panel.lanes) * (_LANE + _GAP) + _FOOT for panel in panels]
    parts: list[str] = []
    top = 0
    for panel, panel_height in zip(panels, heights, strict=True):
        parts += (f'<g transform="translate({_LEFT} {top})">', *_panel(panel, _PLOT / columns), "</g>")
        top += panel_height
    marks = frozenset[Mark]().union(*(panel.marks for panel in panels))
    parts += (f'<g transform="translate({_LEFT} {top + 10})">', *_legend(marks), "</g>")
    return svg_document(parts, WIDTH, top + _LEGEND, "; ".join(f"{p.title}: {p.subtitle}" for p in panels))


def _panel(panel: Panel, scale: float) -> Iterator[str]:
    yield f'<text class="title" y="20">{escape(panel.title)}</text>'
    yield f'<text class="dim" y="37">{escape(panel.subtitle)}</text>'
    bottom = _HEAD + len(panel.lanes) * (_LANE + _GAP)
    for lane, name in enumerate(panel.lanes):
        y = _lane_y(lane)
        yield f'<text class="dim" x="-8" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
        yield f'<rect class="idle" y="{y}" width="{panel.columns * scale:.2f}" height="{_LANE}"/>'
    for segment in panel.segments:
        yield from _segment(segment, scale)
    for tick in panel.ticks:
        yield _tick(tick, scale)
    for barrier in panel.barriers:
        yield from _barrier(barrier, scale, bottom)
    yield f'<line class="axis" y1="{bottom + 2}" y2="{bottom + 2}" x2="{panel.columns * scale:.2f}"/>'
    for number in _ticks(panel.first_step, panel.columns):
        x = (number - panel.first_step) * scale
        yield f'<line class="axis" x1="{x:.2f}" x2="{x:.2f}" y1="{bottom + 2}" y2="{bottom + 6}"/>'
        yield f'<text class="dim" x="{x:.2f}" y="{bottom + 18}" text-anchor="middle">{number}</text>'


def _lane_y(lane: int) -> int:
    return _HEAD + lane * (_LANE + _GAP)


def _segment(segment: Segment, scale: float) -> Iterator[str]:
    x, y = segment.start * scale, _lane_y(segment.lane)
    width, count = (segment.end - segment.start) * scale, segment.end - segment.start
    what = f"[{segment.request}] {segment.mark}, {count} step{'s' * (count > 1)}"
    if segment.lower_share:
        what += f", {segment.lower_share:.0%} {segment.lower}"
    drawn = max(width, 1.0)  # at least a pixel, so that a short prefill stays visible
    yield f'<rect class="{segment.mark}" x="{x:.2f}" y="{y}" width="{drawn:.2f}" height="{_LANE}">'
    yield f"<title>{escape(what)}</title></rect>"
    if segment.lower_share:
        low = segment.lower_share * _LANE
        yield (
            f'<rect class="{segment.lower}" x="{x:.2f}" y="{y + _LANE - low:.2f}" width="{drawn:.2f}"'
            f' height="{low:.2f}"/>'
        )
    if segment.mark is Mark.PREFILL:
        return
    name = f"{segment.request}"
    labels = [f"padding {count}"] if segment.mark is Mark.PADDING else [f"[{name}] {count}", f"[{name}]", name]
    label = next((text for text in labels if len(text) * _CHARACTER + 3 <= width), "")
    if label:
        yield f'<text class="label" x="{x + width / 2:.2f}" y="{y + 16}">{escape(label)}</text>'


def _tick(tick: Tick, scale: float) -> str:
    x = (tick.column + 1) * scale
    return f'<rect class="{tick.mark}" x="{x - 1.5:.2f}" y="{_lane_y(tick.lane) - 1}" width="2" height="{_LANE + 2}"/>'


def _barrier(barrier: Barrier, scale: float, bottom: int) -> Iterator[str]:
    x = barrier.column * scale
    yield f'<line class="barrier" x1="{x:.2f}" x2="{x:.2f}" y1="{_HEAD - 6}" y2="{bottom + 2}"/>'
    yield f'<text class="stop" x="{x:.2f}" y="{_HEAD - 9}" text-anchor="middle">{escape(barrier.label)}</text>'


def _ticks(first: int, columns: int) -> Iterator[int]:
    """Return the first step and about ten round numbers after it."""
    step = next(n for power in range(12) for n in (10**power, 2 * 10**power, 5 * 10**power) if n * 10 >= columns)
    yield first
    yield from (number for number in range(first // step * step, first + columns, step) if number > first + step // 2)


def _legend(marks: frozenset[Mark]) -> Iterator[str]:
    x, y = 0.0, 0
    for mark, text in _LEGEND_TEXTS.items():
        if mark not in marks:
            continue
        length = 20 + len(text) * _CHARACTER
        if x + length > _PLOT:
            x, y = 0.0, y + 20
        width = 2 if mark in (Mark.END, Mark.PREEMPTED) else 14
        yield f'<rect class="{mark}" x="{x + (14 - width) / 2:.0f}" y="{y}" width="{width}" height="14"/>'
        yield f'<text x="{x + 20:.0f}" y="{y + 12}">{escape(text)}</text>'
        x += length + 20
