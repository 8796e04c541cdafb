"""Measures the CPU time of both processes while no request runs.

python -m bench.idle --model DIR
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Figure, arguments, main
from bench.lineclear_serve import serving
from bench.measure import process_seconds, tree

SECONDS = 10.0
_SETTLING_SECONDS = 5.0  # work after the start is over, such as prefaulting memory
_GOAL_PERCENT = 1.0


async def watch(model: str, seconds: float) -> list[Figure]:
    """Return the CPU shares in percent of one core, after a first answer."""
    async with serving(model) as service:
        await service.client.generate((5, 6, 7), max_tokens=4, temperature=0.0, ignore_eos=True)
        await asyncio.sleep(_SETTLING_SECONDS)
        groups = {"scheduler": [service.pid], "worker": [p for p in tree(service.pid) if p != service.pid]}
        before = {name: process_seconds(pids) for name, pids in groups.items()}
        await asyncio.sleep(seconds)
        shares = {name: (process_seconds(pids) - before[name]) / seconds * 100 for name, pids in groups.items()}
    case = f"{seconds:g} s"
    each = [Figure(f"idle: {name}", case, share, "% of a core") for name, share in shares.items()]
    return [*each, Figure("idle: both processes", case, sum(shares.values()), "% of a core", _GOAL_PERCENT)]


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    """Measure one service."""
    yield from asyncio.run(watch(str(options.model), options.seconds))


def parser() -> argparse.ArgumentParser:
    """Parse the options and measure."""
    found = arguments(__doc__)
    found.add_argument("--model", type=Path, required=True)
    found.add_argument("--seconds", type=float, default=SECONDS)
    return found


if __name__ == "__main__":
    raise SystemExit(main(figures, parser()))
