"""Lay out executed steps as lanes: one lane for each slot, one column for each step.

A `Panel` is what `timeline_svg` draws. `panels` makes one for each worker from step records; the demo makes one of
padded waves, which have no records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lineclear.client import StepRow, step_rows
from lineclear.client.admin_results import seconds_of
from lineclear.v1 import steps_pb2 as pb


class Mark(StrEnum):
    """What a slot did in a column. Each value is a colour of the legend."""

    PREFILL = "prefill"
    CACHED = "cached"
    DECODE = "decode"
    RECOMPUTE = "recompute"
    PADDING = "padding"
    END = "end"
    PREEMPTED = "preempted"
    IDLE = "idle"


@dataclass(frozen=True)
class Segment:
    """The columns `start` to `end` of one lane. `lower_share` of the height is drawn as `lower` instead of `mark`."""

    lane: int
    start: int
    end: int
    mark: Mark
    request: int
    lower: Mark = Mark.CACHED
    lower_share: float = 0.0


@dataclass(frozen=True)
class Tick:
    """An instant of a lane: the end (END) or the preemption (PREEMPTED) of a request, after `column`."""

    lane: int
    column: int
    mark: Mark


@dataclass(frozen=True)
class Barrier:
    """A line over all lanes before `column`: the batch waited for its longest answer."""

    column: int
    label: str


@dataclass(frozen=True)
class Panel:
    """Lanes with a common axis. `first_step` is the number of the first column."""

    title: str
    subtitle: str
    lanes: tuple[str, ...]
    columns: int
    segments: tuple[Segment, ...]
    ticks: tuple[Tick, ...] = ()
    barriers: tuple[Barrier, ...] = ()
    first_step: int = 0

    @property
    def marks(self) -> frozenset[Mark]:
        """Return the marks in use, for the legend."""
        lower = {segment.lower for segment in self.segments if segment.lower_share}
        num_cells = sum(segment.end - segment.start for segment in self.segments)
        idle = {Mark.IDLE} if num_cells < self.columns * len(self.lanes) else set()
        return frozenset({s.mark for s in self.segments} | {t.mark for t in self.ticks} | lower | idle)


def panels(records: Iterable[pb.StepRecord]) -> list[Panel]:
    """Return a panel for each worker, in order of its first step. A missing step leaves its column empty."""
    workers: dict[tuple[int, int], list[pb.StepRecord]] = {}
    for record in records:
        workers.setdefault((record.worker, record.epoch), []).append(record)
    return [_panel(worker, sorted(steps, key=lambda record: record.step)) for (worker, _), steps in workers.items()]


def _panel(worker: int, steps: Sequence[pb.StepRecord]) -> Panel:
    first, last = steps[0], steps[-1]
    columns = last.step - first.step + 1
    num_slots = max(n for record in steps for n in (record.num_slots, *(slot + 1 for slot in record.rows.slot)))
    segments: list[Segment] = []
    ticks: list[Tick] = []
    open_segments: dict[int, Segment] = {}
    lanes: dict[int, int] = {}
    for record in steps:
        column = record.step - first.step
        for row in step_rows(record):
            lanes[row.request] = row.slot
            before = open_segments.get(row.slot)
            if before is not None and _continues(before, row, column):
                open_segments[row.slot] = replace(before, end=column + 1)
                continue
            if before is not None:
                segments.append(before)
            open_segments[row.slot] = Segment(
                row.slot, column, column + 1, Mark(row.kind), row.request, lower_share=_cached_share(row)
            )
        for mark, requests in ((Mark.END, record.ended), (Mark.PREEMPTED, record.preempted)):
            ticks += (Tick(lanes[request], column, mark) for request in requests if request in lanes)
    segments += open_segments.values()
    span = seconds_of(last.planned_at) + seconds_of(last.step_time) - seconds_of(first.planned_at)
    return Panel(
        title=f"worker {worker}",
        subtitle=f"steps {first.step} to {last.step}, {span:.2f} s",
        lanes=tuple(f"slot {number}" for number in range(num_slots)),
        columns=columns,
        segments=tuple(sorted(segments, key=lambda segment: (segment.lane, segment.start))),
        ticks=tuple(ticks),
        first_step=first.step,
    )


def _continues(before: Segment, row: StepRow, column: int) -> bool:
    same = before.request == row.request and before.mark is Mark(row.kind) and before.end == column
    return same and before.lower_share == _cached_share(row)


def _cached_share(row: StepRow) -> float:
    """Return the cached share of the positions that the first row of a request makes available."""
    is_first = row.cached_tokens > 0 and row.start == row.cached_tokens
    return row.cached_tokens / (row.cached_tokens + row.num_tokens) if is_first else 0.0
