"""The timeline and the Chrome trace: lanes of slots, columns of steps, a segment or a slice for rows of a request."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from datetime import timedelta
from typing import Any

import pytest
from support.steps import decode, prefill, record

from lineclear.client import StepRow
from lineclear.render.chrome_trace import json_chunks
from lineclear.render.timeline import Barrier, Mark, Panel, Segment, Tick, panels
from lineclear.render.timeline_svg import timeline_svg

SVG = "{http://www.w3.org/2000/svg}"


HISTORY = [
    record(5, prefill(0, 1, 0, 4)),
    record(6, decode(0, 1, 4), prefill(1, 2, 6, 2, cached=6)),
    record(7, decode(0, 1, 5), decode(1, 2, 8), ended=(1,)),
    record(8, decode(1, 2, 9), preempted=(2,)),
]


def test_consecutive_rows_are_one_segment() -> None:
    (panel,) = panels(HISTORY)
    assert panel.lanes == ("slot 0", "slot 1")
    assert (panel.first_step, panel.columns) == (5, 4)
    assert panel.segments == (
        Segment(0, 0, 1, Mark.PREFILL, 1),
        Segment(0, 1, 3, Mark.DECODE, 1),
        Segment(1, 1, 2, Mark.PREFILL, 2, lower_share=0.75),
        Segment(1, 2, 4, Mark.DECODE, 2),
    )
    assert panel.ticks == (Tick(0, 2, Mark.END), Tick(1, 3, Mark.PREEMPTED))
    assert panel.marks == {Mark.PREFILL, Mark.CACHED, Mark.DECODE, Mark.END, Mark.PREEMPTED, Mark.IDLE}


def test_segment_ends_at_a_missing_step_and_at_another_request() -> None:
    (panel,) = panels([record(5, decode(0, 1, 4)), record(8, decode(0, 1, 7)), record(9, decode(0, 2, 4))])
    assert [(segment.request, segment.start, segment.end) for segment in panel.segments] == [
        (1, 0, 1), (1, 3, 4), (2, 4, 5)
    ]  # fmt: skip


def test_each_worker_and_epoch_has_a_panel() -> None:
    found = panels([record(5, decode(0, 1, 4)), record(1, decode(0, 2, 4), worker=1), record(1, epoch=10)])
    assert [panel.title for panel in found] == ["worker 0", "worker 1", "worker 0"]


def test_recompute_has_its_own_mark() -> None:
    (panel,) = panels([record(1, StepRow(0, 1, 0, 9, 0, "recompute", True))])
    assert panel.segments[0].mark is Mark.RECOMPUTE


def drawn(svg: str, mark: Mark) -> list[tuple[float, float, float]]:
    """Return the x, y and width of the rectangles of a mark, legend left out."""
    root = ET.fromstring(svg)
    groups = list(root.iter(f"{SVG}g"))[:-1]
    found = [rect for group in groups for rect in group.iter(f"{SVG}rect") if rect.get("class") == mark]
    return [(float(r.get("x", 0)), float(r.get("y", 0)), float(r.get("width", 0))) for r in found]


def test_svg_places_segments_by_step_and_slot() -> None:
    svg = timeline_svg(panels(HISTORY))
    ((x0, y0, width0), (x1, y1, width1)) = drawn(svg, Mark.DECODE)
    assert width0 == width1 == pytest.approx(2 * x0, abs=0.02)  # two of four columns, from the second on
    assert x1 == pytest.approx(2 * x0, abs=0.02)
    assert y1 > y0
    assert len(drawn(svg, Mark.CACHED)) == len(drawn(svg, Mark.PREEMPTED)) == len(drawn(svg, Mark.END)) == 1
    assert drawn(svg, Mark.PADDING) == []


def test_panels_share_one_scale() -> None:
    short = Panel("short", "", ("slot 0",), 10, (Segment(0, 0, 10, Mark.DECODE, 1),))
    long = Panel(
        "long", "", ("slot 0",), 40,
        (Segment(0, 0, 10, Mark.DECODE, 1), Segment(0, 10, 40, Mark.PADDING, 1)),
        barriers=(Barrier(20, "barrier"),),
    )  # fmt: skip
    svg = timeline_svg([short, long])
    assert drawn(svg, Mark.DECODE)[0][2] == drawn(svg, Mark.DECODE)[1][2]
    assert len(drawn(svg, Mark.PADDING)) == 1
    assert ">barrier</text>" in svg


def test_svg_is_self_contained_and_names_only_marks_in_use() -> None:
    """Colours need no CSS variables: librsvg and others have none, and draw all in black."""
    svg = timeline_svg(panels(HISTORY))
    assert not re.search(r"<script|href|var\(", svg)
    assert "prefers-color-scheme: dark" in svg
    texts = {element.text for element in ET.fromstring(svg).iter(f"{SVG}text")}
    assert ("preempted" in texts, "padding" in texts) == (True, False)
    style = next(ET.fromstring(svg).iter(f"{SVG}style")).text or ""
    light = style.partition("@media")[0]
    used = {mark for element in ET.fromstring(svg).iter(f"{SVG}rect") if (mark := element.get("class"))}
    assert used
    assert not [mark for mark in used if not re.search(rf"\.{mark} {{ fill: (#[0-9a-f]{{6}}|url)", light)]
    assert "max-width: 100%" in light, "wider than a phone"


def test_titles_are_escaped() -> None:
    svg = timeline_svg([Panel("<&>", '"', ("slot 0",), 1, ())])
    assert "<&>" in {element.text for element in ET.fromstring(svg).iter(f"{SVG}text")}


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match="no steps"):
        timeline_svg([])


# --- the Chrome trace: a slice for each row, a process for each worker, a thread for each slot ---


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
