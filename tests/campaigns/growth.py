"""Fit the growth of a process's memory, threads and descriptors over the requests it has served.

Least squares, with one intercept for each process, so that successive workers are fitted together. With a
`memory_probe`, a leak is a slope of the memory in use; private memory then has to level off: its slope is that of the
second half. Without one, private memory stands for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_WARM_UP = 0.1
_LEVELLING = 0.5  # caches and windows fill, and allocators keep what a peak has needed
PER_REQUESTS = 100_000


@dataclass(frozen=True)
class Sample:
    """Figures of a process at one moment."""

    requests: int
    private_mib: float
    threads: int
    descriptors: int
    pid: int = 0
    in_use_mib: float | None = None
    """With a `memory_probe`."""


@dataclass(frozen=True)
class Bounds:
    """Largest growth per 100,000 requests: the upper end of the slope's 95 % interval."""

    in_use_mib: float = 1.0
    private_mib: float = 1.0
    threads: float = 2.0
    descriptors: float = 10.0


SHORT = Bounds(
    in_use_mib=0.3 * PER_REQUESTS,
    private_mib=0.3 * PER_REQUESTS,
    threads=0.05 * PER_REQUESTS,
    descriptors=0.2 * PER_REQUESTS,
)
"""For runs of seconds instead of an hour, where warming caches and allocators has a slope as well."""


def look(pid: int, requests: int, memory: Path | None = None) -> Sample:
    """Read the figures of a process. Private memory is RssAnon and VmSwap, since a leak may be swapped out.

    `memory` is the file of its `memory_probe`, if it has one.
    """
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    private = sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap")) / 1024
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    in_use = None if memory is None else int(memory.read_text()) / 2**20
    return Sample(requests, private, int(status["Threads"]), descriptors, pid, in_use)


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
    """Fit each figure, memory in MiB. The first tenth of each process's samples is warm-up and left out."""
    lives: dict[int, list[Sample]] = {}
    for sample in samples:
        lives.setdefault(sample.pid, []).append(sample)
    found: dict[str, Any] = {"processes": len(lives)}
    is_probed = samples[0].in_use_mib is not None
    for name in ("in_use_mib",) * is_probed + ("private_mib", "threads", "descriptors"):
        left_out = _LEVELLING if is_probed and name == "private_mib" else _WARM_UP
        settled = [life[int(len(life) * left_out) + 1 :] for life in lives.values()]
        settled = [life for life in settled if len(life) > 2]
        rise, error = slope(*([(s.requests, getattr(s, name)) for s in life] for life in settled))
        found[name] = {
            "first": round(getattr(samples[0], name), 2),
            "last": round(getattr(samples[-1], name), 2),
            "most": round(max(getattr(sample, name) for sample in samples), 2),
            "slope_per_100k": round(rise * PER_REQUESTS, 2),
            "lower_per_100k": round(max(-1e15, (rise - error) * PER_REQUESTS), 2),
            "upper_per_100k": round(min(1e15, (rise + error) * PER_REQUESTS), 2),
        }
    return found


def too_much(found: dict[str, Any], bounds: Bounds, *, certain: bool = False) -> list[str]:
    """Return the names of the figures that grow beyond the bounds.

    With `certain`, only those whose lower confidence bound is too large; otherwise also those that may be.
    """
    bound = "lower_per_100k" if certain else "upper_per_100k"
    return [name for name, most in asdict(bounds).items() if name in found and found[name][bound] > most]
