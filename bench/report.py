"""Prints results as tables and curves: medians over undisturbed runs, and ratios to the first contender.

    python -m bench.report bench/results/FILE.jsonl [--svg curve.svg]
    python -m bench.report --docs           # update the list of results in docs/performance.md

Reads the files of `compare` and `micro`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import Result, median

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- results: python -m bench.report --docs -->", "<!-- end of results -->"
_COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#8d5a97", "#444444", "#2e4057", "#a44a3f")
_WIDTH, _HEIGHT, _MARGIN = 640, 400, 60


@dataclass(frozen=True)
class Line:
    """One contender on one workload at one concurrency."""

    contender: str
    concurrency: int
    num_runs: int
    num_disturbed: int
    runs: tuple[Result, ...]
    """The undisturbed runs, or all if every run is disturbed."""

    @property
    def trusted(self) -> bool:
        """No run is disturbed."""
        return not any(run.disturbed for run in self.runs)

    def middle(self, figure: Callable[[Result], float | None]) -> float | None:
        """Return the median of a figure; None if no run has it."""
        values = [value for run in self.runs if (value := figure(run)) is not None]
        return median(values) if values else None


def read(path: Path) -> list[Result]:
    """Return the results of a file."""
    return [Result.from_json(line) for line in path.read_text().splitlines() if line.strip()]


def lines(results: Sequence[Result]) -> list[Line]:
    """Group results by concurrency and contender, in order of first appearance."""
    groups: dict[tuple[int, str], list[Result]] = {}
    for result in results:
        groups.setdefault((int(result.settings.get("concurrency", 0)), result.contender), []).append(result)
    order = list(dict.fromkeys(result.contender for result in results))
    found = []
    for (concurrency, name), runs in sorted(groups.items(), key=lambda item: (item[0][0], order.index(item[0][1]))):
        clean = [run for run in runs if not run.disturbed]
        found.append(Line(name, concurrency, len(runs), len(runs) - len(clean), tuple(clean or runs)))
    return found


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table. `x`: makespan divided by that of the first contender at the same concurrency."""
    rows = [
        "| contender | at once | runs (disturbed) | makespan s | x | tok/s (least, most) | first token p50 / p99 ms "
        "| between tokens p50 / p99 / max ms | peak RSS MiB | load s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    first: dict[int, float] = {}
    for line in lines(results):
        makespan = line.middle(lambda r: r.makespan_seconds)
        rate = line.middle(lambda r: r.output_tokens_per_second)
        assert makespan is not None
        assert rate is not None
        rates = [run.output_tokens_per_second for run in line.runs]
        ratio = makespan / first.setdefault(line.concurrency, makespan)
        mark = "" if line.trusted else " \\*"
        rows.append(
            f"| {line.contender} | {line.concurrency or 'by arrival'} | {line.num_runs} ({line.num_disturbed}) "
            f"| {makespan:.2f}{mark} | {ratio:.2f} | {rate:.1f} ({min(rates):.1f}, {max(rates):.1f}) "
            f"| {_ms(line.middle(lambda r: r.ttft_p50_seconds))} / {_ms(line.middle(lambda r: r.ttft_p99_seconds))} "
            f"| {_ms(line.middle(lambda r: r.inter_token_p50_seconds))} "
            f"/ {_ms(line.middle(lambda r: r.inter_token_p99_seconds))} "
            f"/ {_ms(line.middle(lambda r: r.inter_token_max_seconds))} "
            f"| {line.middle(lambda r: r.peak_rss_mib):.0f} | {line.middle(lambda r: r.load_seconds):.1f} |"
        )
    if not all(line.trusted for line in lines(results)):
        rows += ["", "\\* every run was disturbed by other processes or by the host: not to be quoted."]
    return "\n".join(rows)


def page(results: Sequence[Result], title: str) -> str:
    """Return a page with workload, machine, versions and the table."""
    one = results[0]
    work = ", ".join(f"{key} {value}" for key, value in one.workload.items())
    machine = ", ".join(f"{key} {value}" for key, value in one.machine.items())
    versions: dict[str, set[str]] = {}
    for result in results:
        for name, version in result.versions.items():
            versions.setdefault(name, set()).add(version)
    installed = ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in versions.items())
    commits = ", ".join(sorted({result.commit for result in results}))
    return (
        f"# {title}\n\nModel {one.model}. Workload: {work}.\n\nMachine: {machine}.\n\nVersions: {installed}. "
        f"Commit {commits}. {results[0].date} to {results[-1].date}.\n\n{table(results)}\n"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"


def curve(results: Sequence[Result]) -> str:
    """Return an SVG of tokens per second over concurrency, one line per contender; empty without such runs."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in lines(results):
        rate = line.middle(lambda r: r.output_tokens_per_second)
        if line.concurrency and rate is not None:
            points.setdefault(line.contender, []).append((line.concurrency, rate))
    levels = sorted({x for line_points in points.values() for x, _ in line_points})
    if not levels:
        return ""
    top = max(y for line_points in points.values() for _, y in line_points)

    def place(level: int, rate: float) -> tuple[float, float]:
        x = _MARGIN + levels.index(level) * (_WIDTH - 2 * _MARGIN) / max(1, len(levels) - 1)
        return x, _HEIGHT - _MARGIN - rate / top * (_HEIGHT - 2 * _MARGIN)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for level in levels:
        x, y = place(level, 0)
        parts.append(f'<text x="{x:.0f}" y="{y + 20:.0f}" text-anchor="middle" font-size="12">{level}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = place(levels[0], share * top)[1]
        parts.append(f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y:.0f}" y2="{y:.0f}" stroke="#dddddd"/>')
        label = f"{share * top:.0f}"
        parts.append(f'<text x="{_MARGIN - 8}" y="{y + 4:.0f}" text-anchor="end" font-size="12">{label}</text>')
    for index, (name, line_points) in enumerate(points.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line_points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _MARGIN / 2 + 16 * index
        parts.append(f'<text x="{_MARGIN + 8}" y="{y:.0f}" font-size="12" fill="{colour}">{name}</text>')
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 16}" text-anchor="middle" font-size="12">'
        "requests at once (output tokens a second)</text></svg>"
    )
    return "\n".join(parts) + "\n"


def with_index(text: str, pages: Sequence[Path]) -> str:
    """Replace the text between the two markers with a table of links to `pages`, by date."""
    head, start, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert end, f"the text needs the markers {BEGIN} and {END}"
    rows = ["| date | results |", "|---|---|"]
    for page in pages:
        title = page.read_text().splitlines()[0].removeprefix("# ")
        date = page.name[:10] if page.name[0].isdigit() else ""
        rows.append(f"| {date} | [{title}](../bench/results/{page.name}) |")
    return head + start + "\n\n" + "\n".join(rows) + "\n\n" + end + tail


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a file, write its curve, or update the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--docs", action="store_true")
    o = parser.parse_args(arguments)
    if o.docs:
        DOCS.write_text(with_index(DOCS.read_text(), sorted(RESULTS.glob("*.md"))))
        return 0
    if o.file is None:
        parser.error("a file of results, or --docs")
    results = read(o.file)
    print(table(results))
    if o.svg is not None:
        o.svg.write_text(curve(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
