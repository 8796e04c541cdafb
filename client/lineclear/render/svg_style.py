"""The frame of every SVG: colours for light and dark backgrounds, without scripts and fonts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
svg { color-scheme: light dark; --ink: #1f2328; --dim: #59636e; --idle: #eceff2; --line: #d1d9e0; --page: #ffffff;
  --prefill: #f2a93b; --cached: #57ab5a; --decode: #6ea8f2; --recompute: #c98bdb; --padding: #e5737a; --end: #1f2328;
  --preempted: #d1242f; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --dim: #9198a1; --idle: #21262d; --line: #3d444d;
  --page: #0d1117; --prefill: #d29922; --cached: #3fb950; --decode: #316dca; --recompute: #8957a5; --padding: #c93c42;
  --end: #f0f6fc; --preempted: #ff7b72; } }
text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: var(--ink); }
.title { font-size: 15px; font-weight: 600; } .dim { fill: var(--dim); } .page { fill: var(--page); }
.idle { fill: var(--idle); } .prefill { fill: var(--prefill); } .cached { fill: var(--cached); }
.decode { fill: var(--decode); } .recompute { fill: var(--recompute); } .padding { fill: url(#hatch); }
.end { fill: var(--end); } .preempted { fill: var(--preempted); } .label { text-anchor: middle; pointer-events: none; }
.axis { stroke: var(--line); } .barrier { stroke: var(--preempted); stroke-width: 2; stroke-dasharray: 4 3; }
.stop { fill: var(--preempted); } .hatch { stroke: var(--padding); stroke-width: 3; }
"""
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
