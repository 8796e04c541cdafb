"""The drivers of services: tiny runs against real schedulers, and the table of the comparison beside busy processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.service import DEMO_MODEL

from bench import lineclear_serve
from bench.lineclear_serve import run
from bench.neighbour import Case, Rate, busy, main, table
from bench.workloads import Workload, make

FLAGS = ("--max-batch-size", "4")
WORKER_FLAGS = ("--dtype", "float32", "--threads", "1", "--num-blocks", "256")


def short(kind: str, rate: float = 0.0) -> Workload:
    """Ids that the demonstration model has, answers of 5 tokens."""
    workload = make(kind, 4, vocabulary=400, rate=rate)
    return replace(workload, jobs=tuple(replace(job, max_tokens=5) for job in workload.jobs))


def test_tiny_workload_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = asyncio.run(run(str(DEMO_MODEL), short("w3", rate=50.0), FLAGS, WORKER_FLAGS, concurrency=2))
    assert result.output_tokens == result.workload["wanted_tokens"] == 20
    assert result.settings["dtype"] == "float32"
    assert result.settings["concurrency"] == 2
    assert result.load_seconds > 0
    assert result.peak_rss_mib > 50
    assert result.ttft_p50_seconds is not None
    assert 0 < result.ttft_p50_seconds < result.makespan_seconds
    assert result.inter_token_max_seconds is not None


def test_failed_start_is_reported() -> None:
    with pytest.raises(RuntimeError, match="exit code"):
        asyncio.run(run(str(Path("no-such-model")), short("w1")))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model", "m"], [["--model", "m"]]),
        (["--model", "m", "--", "--scheduling-policy", "fifo"], [["--model", "m"], ["--scheduling-policy", "fifo"]]),
        (["a", "--", "b", "--", "c", "d"], [["a"], ["b"], ["c", "d"]]),
        (["a", "--", "--", "c"], [["a"], [], ["c"]]),
    ],
)
def test_flags_are_split_at_double_dashes(arguments: list[str], parts: list[list[str]]) -> None:
    assert lineclear_serve._split(arguments) == parts


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


def test_tiny_comparison_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINECLEAR_WORKER_COMMAND", f"{sys.executable} -m support.toy_worker_command")
    monkeypatch.setenv("TOY_OPTIONS", json.dumps({"vocab_size": 4096}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    out = tmp_path / "found.jsonl"
    arguments = ["--model", str(DEMO_MODEL), "--contenders", "auto", "--neighbours", "0", "--streams", "2"]
    assert main([*arguments, "--seconds", "0.3", "--settling-seconds", "0.1", "--out", str(out)]) == 0
    (rate,) = map(Rate.from_json, out.read_text().splitlines())
    assert rate.case == Case("model", 2, 0)
    assert rate.tokens_per_second > 0
    assert "| model | 2 | 0 |" in capsys.readouterr().out
