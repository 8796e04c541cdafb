"""How long a step takes: a linear model of its work, corrected by size, the spread of measured steps, and the time
between them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lineclear.wire.messages import RowOutput, StepPlan

FORMAT = "lineclear step times 1"


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """What a worker says in its Hello."""

    num_blocks: int = 4096
    block_size: int = 16
    num_slots: int = 4096
    max_model_len: int = 32_768
    max_step_tokens: int = 256


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step."""

    tokens: int
    """Positions computed."""
    kv_tokens: int
    """Cached positions that each computed position attends to, summed, as in core.step_time_model."""
    samples: int
    """Rows that sample."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Return the work of a plan."""
        starts = plan.decodes.starts
        tokens = samples = len(starts)
        kv_tokens = sum(starts) + tokens
        for _, start, num_tokens, output, _, num_drafts in plan.chunks:
            count = num_tokens + num_drafts
            tokens += count
            samples += output == RowOutput.SAMPLE
            kv_tokens += count * (2 * start + count + 1) // 2
        return cls(tokens, kv_tokens, samples)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of a step: `base + per_token * tokens + per_kv_token * kv_tokens + per_sample * samples`, times a ratio.

    `ratios[tokens.bit_length()]` has quantiles of measured over linear seconds for steps of that size; a step draws one
    of them. Without an entry, the ratio is 1. `gap_seconds` passes between two steps of a busy worker, or one
    of the quantiles `gaps[tokens.bit_length()]` before a step of that size. `latency_seconds` passes between the plan
    for an idle worker and the begin of its step, the way of the result included.
    """

    base_seconds: float
    seconds_per_token: float
    seconds_per_kv_token: float
    seconds_per_sample: float = 0.0
    gap_seconds: float = 0.0
    latency_seconds: float = 0.0
    ratios: dict[int, tuple[float, ...]] = field(default_factory=dict)
    gaps: dict[int, tuple[float, ...]] = field(default_factory=dict)
    worker: WorkerCapacity = field(default_factory=WorkerCapacity)

    def linear(self, work: StepWork) -> float:
        """Return the seconds of a step by the linear model alone."""
        return (
            self.base_seconds
            + self.seconds_per_token * work.tokens
            + self.seconds_per_kv_token * work.kv_tokens
            + self.seconds_per_sample * work.samples
        )

    def draw(self, work: StepWork, chance: random.Random) -> float:
        """Return the seconds of one step."""
        seconds, ratios = self.linear(work), self.ratios.get(work.tokens.bit_length())
        return seconds * ratios[int(chance.random() * len(ratios))] if ratios else seconds

    def draw_gap(self, work: StepWork, chance: random.Random) -> float:
        """Return the seconds between the end of the step before and the begin of this one, on a busy worker."""
        gaps = self.gaps.get(work.tokens.bit_length())
        return gaps[int(chance.random() * len(gaps))] if gaps else self.gap_seconds

    def without_spread(self) -> StepTiming:
        """Return a timing of the same means in which equal steps take equal times."""
        return replace(self, ratios=_means(self.ratios), gaps=_means(self.gaps))

    def to_json(self) -> dict[str, Any]:
        """Return the content of a file that `load` reads."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> StepTiming:
        """Return the timing of a JSON object. Raises ValueError for unknown or missing fields."""
        known = {name: value for name, value in fields.items() if name != "format"}
        try:
            worker = WorkerCapacity(**known.pop("worker", {}))
            ratios = {int(size): tuple(found) for size, found in known.pop("ratios", {}).items()}
            gaps = {int(size): tuple(found) for size, found in known.pop("gaps", {}).items()}
            return cls(**known, ratios=ratios, gaps=gaps, worker=worker)
        except TypeError as error:
            raise ValueError(f"{error}; base_seconds, seconds_per_token and seconds_per_kv_token are needed") from None

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


def quantiles(values: Sequence[float], count: int, mean: float) -> tuple[float, ...]:
    """Return `count` values at evenly spaced ranks, negative ones as 0, scaled to `mean`."""
    ranked = sorted(values)
    picked = [max(0.0, ranked[int((i + 0.5) * len(ranked) / count)]) for i in range(count)]
    scale = mean * count / (sum(picked) or 1.0)
    return tuple(round(value * scale, 7) for value in picked)


def _means(quantiles_by_size: dict[int, tuple[float, ...]]) -> dict[int, tuple[float, ...]]:
    return {size: (sum(found) / len(found),) for size, found in quantiles_by_size.items()}
