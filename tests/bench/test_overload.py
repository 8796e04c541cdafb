"""The figures of the overload driver, from given times without a service."""

from __future__ import annotations

import pytest

from bench.figures import Figure
from bench.overload import cadence_figures, parser, refusal_figures


def the_one(figures: list[Figure], name: str) -> Figure:
    return next(figure for figure in figures if name in figure.name)


def test_prober_without_refusals() -> None:
    found = refusal_figures("10x", [])
    assert the_one(found, "refusals").value == 0
    assert the_one(found, "p50").value is None
    assert the_one(found, "p99").verdict == "NOT MEASURED (<= 0.02)"


@pytest.mark.parametrize(("last", "verdict"), [(0.004, "met (<= 0.02)"), (5.0, "MISSED (<= 0.02)")])
def test_prober_reports_refusal_times(last: float, verdict: str) -> None:
    found = refusal_figures("10x", [0.002] * 50 + [last])
    assert the_one(found, "refusals").value == 51
    assert the_one(found, "p50").value == 0.002
    assert the_one(found, "p99").verdict == verdict


def test_cadence_counts_its_gaps() -> None:
    found = cadence_figures("beside", [0.05] * 400, [0.05] * 100 + [0.2] * 100)
    assert [figure.value for figure in found if figure.unit == "gaps"] == [400, 200]
    assert the_one(found, "against").value == pytest.approx(4.0)
    assert the_one(found, "against").verdict == "MISSED (<= 1.1)"


@pytest.mark.parametrize(("alone", "beside"), [([], [0.05]), ([0.05], []), ([], [])])
def test_empty_cadence_has_no_ratio(alone: list[float], beside: list[float]) -> None:
    assert the_one(cadence_figures("beside", alone, beside), "against").verdict == "NOT MEASURED (<= 1.1)"


def test_streams_are_read_for_their_own_time() -> None:
    assert parser().parse_args(["--model", "m", "--seconds", "5"]).reading_seconds == 30
    assert parser().parse_args(["--model", "m", "--reading-seconds", "2"]).reading_seconds == 2
