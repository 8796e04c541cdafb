"""The comparison beside busy processes: its table, and a tiny one against the real service."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.service import DEMO_MODEL

from bench.neighbour import Case, Rate, busy, main, table

CASE = Case("model", 8, 1)


def test_rate_round_trips_through_a_line() -> None:
    rate = Rate("auto", CASE, 12.5, 0.01)
    assert Rate.from_json(rate.to_json()) == rate
    assert "machine" in json.loads(rate.to_json())


def test_table_compares_with_the_best_fixed_number() -> None:
    rates = [Rate("auto", CASE, value, 0.01) for value in (80.0, 90.0, 10.0)]
    rates += [Rate("1", CASE, 100.0, 0.01), Rate("2", CASE, 20.0, 0.01), Rate("before", CASE, 40.0, 0.01)]
    last = table(rates).splitlines()[-1]
    assert last == "| model | 8 | 1 | 80.0 | 100.0 | 20.0 | 40.0 | 1 | 0.80 | 2.00 |"


def test_unmeasured_contender_has_no_figure() -> None:
    rates = [Rate("auto", CASE, 80.0, 0.0), Rate("1", Case("model", 1, 0), 50.0, 0.0)]
    assert table(rates).splitlines()[-2:] == [
        "| model | 8 | 1 | 80.0 | - | 1 | - | - |",
        "| model | 1 | 0 | - | 50.0 | 1 | - | - |",
    ]


def test_disturbed_turns_count_only_without_others() -> None:
    rates = [Rate("auto", CASE, 80.0, 0.0), Rate("auto", CASE, 8.0, 0.5), Rate("1", CASE, 100.0, 0.5)]
    _, _, row, _, note = table(rates).splitlines()
    assert row == "| model | 8 | 1 | 80.0 | 100.0 \\* | 1 | 0.80 | - |"
    assert "not to be quoted" in note


def test_busy_processes_end_with_their_block() -> None:
    with busy(1):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert children
    assert not set(children) & set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_tiny_comparison_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.jsonl"
    arguments = ["--model", str(DEMO_MODEL), "--contenders", "1", "--neighbours", "0", "--streams", "2"]
    assert main([*arguments, "--seconds", "0.3", "--settling-seconds", "0.1", "--out", str(out)]) == 0
    (rate,) = map(Rate.from_json, out.read_text().splitlines())
    assert rate.case == Case("model", 2, 0)
    assert rate.tokens_per_second > 0
    assert "| model | 2 | 0 |" in capsys.readouterr().out
