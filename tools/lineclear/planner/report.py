"""Shows outcomes: a table, JSON, and an SVG plot of latency against load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from lineclear.planner.virtual_run import Outcome

_COLUMNS = (
    *("workers", "req/s", "done", "lost", "tok/s", "TTFT ms", "p50", "p99", "ITL ms", "p50", "p99"),
    *("queue", "preempt", "slots", "blocks", "busy"),
)
_WIDTHS = (7, 8, 9, 7, 10, 10, 9, 9, 9, 8, 8, 8, 9, 7, 8, 6)


def header() -> str:
    """Return the line above the table. Times are milliseconds; slots and blocks are the shares in use."""
    return "".join(f"{name:>{width}}" for name, width in zip(_COLUMNS, _WIDTHS, strict=True))


def row(outcome: Outcome) -> str:
    """Return the outcome as a line of the table. `lost` counts rejected and failed requests."""
    first, gap = outcome.time_to_first_token, outcome.inter_token_latency
    lost = sum(outcome.rejected.values()) + sum(outcome.failed.values())
    cells = (
        *(str(outcome.workers), _number(outcome.rate), str(outcome.finished), str(lost)),
        f"{outcome.tokens_per_second:.1f}",
        *(f"{1e3 * seconds:.1f}" for seconds in (first.mean, first.quantile(0.5), first.quantile(0.99))),
        *(f"{1e3 * seconds:.2f}" for seconds in (gap.mean, gap.quantile(0.5), gap.quantile(0.99))),
        *(f"{outcome.queue_mean:.1f}", str(outcome.preemptions)),
        *(f"{share:.0%}" for share in (outcome.slot_use, outcome.block_use, outcome.worker_use)),
    )
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def needed_workers(outcomes: Iterable[Outcome], milliseconds: float) -> Iterator[str]:
    """Yield for each load the least number of workers with that TTFT p99 and no lost request."""
    by_rate: dict[float, list[Outcome]] = {}
    for outcome in outcomes:
        by_rate.setdefault(outcome.rate, []).append(outcome)
    for rate, tried in by_rate.items():
        enough = [o.workers for o in tried if _meets(o, milliseconds)]
        most = max(o.workers for o in tried)
        needed = (
            f"{min(enough)} worker{'s' * (min(enough) > 1)}"
            if enough
            else f"more than {most} workers; try more, such as --workers 1..64"
        )
        yield f"TTFT p99 of at most {milliseconds:g} ms at {_number(rate)} requests/s needs {needed}"


def _meets(outcome: Outcome, milliseconds: float) -> bool:
    is_complete = not outcome.rejected and not outcome.failed
    return is_complete and 1e3 * outcome.time_to_first_token.quantile(0.99) <= milliseconds


def to_json(outcomes: Iterable[Outcome], **settings: Any) -> dict[str, Any]:
    """Return all figures with the settings of the simulation."""
    return {"format": "lineclear simulation 1", "settings": settings, "runs": [o.to_json() for o in outcomes]}


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "inf"


# --- the plot --------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _TOP, _PANEL_WIDTH, _PANEL_HEIGHT = 860, 640, 80, 50, 620, 230
_COLOURS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#c92a2a", "#495057", "#e67700")


class _Series(NamedTuple):
    label: str
    colour: str
    is_dashed: bool
    points: Sequence[tuple[float, float]]


def plot(outcomes: Sequence[Outcome]) -> str:
    """Return an SVG file: time to first token and inter-token latency against the load, one colour for each number of
    workers. With one load, the horizontal axis is the number of workers.
    """
    by_workers = len({outcome.rate for outcome in outcomes}) == 1 and len(outcomes) > 1
    axis = "workers" if by_workers else "load (requests a second)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for index, (title, name) in enumerate(
        (("Time to first token", "time_to_first_token"), ("Inter-token latency", "inter_token_latency"))
    ):
        series = _series(outcomes, name, by_workers=by_workers)
        parts += _panel(series, f"{title} (ms): p50 solid, p99 dashed", axis, _TOP + index * (_PANEL_HEIGHT + 70))
    for index, count in enumerate(() if by_workers else sorted({outcome.workers for outcome in outcomes})):
        x, y = _LEFT + _PANEL_WIDTH + 25, _TOP + 15 + 20 * index
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(x + 20, y, f"{count} worker{'s' if count > 1 else ''}"))
    return "\n".join([*parts, "</svg>\n"])


def _series(outcomes: Sequence[Outcome], name: str, *, by_workers: bool) -> list[_Series]:
    groups = [0] if by_workers else sorted({outcome.workers for outcome in outcomes})
    found = []
    for index, count in enumerate(groups):
        chosen = [o for o in outcomes if by_workers or o.workers == count]
        chosen = [o for o in chosen if math.isfinite(o.rate) or by_workers]
        for share in (0.5, 0.99):
            points = [
                (float(o.workers) if by_workers else o.rate, 1e3 * getattr(o, name).quantile(share)) for o in chosen
            ]
            colour = _COLOURS[index % len(_COLOURS)]
            found.append(_Series(f"{count}", colour, share > 0.5, [p for p in sorted(points) if p[1] > 0]))
    return found


def _panel(series: Sequence[_Series], title: str, axis: str, top: float) -> list[str]:
    points = [point for one in series for point in one.points]
    parts = [_text(_LEFT, top - 12, title, size=14)]
    if not points:
        return [*parts, _text(_LEFT, top + 30, "no finite load")]
    right = max(x for x, _ in points) or 1.0
    low = math.floor(math.log10(min(y for _, y in points)))
    high = max(low + 1, math.ceil(math.log10(max(y for _, y in points))))

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log10(y) - low) / (high - low)
        return _LEFT + x / right * _PANEL_WIDTH, top + _PANEL_HEIGHT * (1 - share)

    for power in range(low, high + 1):
        _, y = place(0, 10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + _PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dee2e6"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{10.0**power:g}", anchor="end"))
    for tick in range(6):
        x, _ = place(right * tick / 5, 10.0**low)
        parts.append(_text(x, top + _PANEL_HEIGHT + 18, f"{right * tick / 5:.3g}", anchor="middle"))
    parts.append(_text(_LEFT + _PANEL_WIDTH / 2, top + _PANEL_HEIGHT + 36, axis, anchor="middle"))
    for one in series:
        placed = [place(x, y) for x, y in one.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        dash = ' stroke-dasharray="6 4"' if one.is_dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{one.colour}" stroke-width="2"{dash}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{one.colour}"/>' for x, y in placed]
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
