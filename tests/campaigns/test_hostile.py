"""Short runs of the campaign of hostile callers, and checks that it detects lost and altered answers."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaigns import hostile
from support.engine_harness import short_directory
from support.time_limits import PATIENCE_SECONDS


@pytest.fixture
def folder() -> Iterator[Path]:
    path = short_directory()
    yield path
    shutil.rmtree(path)


def test_canary_reads_beside_hostile_callers(folder: Path) -> None:
    campaign = hostile.Campaign(folder)
    try:
        for kind in ("calm", "slow_template", "detokenize_flood", "form_flood", "cancel_storm", "frames_of_resets"):
            found = campaign.run(kind, 1.0)
            assert hostile.faults(found) == [], json.dumps(found)
    finally:
        exit_code = campaign.end()
    assert exit_code == 0


def test_canary_output_fills_no_pipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of 20 answers fills a pipe."""
    monkeypatch.setitem(hostile._TOY, "min_step_seconds", 0.0005)
    monkeypatch.setitem(hostile._TOY, "max_step_seconds", 0.0005)
    campaign = hostile.Campaign(folder)
    try:
        reader = hostile.Canary(campaign.target)
        end = time.monotonic() + PATIENCE_SECONDS
        while reader.num_answers < 40:
            assert time.monotonic() < end, f"it stopped after {reader.num_answers} answers"
            time.sleep(0.05)
        found = hostile.judge(reader.end(), campaign.right)
    finally:
        campaign.end()
    assert found["answers"] >= 40
    assert (found["lost"], found["altered"]) == (0, 0)


def test_lost_and_altered_answers_are_counted() -> None:
    right = [1, 2, 3]
    good = {"tokens": right, "first": 0.03, "gaps": [0.01, 0.02], "longest": 0.02, "error": ""}
    assert hostile.judge([good, good], right) == {
        "first_ms": {"p50": 30.0, "max": 30.0},
        "gap_ms": {"p50": 20.0, "p99": 20.0, "max": 20.0},
        "answers": 2,
        "errors": [],
        "lost": 0,
        "altered": 0,
        "stood_still": 0,
    }
    cut = {**good, "tokens": right[:2], "error": "UNAVAILABLE"}
    assert hostile.judge([good, cut], right)["lost"] == 1
    assert hostile.judge([good, cut], right)["errors"] == ["UNAVAILABLE"]
    assert hostile.judge([good, {**good, "tokens": [1, 2, 4]}], right)["altered"] == 1
    assert hostile.judge([{**good, "tokens": [*right, 4]}], right)["altered"] == 1
    assert hostile.judge([good, {**good, "longest": 30.0}], right)["stood_still"] == 1


def test_idle_callers_are_a_fault() -> None:
    found = {"kind": "detokenize_flood", "times": 9, "outcomes": {"OK": 1}, "callers_failed": 0, "answers": 1}
    found |= {"lost": 0, "altered": 0, "stood_still": 0}
    assert hostile.faults(found) == []
    for field, value, fault in (
        ("times", 0, "times"),
        ("outcomes", {"INVALID_ARGUMENT": 9}, "served"),
        ("callers_failed", 1, "callers_failed"),
        ("answers", 0, "answers"),
        ("stood_still", 1, "stood_still"),
    ):
        assert hostile.faults({**found, field: value}) == [fault]
    assert hostile.faults({**found, "kind": "cancel_storm", "outcomes": {}}) == []
