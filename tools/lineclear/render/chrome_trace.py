"""Convert steps to events of the Chrome trace format, which Perfetto and chrome://tracing open.

A worker is a process, a slot is a thread, a row is a slice. Queue, running requests and KV blocks are counters. Format:
"Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from lineclear.client import StepRow, step_rows
from lineclear.client.admin_results import seconds_of
from lineclear.v1 import steps_pb2 as pb

_STEPS_THREAD = 0
"""The thread of whole steps; slot N is thread N + 1."""


class ChromeTrace:
    """Converts records one by one, so that a recording of any length can be written while it grows."""

    def __init__(self) -> None:
        self._begun_seconds: float | None = None
        self._named: set[tuple[int, int]] = set()
        self._slots: dict[tuple[int, int], int] = {}
        self._ends: dict[int, int] = {}

    def events(self, record: pb.StepRecord) -> Iterator[dict[str, Any]]:
        """Return the events of a step. Times count from the begin of the first."""
        rows = step_rows(record)
        end_seconds = seconds_of(record.planned_at) + seconds_of(record.total_time)
        begin_seconds = end_seconds - seconds_of(record.step_time)
        if self._begun_seconds is None:
            self._begun_seconds = begin_seconds
        # A plan waits behind the step before it, so a step is placed by its end. Slices of a slot must not overlap.
        end = round((end_seconds - self._begun_seconds) * 1e6)
        begin = max(round((begin_seconds - self._begun_seconds) * 1e6), self._ends.get(record.worker, 0))
        self._ends[record.worker] = max(begin, end)
        duration = self._ends[record.worker] - begin
        pid = record.worker
        yield from self._names(pid, rows)
        tokens = sum(record.rows.num_tokens)
        yield _slice(f"step {record.step}", pid, _STEPS_THREAD, begin, duration, rows=len(rows), tokens=tokens)
        for row in rows:
            self._slots[pid, row.request] = row.slot
            name = f"[{row.request}] {row.kind}" + (f" {row.num_tokens}" if row.num_tokens > 1 else "")
            yield _slice(
                name, pid, row.slot + 1, begin, duration,
                request=row.request, start=row.start, tokens=row.num_tokens, cached=row.cached_tokens, step=record.step,
            )  # fmt: skip
        for what, requests in (("end", record.ended), ("preempted", record.preempted)):
            for request in requests:
                slot = self._slots.pop((pid, request), None)
                if slot is not None:
                    instant = {"name": f"[{request}] {what}", "ph": "i", "s": "t", "ts": begin + duration}
                    yield instant | {"pid": pid, "tid": slot + 1}
        counters = {
            "requests": {"running": len(rows), "waiting": record.num_waiting},
            "KV blocks": {"used": record.blocks_used, "cached": record.blocks_cached},
        }
        for name, values in counters.items():
            yield {"name": name, "ph": "C", "pid": pid, "ts": begin, "args": values}

    def _names(self, worker: int, rows: Iterable[StepRow]) -> Iterator[dict[str, Any]]:
        threads = {_STEPS_THREAD: "steps"} | {row.slot + 1: f"slot {row.slot}" for row in rows}
        for tid, name in threads.items():
            if (worker, tid) in self._named:
                continue
            self._named.add((worker, tid))
            if tid == _STEPS_THREAD:
                yield _metadata("process_name", worker, tid, name=f"worker {worker}")
            yield _metadata("thread_name", worker, tid, name=name)
            yield _metadata("thread_sort_index", worker, tid, sort_index=tid)


def _metadata(what: str, pid: int, tid: int, **arguments: str | int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def _slice(name: str, pid: int, tid: int, begin: int, duration: int, **arguments: int) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": begin, "dur": duration, "args": arguments}


def json_chunks(records: Iterable[pb.StepRecord]) -> Iterator[str]:
    """Return the file in pieces: a JSON array with an event a line. Viewers also open it without its last bracket."""
    trace, separator = ChromeTrace(), "[\n"
    for record in records:
        for event in trace.events(record):
            yield separator + json.dumps(event, separators=(",", ":"))
            separator = ",\n"
    yield "[]\n" if separator == "[\n" else "\n]\n"
