"""The Chrome trace: a slice for each row, a process for each worker, a thread for each slot."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from render.test_timeline import HISTORY
from support.steps import decode, record

from lineclear.render.chrome_trace import json_chunks


def events(*records: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads("".join(json_chunks(records)))
    return found


def of_phase(found: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == phase]


def test_each_row_is_a_slice_of_its_slot() -> None:
    slices = of_phase(events(*HISTORY), "X")
    assert [(s["tid"], s["ts"], s["dur"]) for s in slices if s["tid"]] == [
        (1, 0, 100_000),
        (1, 100_000, 100_000), (2, 100_000, 100_000),
        (1, 200_000, 100_000), (2, 200_000, 100_000),
        (2, 300_000, 100_000),
    ]  # fmt: skip
    assert slices[3]["name"] == "[1] decode"
    assert slices[4]["name"] == "[2] prefill 2"
    assert slices[4]["args"] == {"request": 2, "start": 6, "tokens": 2, "cached": 6, "step": 6}
    assert [s["name"] for s in slices if not s["tid"]] == ["step 5", "step 6", "step 7", "step 8"]


def test_workers_and_slots_are_named_once() -> None:
    found = of_phase(events(*HISTORY, record(1, decode(0, 3, 9), worker=1)), "M")
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in found if e["name"] != "thread_sort_index"]
    assert names == [
        (0, 0, "worker 0"), (0, 0, "steps"), (0, 1, "slot 0"), (0, 2, "slot 1"),
        (1, 0, "worker 1"), (1, 0, "steps"), (1, 1, "slot 0"),
    ]  # fmt: skip


def test_ends_and_preemptions_are_instants_of_their_slot() -> None:
    found = of_phase(events(*HISTORY), "i")
    assert [(e["name"], e["tid"], e["ts"]) for e in found] == [("[1] end", 1, 300_000), ("[2] preempted", 2, 400_000)]


def test_counters_follow_queue_and_blocks() -> None:
    found = of_phase(events(record(1, decode(0, 1, 4), num_waiting=3, blocks_used=5, blocks_cached=2)), "C")
    assert [(e["name"], e["args"]) for e in found] == [
        ("requests", {"running": 1, "waiting": 3}),
        ("KV blocks", {"used": 5, "cached": 2}),
    ]


def test_no_steps_are_an_empty_trace() -> None:
    assert events() == []


def test_steps_are_placed_by_their_end_and_do_not_overlap() -> None:
    """Two plans in flight: the second waits behind the first, which its total time includes."""
    first = record(1, decode(0, 1, 4), at=1.0, seconds=0.2)
    second = record(2, decode(0, 1, 5), at=1.05, total_time=timedelta(seconds=0.25))
    early = record(3, decode(0, 1, 6), at=1.2, seconds=0.15)
    other = record(1, decode(0, 2, 4), at=1.1, worker=1)
    slices = [e for e in of_phase(events(first, second, early, other), "X") if e["tid"] == 1]
    assert [(e["ts"], e["dur"]) for e in slices] == [
        (0, 200_000),
        (200_000, 100_000),
        (300_000, 50_000),
        (100_000, 100_000),
    ]
