"""Step times fitted to recordings, step records and JSON files."""

from __future__ import annotations

import json
import math
import random
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from core.harness import make_request
from support.toy_runner import ToyRunner

from lineclear.planner import fit
from lineclear.planner.fit import MeasuredStep, NoFit
from lineclear.planner.step_timing import StepTiming, StepWork, WorkerCapacity
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.flight_recorder import recording_files
from lineclear.scheduler.flight_recorder.recorder import RecordingScheduler
from lineclear.wire.messages import StepResult

TRUE = StepTiming(0.004, 0.0002, 3e-6, 0.0001, gap_seconds=0.0005, latency_seconds=0.003)


def recording(path: Path, num_requests: int = 60) -> RecordingScheduler:
    """Write the flight recording of a core whose worker takes the times of TRUE."""
    core, runner = RecordingScheduler(CoreLimits(max_batch_size=8)), ToyRunner(num_blocks=400)
    now, free_at, number = 0.0, 0.0, 0
    flights: deque[tuple[float, StepResult]] = deque()
    chance = random.Random(0)
    core.worker_joined(runner.hello(1), now)
    while core.num_live or number < num_requests:
        if core.num_live < 12 and number < num_requests:
            number += 1
            core.submit(make_request(f"r{number}", chance.randint(1, 80), chance.randint(1, 40)), now)
        plan = core.plan(1, now)
        if plan is not None:
            seconds = TRUE.linear(StepWork.of(plan))
            free_at = max(now + TRUE.latency_seconds, free_at + TRUE.gap_seconds) + seconds
            flights.append((free_at, replace(runner.launch(plan).result(), step_seconds=seconds)))
        elif flights:
            now, result = flights.popleft()
            core.apply(result, now)
        else:
            now += 0.1
        core.drain_events()
    recording_files.write(path, core.recording())
    return core


def test_recording_gives_the_times_of_its_steps(tmp_path: Path) -> None:
    recording(tmp_path / "flight.jsonl")
    timing, found = fit.load(tmp_path / "flight.jsonl")
    assert found is not None
    for name in ("base_seconds", "seconds_per_token", "seconds_per_kv_token"):
        assert getattr(timing, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert timing.seconds_per_sample == pytest.approx(TRUE.seconds_per_sample, rel=1e-2)
    assert timing.gap_seconds == pytest.approx(TRUE.gap_seconds, rel=0.01)
    assert (found.r_squared, found.mean_error) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-6))
    assert timing.worker == WorkerCapacity(400, 4, max_model_len=256, max_step_tokens=4096), "slots are a setting"
    timing.save(tmp_path / "steps.json")
    assert fit.load(tmp_path / "steps.json") == (timing, None)


def test_step_records_give_the_same_times(tmp_path: Path) -> None:
    lines, now = [], 0.0
    for step in range(1, 200):
        rows = [{"start": 7 * n + step % 13, "num_tokens": 1 + 20 * (step % 5 == n)} for n in range(1 + step % 7)]
        tokens = sum(row["num_tokens"] for row in rows)
        kv = sum(row["num_tokens"] * (2 * row["start"] + row["num_tokens"] + 1) // 2 for row in rows)
        seconds = TRUE.linear(StepWork(tokens, kv, len(rows)))
        now += seconds + 0.0005
        lines.append({"epoch": 3, "step": step, "time_seconds": now, "seconds": seconds, "rows": rows, "num_blocks": 9})
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    timing, found = fit.load(path)
    assert found is not None
    assert timing.base_seconds == pytest.approx(TRUE.base_seconds, rel=1e-3)
    assert timing.gap_seconds == pytest.approx(0.0005, rel=0.01)
    assert timing.worker.num_blocks == 9


def test_plans_of_a_late_scheduler_count_as_gaps() -> None:
    # Both results of two plans in flight arrive at the scheduler at once, and it plans the next two.
    steps = [
        MeasuredStep(1, 2 * pair + n, StepWork(1, 1, 1), 0.002, 0.005 * pair, 0.005 * (pair + 1))
        for pair in range(150)
        for n in (1, 2)
    ]
    timing = fit.fitted(steps, WorkerCapacity()).timing
    assert timing.gap_seconds == pytest.approx(0.0005, rel=0.05), "a step every 2.5 ms takes 2 ms"


def test_size_corrects_a_model_that_is_not_linear() -> None:
    steps = [
        MeasuredStep(1, n, StepWork(tokens, 0, tokens), seconds, math.nan, n * 1.0)
        for n in range(10, 400)
        for tokens, seconds in [(1, 0.001) if n % 2 else (64, 0.002) if n % 4 else (256, 0.1)]
    ]
    timing = fit.fitted(steps, WorkerCapacity()).timing.without_spread()
    for tokens, seconds in ((1, 0.001), (64, 0.002), (256, 0.1)):
        assert timing.draw(StepWork(tokens, 0, tokens), random.Random(0)) == pytest.approx(seconds, rel=1e-3)


def test_coefficients_are_never_negative() -> None:
    chance = random.Random(1)
    inputs = [(1.0, chance.random(), chance.random()) for _ in range(100)]
    found = fit.non_negative_least_squares(inputs, [2.0 + 3.0 * x - 1.0 * y for _, x, y in inputs])
    assert min(found) == 0.0
    exact = fit.non_negative_least_squares(inputs, [2.0 + 3.0 * x + 4.0 * y for _, x, y in inputs])
    assert exact == pytest.approx([2.0, 3.0, 4.0])


def test_files_without_steps_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for text, problem in (
        ("", "neither"),
        ("{", "Expecting"),
        ('{"base_seconds": 1}', "missing"),
        ('{"base_seconds": 1, "seconds_per_token": 1, "seconds_per_kv_token": 1, "tokens": 2}', "tokens"),
        ('{"format": "lineclear flight recording 0", "limits": {}}', "NotARecording"),
        ('{"epoch": 1}', "rows"),
    ):
        path.write_text(text)
        with pytest.raises(NoFit, match=problem):
            fit.load(path)
    recording(path, num_requests=1)
    with pytest.raises(NoFit, match="at least 50 are needed"):
        fit.load(path)


def test_work_of_a_plan_is_that_of_the_core() -> None:
    core, runner = RecordingScheduler(CoreLimits(max_batch_size=4, target_batch_tokens=16)), ToyRunner()
    core.worker_joined(runner.hello(1), 0.0)
    for number in range(6):
        core.submit(make_request(f"r{number}", 5 + 9 * number, 9), 0.0)
    num_plans = 0
    while (plan := core.plan(1, 0.0)) is not None:
        positions = [p for row in plan.rows for p in range(row.start, row.start + row.num_tokens)]
        kv = sum(row.num_tokens * (2 * row.start + row.num_tokens + 1) // 2 for row in plan.rows)
        assert StepWork.of(plan) == StepWork(len(positions), kv, sum(row.sample for row in plan.rows))
        core.apply(runner.launch(plan).result(), 0.0)
        num_plans += 1
    assert num_plans > 20


def test_json_has_every_field() -> None:
    assert StepTiming.from_json(json.loads(json.dumps(TRUE.to_json()))) == TRUE
    assert set(asdict(TRUE)) < set(TRUE.to_json())
