"""Statistics a reader can check by hand, and a format that loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from bench.measure import Result, Run, cpu_times, median, peak_rss_mib, percentile, process_seconds, summary, tree
from bench.workloads import Job, Workload

LINUX = pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="CPU and memory figures come from /proc")
WORK = Workload("w1", 0, 4000, 0.0, (Job("a", (1, 2), 4), Job("b", (3,), 3, arrival_seconds=1.0)))


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([0.0, 10.0], 0.99, 9.9),
        ([5.0], 0.99, 5.0),
        (list(range(101)), 0.99, 99.0),
        ([], 0.5, None),
    ],
)
def test_percentiles(values: list[float], share: float, expected: float | None) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_median_is_the_middle_run() -> None:
    assert median([9.0, 1.0, 2.0]) == 2.0


def finished_run() -> Result:
    """Two answers: tokens of `a` at 1, 2, 2, 5 s; of `b`, which arrived at 1 s, at 3, 4, 6 s."""
    run = Run(WORK)
    run.times = {"a": [1.0, 2.0, 2.0, 5.0], "b": [3.0, 4.0, 6.0]}
    return run.end("us", "model", {"concurrency": 0}, makespan_seconds=7.0, load_seconds=0.5)


def test_run_summary() -> None:
    result = finished_run()
    assert result.output_tokens == 7
    assert result.output_tokens_per_second == pytest.approx(1.0)
    assert result.ttft_p50_seconds == pytest.approx(1.5)  # waits of 1 s and 2 s
    assert result.inter_token_p50_seconds == pytest.approx(1.0)  # gaps 1, 0, 3, 1, 2
    assert result.inter_token_max_seconds == pytest.approx(3.0)
    assert result.workload["wanted_tokens"] == 7
    assert result.versions["python"].startswith("3.")
    assert result.machine["cores"] == len(os.sched_getaffinity(0))
    assert "MISSING" not in summary(result)


def test_missing_tokens_are_reported() -> None:
    assert "2 TOKENS MISSING" in summary(replace(finished_run(), output_tokens=5))


def test_closed_loop_waits_from_the_send_time() -> None:
    run = Run(WORK)
    run.began_at -= 5.0  # as if the run had been going for 5 s
    run.arrived("a")
    run.tokens("a", 1)
    result = run.end("us", "model", {})
    assert result.ttft_p50_seconds is not None
    assert result.ttft_p50_seconds < 4.0


def test_result_round_trips_through_json() -> None:
    result = finished_run()
    line = result.to_json()
    assert "\n" not in line
    assert Result.from_json(line) == result


@pytest.mark.parametrize("change", [{"colour": "red"}, {"date": None}])
def test_unknown_fields_are_refused(change: dict[str, str | None]) -> None:
    raw = json.loads(finished_run().to_json()) | change
    raw = {name: value for name, value in raw.items() if value is not None}
    with pytest.raises(ValueError, match="fields differ"):
        Result.from_json(json.dumps(raw))


@LINUX
def test_cpu_time_includes_exited_children() -> None:
    before = cpu_times()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    after = cpu_times()
    assert 0.25 <= after.own - before.own <= after.busy - before.busy + 0.1


@LINUX
def test_process_tree_and_its_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in tree(os.getpid())
        assert tree(child.pid) == [child.pid]
        assert 1 < peak_rss_mib([child.pid]) < 200
        assert peak_rss_mib([]) == 0
        assert process_seconds([child.pid]) < 5
    finally:
        child.communicate(b"\n")
    assert tree(child.pid) == []
