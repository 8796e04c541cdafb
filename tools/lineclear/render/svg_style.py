"""The frame of every SVG: colours for light and dark backgrounds, without scripts and fonts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_COLOURS = {  # for a light and a dark background
    "ink": ("#1f2328", "#e6edf3"),
    "dim": ("#59636e", "#9198a1"),
    "idle": ("#eceff2", "#21262d"),
    "line": ("#d1d9e0", "#3d444d"),
    "page": ("#ffffff", "#0d1117"),
    "prefill": ("#f2a93b", "#d29922"),
    "cached": ("#57ab5a", "#3fb950"),
    "decode": ("#6ea8f2", "#316dca"),
    "recompute": ("#c98bdb", "#8957a5"),
    "padding": ("#e5737a", "#c93c42"),
    "end": ("#1f2328", "#f0f6fc"),
    "preempted": ("#d1242f", "#ff7b72"),
}
_RULES = (
    *(("text", "fill", "ink"), (".dim", "fill", "dim"), (".page", "fill", "page"), (".idle", "fill", "idle")),
    *((f".{mark}", "fill", mark) for mark in ("prefill", "cached", "decode", "recompute", "end", "preempted")),
    *((".stop", "fill", "preempted"), (".axis", "stroke", "line"), (".barrier", "stroke", "preempted")),
    (".hatch", "stroke", "padding"),
)
_SHAPES = """
svg { color-scheme: light dark; max-width: 100%; height: auto; }
text { font: 12px ui-sans-serif, system-ui, sans-serif; }
.title { font-size: 15px; font-weight: 600; } .label { text-anchor: middle; pointer-events: none; }
.padding { fill: url(#hatch); } .hatch { stroke-width: 3; } .barrier { stroke-width: 2; stroke-dasharray: 4 3; }
"""


def _colours(dark: bool) -> str:
    """Return the rules of the colours, without CSS variables, which librsvg and others lack."""
    return "\n".join(f"{selector} {{ {what}: {_COLOURS[name][dark]}; }}" for selector, what, name in _RULES)


_STYLE = f"{_SHAPES}{_colours(dark=False)}\n@media (prefers-color-scheme: dark) {{\n{_colours(dark=True)}\n}}\n"
_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="idle" width="6" height="6"/><line class="hatch" y2="6"/></pattern></defs>'
)


def svg_document(parts: Sequence[str], width: int, height: int, description: str) -> str:
    """Return a self-contained SVG. `description` is its text for screen readers."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(description)}">'
    page = f'<rect class="page" width="{width}" height="{height}"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", _HATCH, page, *parts, "</svg>"]) + "\n"
