"""Fit the growth of a process's memory, threads and descriptors over the requests it has served.

Least squares, with one intercept for each process, so that successive workers are fitted together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WARM_UP = 0.1
PER_REQUESTS = 100_000


@dataclass(frozen=True)
class Sample:
    """Figures of a process at one moment."""

    requests: int
    private_bytes: int
    threads: int
    descriptors: int
    pid: int = 0


@dataclass(frozen=True)
class Bounds:
    """Largest growth per 100,000 requests: the upper end of the slope's 95 % interval."""

    private_bytes: float = 2.0**20
    threads: float = 2.0
    descriptors: float = 10.0


SHORT = Bounds(private_bytes=300_000.0 * PER_REQUESTS, threads=0.05 * PER_REQUESTS, descriptors=0.2 * PER_REQUESTS)
"""For runs of seconds instead of an hour, where warming caches and allocators has a slope as well."""


def look(pid: int, requests: int) -> Sample:
    """Read the figures of a process. Private memory is RssAnon and VmSwap, since a leak may be swapped out."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    private = sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))
    return Sample(requests, private, int(status["Threads"]), len(list(Path(f"/proc/{pid}/fd").iterdir())), pid)


def slope(*lines: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the slope of y over x and the half-width of its 95 % interval, which is infinite for too few points.

    Each of `lines` has its own intercept.
    """
    centred: list[tuple[float, float]] = []
    for points in lines:
        means = [sum(p[i] for p in points) / max(1, len(points)) for i in (0, 1)]
        centred += [(x - means[0], y - means[1]) for x, y in points]
    spread = sum(x * x for x, _ in centred)
    freedom = len(centred) - len(lines) - 1
    if freedom < 1 or spread == 0:
        return 0.0, math.inf
    rise = sum(x * y for x, y in centred) / spread
    rest = sum((y - rise * x) ** 2 for x, y in centred)
    return rise, 1.96 * math.sqrt(rest / freedom / spread)


def growth(samples: Sequence[Sample]) -> dict[str, Any]:
    """Fit each figure. The first tenth of each process's samples is warm-up and left out."""
    lives: dict[int, list[Sample]] = {}
    for sample in samples:
        lives.setdefault(sample.pid, []).append(sample)
    settled = [life[int(len(life) * _WARM_UP) + 1 :] for life in lives.values()]
    settled = [life for life in settled if len(life) > 2]
    found: dict[str, Any] = {"processes": len(lives)}
    for name in ("private_bytes", "threads", "descriptors"):
        rise, error = slope(*([(s.requests, getattr(s, name)) for s in life] for life in settled))
        found[name] = {
            "first": getattr(samples[0], name),
            "last": getattr(samples[-1], name),
            "most": max(getattr(sample, name) for sample in samples),
            "slope_per_100k": round(rise * PER_REQUESTS, 2),
            "lower_per_100k": round(max(-1e15, (rise - error) * PER_REQUESTS), 2),
            "upper_per_100k": round(min(1e15, (rise + error) * PER_REQUESTS), 2),
        }
    return found


def too_much(found: dict[str, Any], bounds: Bounds, *, certain: bool = False) -> list[str]:
    """Return the names of the figures that grow beyond the bounds.

    With `certain`, only those whose lower confidence bound is too large; otherwise also those that may be.
    """
    names = ("private_bytes", "threads", "descriptors")

    def value(name: str) -> float:
        return float(found[name]["lower_per_100k" if certain else "upper_per_100k"])

    return [name for name in names if value(name) > getattr(bounds, name)]
