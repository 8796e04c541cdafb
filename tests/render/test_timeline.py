"""The timeline: lanes of slots, columns of steps, one segment for consecutive rows of a request."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from support.steps import decode, prefill, record

from lineclear.client import StepRow
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


def test_missing_steps_leave_their_columns_empty() -> None:
    (panel,) = panels([record(5, decode(0, 1, 4)), record(8, decode(0, 1, 7))])
    assert [(segment.start, segment.end) for segment in panel.segments] == [(0, 1), (3, 4)]


def test_slot_that_changes_hands_starts_a_segment() -> None:
    (panel,) = panels([record(5, decode(0, 1, 4)), record(6, decode(0, 2, 4))])
    assert [segment.request for segment in panel.segments] == [1, 2]


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
    svg = timeline_svg(panels(HISTORY))
    assert "<script" not in svg
    assert "href" not in svg
    assert "prefers-color-scheme: dark" in svg
    texts = {element.text for element in ET.fromstring(svg).iter(f"{SVG}text")}
    assert "preempted" in texts
    assert "padding" not in texts


def test_colours_need_no_css_variables() -> None:
    """librsvg and others have none, and draw all in black."""
    svg = timeline_svg(panels(HISTORY))
    assert "var(" not in svg
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
