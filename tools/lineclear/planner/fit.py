"""Fits a StepTiming to measured steps, from a flight recording or from a file of step records.

The fit is least squares with coefficients of at least 0. Sums of step times decide throughput, so slow steps count as
they are. The core replays a flight recording to know the work of each step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from lineclear.planner.step_timing import FORMAT, StepTiming, StepWork, WorkerCapacity, quantiles
from lineclear.scheduler.core.dump import load as load_value
from lineclear.scheduler.flight_recorder.recorder import FORMAT as RECORDING_FORMAT
from lineclear.scheduler.flight_recorder.replay import Divergence, NotARecording, replay
from lineclear.wire.messages import Hello, StepPlan

_MIN_STEPS = 50
_SKIPPED_STEPS = 5  # of each epoch: they may compile or touch memory for the first time
_MAX_GAP_SECONDS = 1.0
_MIN_OF_SIZE = 20  # steps of a size, to correct the linear model there
_QUANTILES = 50

_T = TypeVar("_T")
_WARNED_ERROR, _REFUSED_ERROR = 0.35, 0.5
"""Mean errors above which a fit has a warning and is refused: 22 to 25 % on a quiet machine, 65 % on a busy one."""


class NoFit(Exception):
    """The file has no steps that a model can be fitted to; the message says why."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step with its times, in seconds on one clock."""

    worker: int
    step: int
    work: StepWork
    seconds: float
    planned_at: float
    applied_at: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted timing and how well it fits."""

    timing: StepTiming
    num_steps: int
    mean_error: float
    """Mean absolute error of a step over the mean step."""
    r_squared: float

    @property
    def warning(self) -> str:
        """What is wrong with planning by this fit; empty if nothing is."""
        if self.mean_error <= _WARNED_ERROR:
            return ""
        return (
            f"the measured times differ from the fit by {self.mean_error:.0%} of a step on average, and 20 to 30 % are"
            " usual: other processes disturbed the recording, or it has too few steps. Record again on an idle machine,"
            " under a load like the one to plan"
        )

    @property
    def is_unusable(self) -> bool:
        """Whether nothing should be planned by this fit."""
        return self.mean_error > _REFUSED_ERROR

    def __str__(self) -> str:
        t = self.timing
        return (
            f"{self.num_steps} steps: {t.base_seconds * 1e3:.3f} ms + {t.seconds_per_token * 1e6:.2f} us a token"
            f" + {t.seconds_per_kv_token * 1e9:.2f} ns a kv token + {t.seconds_per_sample * 1e6:.2f} us a sample;"
            f" {t.gap_seconds * 1e3:.3f} ms between steps, {t.latency_seconds * 1e3:.3f} ms to an idle worker;"
            f" R2 {self.r_squared:.3f}, mean error {self.mean_error:.1%} of a step"
        )


def load(path: Path) -> tuple[StepTiming, Fit | None]:
    """Return the timing of a JSON file of `StepTiming`, a flight recording or step records. Raises NoFit."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NoFit(f"{path}: {error}") from None
    try:
        if (whole := _object(text)) is not None:
            return StepTiming.from_json(whole), None
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise NoFit(f"{path}: {error}") from None
    if not lines or not all(isinstance(entry, dict | list) for entry in lines):
        raise NoFit(f"{path}: neither a flight recording, step records nor {FORMAT!r}")
    is_recording = isinstance(lines[0], dict) and str(lines[0].get("format", "")).startswith(RECORDING_FORMAT[:26])
    try:
        steps, worker = recorded_steps(lines) if is_recording else step_records(lines)
        fit = fitted(steps, worker)
    except (NotARecording, Divergence, KeyError, TypeError, ValueError) as error:
        raise NoFit(f"{path}: {type(error).__name__}: {error}") from None
    except NoFit as error:
        raise NoFit(f"{path}: {error}") from None
    return fit.timing, fit


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "base_seconds" in found else None


# --- sources ---------------------------------------------------------------------------------------------------------


def recorded_steps(recording: Sequence[Any]) -> tuple[list[MeasuredStep], WorkerCapacity]:
    """Return the steps of a flight recording, and the capacity of its first worker."""
    planned: dict[tuple[int, int], tuple[float, StepWork]] = {}
    joins = [facts for call, _, facts, *_ in recording[2:] if call == "worker_joined"]

    def on_plan(now: float, plan: StepPlan) -> None:
        planned[plan.epoch, plan.step] = now, StepWork.of(plan)

    replay(recording, on_plan)
    steps = []
    for call, now, facts, *_ in recording[2:]:
        if call == "apply" and (facts[0], facts[1]) in planned:
            planned_at, work = planned[facts[0], facts[1]]
            steps.append(MeasuredStep(facts[0], facts[1], work, facts[2], planned_at, now))
    hello = next(_hellos([recording[1:2], joins]), None)
    if hello is None:
        return steps, WorkerCapacity()
    # Not num_slots, which follows from the recorded server's max_batch_size: a simulation may ask for more.
    return steps, WorkerCapacity(
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_model_len=hello.max_model_len,
        max_step_tokens=hello.max_step_tokens,
    )


def _hellos(copied: Any) -> Iterator[Hello]:
    """Yield the workers in copies of the core's values (`dump`)."""
    if isinstance(copied, dict):
        if "Hello" in copied:
            yield load_value(copied)
            return
        copied = list(copied.values())
    if isinstance(copied, list):
        for entry in copied:
            yield from _hellos(entry)


def step_records(lines: Iterable[dict[str, Any]]) -> tuple[list[MeasuredStep], WorkerCapacity]:
    """Return the steps of records as JSON objects with epoch, step, time_seconds, seconds and rows.

    `time_seconds` is when the result arrived. A row has start and num_tokens, and samples unless it is false.
    """
    steps, blocks = [], 0
    for entry in lines:
        rows = entry["rows"]
        tokens = sum(row["num_tokens"] for row in rows)
        kv_tokens = sum(row["num_tokens"] * (2 * row["start"] + row["num_tokens"] + 1) // 2 for row in rows)
        work = StepWork(tokens, kv_tokens, sum(bool(row.get("samples", True)) for row in rows))
        at = float(entry["time_seconds"])
        steps.append(MeasuredStep(entry["epoch"], entry["step"], work, float(entry["seconds"]), math.nan, at))
        blocks = max(blocks, entry.get("num_blocks", 0))
    return steps, WorkerCapacity(num_blocks=blocks or WorkerCapacity().num_blocks)


# --- the fit ---------------------------------------------------------------------------------------------------------


def fitted(steps: Sequence[MeasuredStep], worker: WorkerCapacity) -> Fit:
    """Return the timing that fits the steps best. Raises NoFit with fewer than 50 of them."""
    used = [step for step in steps if step.step > _SKIPPED_STEPS]
    if len(used) < _MIN_STEPS:
        raise NoFit(f"{len(used)} steps after the first {_SKIPPED_STEPS}; at least {_MIN_STEPS} are needed")
    inputs = [(1.0, float(s.work.tokens), float(s.work.kv_tokens), float(s.work.samples)) for s in used]
    base, token, kv, sample = non_negative_least_squares(inputs, [step.seconds for step in used])
    busy, latencies = _intervals(steps)
    timing = StepTiming(
        base,
        token,
        kv,
        sample,
        gap_seconds=max(0.0, fmean(gap for _, gap in busy)) if busy else 0.0,
        latency_seconds=max(0.0, fmean(latencies)) if latencies else 0.0,
        gaps={size: quantiles(gaps, _QUANTILES, max(0.0, fmean(gaps))) for size, gaps in _by_size(busy).items()},
        worker=worker,
    )
    return _with_ratios(timing, used)


def _with_ratios(timing: StepTiming, steps: Sequence[MeasuredStep]) -> Fit:
    """Return the timing with the ratios of measured over linear seconds, and how well it fits."""
    ratios = {}
    errors: list[float] = []
    for size, found in _by_size([(step.work, step) for step in steps], least=1).items():
        linear = [timing.linear(step.work) for step in found]
        mean = sum(step.seconds for step in found) / (sum(linear) or 1.0)
        if len(found) >= _MIN_OF_SIZE and mean > 0:
            each = [step.seconds / seconds for step, seconds in zip(found, linear, strict=True)]
            ratios[size] = quantiles(each, _QUANTILES, mean)
        else:
            mean = 1.0
        errors += [step.seconds - mean * seconds for step, seconds in zip(found, linear, strict=True)]
    average = fmean(step.seconds for step in steps)
    variance = sum((step.seconds - average) ** 2 for step in steps)
    return Fit(
        replace(timing, ratios=ratios),
        len(steps),
        fmean(map(abs, errors)) / average if average else 0.0,
        1 - sum(error * error for error in errors) / variance if variance else 1.0,
    )


def _by_size(values: Iterable[tuple[StepWork, _T]], least: int = _MIN_OF_SIZE) -> dict[int, list[_T]]:
    found: dict[int, list[_T]] = {}
    for work, value in values:
        found.setdefault(work.tokens.bit_length(), []).append(value)
    return {size: group for size, group in sorted(found.items()) if len(group) >= least}


def _intervals(steps: Iterable[MeasuredStep]) -> tuple[list[tuple[StepWork, float]], list[float]]:
    """Return the times before steps of a busy worker, and of the ways to an idle one and back.

    A plan made right after a result counts as one for a busy worker, also if the result was that of the last plan. The
    scheduler was late then: on the virtual clock, which takes no time to plan, it would have been made before.
    """
    gaps: list[tuple[StepWork, float]] = []
    latencies: list[float] = []
    before: MeasuredStep | None = None
    for step in sorted(steps, key=lambda s: (s.worker, s.step)):
        if before is not None and (before.worker, before.step + 1) == (step.worker, step.step):
            gap = step.applied_at - before.applied_at - step.seconds
            was_idle = step.planned_at > before.applied_at
            if math.isnan(step.planned_at):  # a record without it: busy, unless the gap is as long as a step
                was_idle = gap > max(step.seconds, 0.002)
            if not was_idle and gap < _MAX_GAP_SECONDS:
                gaps.append((step.work, gap))
            elif was_idle and not math.isnan(step.planned_at):
                latencies.append(step.applied_at - step.planned_at - step.seconds)
        before = step
    return gaps, [seconds for seconds in latencies if seconds < _MAX_GAP_SECONDS]


def non_negative_least_squares(inputs: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients of at least 0 with the least squared error: the best of all subsets of the inputs."""
    width = len(inputs[0])
    scale = [max(map(abs, column)) or 1.0 for column in zip(*inputs, strict=True)]
    products = [
        [sum(row[i] / scale[i] * (row[j] / scale[j]) for row in inputs) for j in range(width)] for i in range(width)
    ]
    right = [sum(row[i] / scale[i] * value for row, value in zip(inputs, values, strict=True)) for i in range(width)]
    total = sum(value * value for value in values)
    best, best_error = [0.0] * width, total
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            found = _solve([[products[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen])
            if found is None or min(found) < 0:
                continue
            error = total - sum(found[k] * right[i] for k, i in enumerate(chosen))
            if error < best_error * (1 - 1e-9):
                best_error = error
                best = [0.0] * width
                for k, i in enumerate(chosen):
                    best[i] = found[k] / scale[i]
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a symmetric positive system by elimination; None if it is singular."""
    size, rows = len(right), [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        if abs(rows[pivot][i]) <= 1e-9 * max(abs(v) for row in matrix for v in row):
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - rest) / rows[i][i]
    return solution
