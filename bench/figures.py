"""Figures of micro-benchmarks: name, case, value, unit and optional goal. Also their clocks, tables and files."""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.measure import commit, cpu_times, machine, num_cores, percentile, versions


@dataclass(frozen=True)
class Figure:
    """A measured figure. `goal`: upper bound, or lower bound if `more_is_better`; None without a goal.

    `value` None: not measured, so the goal is not met.
    """

    name: str
    case: str
    value: float | None
    unit: str
    goal: float | None = None
    more_is_better: bool = False

    @property
    def verdict(self) -> str:
        """Return whether the goal is met; empty without a goal."""
        if self.goal is None:
            return ""
        bound = f"({'>=' if self.more_is_better else '<='} {self.goal:g})"
        if self.value is None:
            return f"NOT MEASURED {bound}"
        met = self.value >= self.goal if self.more_is_better else self.value <= self.goal
        return f"{'met' if met else 'MISSED'} {bound}"

    @property
    def shown(self) -> str:
        """Return the value with its unit."""
        return "no figure" if self.value is None else f"{self.value:.4g} {self.unit}"


def scaled(value: float | None, factor: float) -> float | None:
    """Convert to another unit; an unmeasured value stays None."""
    return None if value is None else value * factor


def seconds_per_call_of_wall(call: Callable[[], object], *, calls: int = 1, rounds: int = 7) -> float:
    """Return wall-clock seconds of the best round, for code on several threads."""
    call()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    return min(times)


def seconds_per_call(call: Callable[[], object], *, calls: int = 1, rounds: int = 7) -> float:
    """CPU seconds: the median over `rounds` of the mean over `calls`, after one round that is thrown away.

    Of this thread, so that neighbours on the machine are felt in caches only.
    """
    times = []
    for _ in range(rounds + 1):
        begin = time.thread_time()
        for _ in range(calls):
            call()
        times.append((time.thread_time() - begin) / calls)
    middle = percentile(times[1:], 0.5)
    assert middle is not None
    return middle


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a Markdown table."""
    rows = ["| figure | case | value | goal |", "|---|---|---|---|"]
    return "\n".join([*rows, *(f"| {f.name} | {f.case} | {f.shown} | {f.verdict} |" for f in figures)])


def main(make: Callable[[argparse.Namespace], Iterator[Figure]], parser: argparse.ArgumentParser) -> int:
    """Measure, print the table, append to `--out`. `make` gets the options of `parser`."""
    parser.add_argument("--out", type=Path, help="file that the figures are appended to, a JSON object a line")
    options = parser.parse_args()
    before, began_at = cpu_times(), time.perf_counter()
    figures = []
    for figure in make(options):
        print(f"{figure.name}, {figure.case}: {figure.shown} {figure.verdict}", flush=True)
        figures.append(figure)
    stolen, busy, own = (b - a for a, b in zip(before, cpu_times(), strict=True))
    seconds = time.perf_counter() - began_at
    share = (busy - own + stolen) / (seconds * num_cores())
    print(f"\n{table(figures)}\n\nothers took {share:.0%} of the machine meanwhile")
    if options.out is not None:
        facts = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "foreign_share": share,
            "machine": machine(),
            "versions": versions(),
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.writelines(json.dumps(asdict(figure) | facts) + "\n" for figure in figures)
    return 0


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return the argument parser of a micro-benchmark."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
