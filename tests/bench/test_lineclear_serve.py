"""The driver of lineclear against the real service, with the demonstration model and four short answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.service import DEMO_MODEL

from bench import lineclear_serve
from bench.lineclear_serve import run
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
