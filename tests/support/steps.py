"""Messages of steps, by hand."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lineclear.client import StepRow
from lineclear.v1 import steps_pb2 as pb


def record(step: int, *rows: StepRow, at: float | None = None, seconds: float = 0.1, **fields: Any) -> pb.StepRecord:
    """Return a step that was planned at `at`, every 0.1 s by default, and took `seconds` with its wait."""
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in StepRow._fields}
    columns["kind"] = [f"ROW_KIND_{kind.upper()}" for kind in columns["kind"]]
    fields = {"worker": 0, "epoch": 9, "num_slots": 2, "total_time": timedelta(seconds=seconds)} | fields
    return pb.StepRecord(
        step=step,
        planned_at=timedelta(seconds=step / 10 if at is None else at),
        step_time=timedelta(seconds=seconds),
        rows=pb.StepRows(**columns),
        **fields,
    )


def prefill(slot: int, request: int, start: int, count: int, cached: int = 0) -> StepRow:
    return StepRow(slot, request, start, count, cached, "prefill", True)


def decode(slot: int, request: int, start: int) -> StepRow:
    return StepRow(slot, request, start, 1, 0, "decode", True)
