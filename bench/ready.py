"""Measures start-up: seconds from exec of the scheduler until it reports SERVING, and peak memory.

    python -m bench.ready --model PATH [--runs 5] [-- WORKER FLAGS]

The first run may read the files from disk; the median hides this. Peak memory counts mapped pages of the model's files.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.figures import Figure, arguments, main
from bench.lineclear_serve import serving
from bench.measure import median, peak_rss_mib, tree

_RUNS = 5


async def start(model: str, worker_flags: Sequence[str] = ()) -> tuple[float, float]:
    """Return the seconds until SERVING and the peak memory of both processes."""
    async with serving(model, (), worker_flags) as service:
        return service.load_seconds, peak_rss_mib(tree(service.pid))


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure several starts."""
    starts = [asyncio.run(start(str(options.model), options.worker_flags)) for _ in range(options.runs)]
    case = " ".join((options.model.resolve().name, *options.worker_flags))
    yield Figure("ready: median", case, median([seconds for seconds, _ in starts]), "s", options.goal)
    yield Figure("ready: slowest", case, max(seconds for seconds, _ in starts), "s")
    yield Figure("ready: peak RSS", case, median([memory for _, memory in starts]), "MiB")


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True)
    found.add_argument("--runs", type=int, default=_RUNS)
    found.add_argument("--goal", type=float, help="seconds")
    found.add_argument("worker_flags", nargs="*", help="flags of the worker, after --")
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
