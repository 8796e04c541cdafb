"""Pauses of streams while one of several workers dies: of its own streams, of the others', and without a death.

A client does not know which worker runs its request, but an answer says how often its worker was lost
(`timings.recoveries`). So of the answers that were under way at one death, those with a recovery ran on the dead worker
and those without ran on a living one. The control is the same measurement at a moment without a death.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple


@dataclass(frozen=True)
class Timeline:
    """When the tokens of one answer arrived."""

    times: tuple[float, ...]
    recoveries: int
    features: tuple[str, ...] = ()


class Death(NamedTuple):
    """A worker that died at `at`; the scheduler has logged its loss at `lost_at`."""

    at: float
    lost_at: float
    is_kill: bool
    was_only: bool = False
    """No other worker was joined, so its streams wait for a start."""


@dataclass
class Pauses:
    """Longest gap between two tokens of each stream around a death, in seconds."""

    killed: list[float]
    """Of the dead worker, while another one was joined."""
    killed_alone: list[float]
    """Of the dead worker, while it was the only one."""
    living: list[float]
    control: list[float]

    @classmethod
    def of(cls, timelines: Iterable[Timeline], deaths: Sequence[Death]) -> Pauses:
        """Measure each answer that was under way at one death, or at none."""
        pauses = cls([], [], [], [])
        detection = median(death.lost_at - death.at for death in deaths) if deaths else 0.0
        for timeline in timelines:
            first, last = timeline.times[0], timeline.times[-1]
            spanned = [death for death in deaths if death.lost_at > first and death.at < last]
            if not spanned and timeline.recoveries == 0:
                middle = (first + last) / 2
                pauses.control.append(_longest_gap(timeline.times, middle, middle + detection))
            elif len(spanned) == 1 and timeline.recoveries == 0:
                pauses.living.append(_longest_gap(timeline.times, *spanned[0][:2]))
            elif len(spanned) == 1 and timeline.recoveries == 1 and spanned[0].is_kill:
                found = pauses.killed_alone if spanned[0].was_only else pauses.killed
                found.append(_longest_gap(timeline.times, *spanned[0][:2]))
        return pauses

    def figures(self) -> dict[str, dict[str, float]]:
        kinds = {name: getattr(self, name) for name in ("killed", "killed_alone", "living", "control")}
        return {f"{name}_stream_pause_seconds": quantiles(values) for name, values in kinds.items()}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and the maximum, or nothing for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    places = {"p50": int(0.5 * len(ordered)), "p99": int(0.99 * len(ordered)), "max": -1}
    return {name: round(ordered[place], 4) for name, place in places.items()}


def by_feature(timelines: Iterable[Timeline], deaths: Sequence[Death]) -> dict[str, list[float]]:
    """Return the longest gap around a kill, in seconds, of the answers that lost their worker once, by feature."""
    gaps: dict[str, list[float]] = {}
    for timeline in (t for t in timelines if t.recoveries == 1 and t.times):
        spanned = [death for death in deaths if death.lost_at > timeline.times[0] and death.at < timeline.times[-1]]
        if len(spanned) == 1 and spanned[0].is_kill:
            gap = _longest_gap(timeline.times, *spanned[0][:2])
            for name in timeline.features:
                gaps.setdefault(name, []).append(gap)
    return gaps


def _longest_gap(times: Sequence[float], begin: float, end: float) -> float:
    """Return the longest gap between two tokens that overlaps the span, 0 if none does."""
    gaps = [after - before for before, after in pairwise(times) if after >= begin and before <= end]
    return max(gaps, default=0.0)
