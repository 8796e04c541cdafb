"""Prompt-only work and drafts beside streams: a step stays within twice the time of its decodes alone.

A step of the harness takes 10 ms, and 1 ms for each token; a score takes 3 ms more.
"""

from __future__ import annotations

import pytest
from core.harness import CoreHarness

from lineclear.scheduler.core.sequence import Scoring
from lineclear.wire.messages import Pooling, PoolingKind, RowOutput, StepPlan

_STREAMS = 8
_SECONDS_PER_SCORE = 0.003
_EMBEDDING = {"max_tokens": 0, "pooling": Pooling(PoolingKind.MEAN)}


class Cadence(CoreHarness):
    """A harness with streams, whose step-time model has measured prompts but no scores."""

    def __init__(self, streams: int = _STREAMS, **sizes: object) -> None:
        super().__init__(
            target_batch_tokens=512,
            max_batch_size=128,
            worker_num_blocks=8192,
            worker_num_slots=128,
            worker_max_model_len=1024,
            prefix_cache=False,  # a cached position takes no time
            **sizes,
        )
        self.seconds_per_step, self.seconds_per_token = 0.01, 0.001
        for number, length in enumerate((30, 9, 120, 5, 14, 60, 2, 80, 16, 7, 40, 25)):
            self.submit(f"teach{number}", length, max_tokens=1)
            self.timed()
        for number in range(streams):
            self.submit(f"stream{number}", 4, max_tokens=500)
        if streams:
            self.timed()
            self.alone = self.seconds(self.timed())

    def seconds(self, plan: StepPlan | None) -> float:
        """Return what a plan takes."""
        assert plan is not None
        num_scored = sum(row.num_tokens for row in plan.chunks if row.output is RowOutput.SCORE)
        return self.seconds_per_step + self.seconds_per_token * plan.num_tokens + _SECONDS_PER_SCORE * num_scored

    def timed(self) -> StepPlan | None:
        """Run one step, with the seconds that it takes."""
        plan = self.plan()
        if self.flights:
            self.apply(step_seconds=self.seconds(plan))
        return plan

    def longest(self, steps: int) -> float:
        """Return the longest of the next steps, in steps that only decode."""
        return max(self.seconds(self.timed()) for _ in range(steps)) / self.alone


def test_embeddings_together_lengthen_a_step_as_one_prompt() -> None:
    harness = Cadence()
    for number in range(64):
        harness.submit(f"embedding{number}", 100, **_EMBEDDING)
    assert 1.8 < harness.longest(40) < 2.1  # a token more than twice the time


def test_scores_count_by_their_positions() -> None:
    harness = Cadence()
    for number in range(64):
        harness.submit(f"score{number}", 90, max_tokens=0, scoring=Scoring(10, 20))
    first = harness.seconds(harness.timed()) / harness.alone
    assert first <= 2.5, "before a score was measured: the smallest chunk"
    harness.longest(8)
    assert 1.5 < harness.longest(100) <= 2.2  # a scored position more


def test_scores_with_a_fixed_cost_are_not_starved() -> None:
    """Counted by position, few scores look dear; their number must not shrink to one for that."""
    harness = Cadence()
    for number in range(64):
        harness.submit(f"score{number}", 90, max_tokens=0, scoring=Scoring(10, 20))
    scored = []
    for _ in range(100):
        plan = harness.plan()
        assert plan is not None
        scored.append(sum(row.num_tokens for row in plan.chunks if row.output is RowOutput.SCORE))
        seconds = 0.01 + 0.001 * plan.num_tokens + (0.02 if scored[-1] else 0.0)
        harness.apply(step_seconds=seconds)
    assert sum(scored[50:]) >= 50 * 3


@pytest.mark.parametrize("kind", ["embedding", "score"])
def test_prompts_that_generate_keep_their_shares(kind: str) -> None:
    """Each of them adds a share, the requests without output add none."""
    more = _EMBEDDING if kind == "embedding" else {"max_tokens": 0, "scoring": Scoring(10)}
    harness = Cadence()
    for number in range(3):
        harness.submit(f"new{number}", 300, max_tokens=20)
    for number in range(20):
        harness.submit(f"other{number}", 100, **more)
    assert harness.seconds(harness.timed()) / harness.alone == pytest.approx(4.0, abs=0.2)


def test_first_prompt_of_a_worker_starts_small_and_doubles() -> None:
    harness = CoreHarness(
        target_batch_tokens=512, worker_num_blocks=512, worker_max_model_len=2048, max_prefill_slowdown=1000.0
    )
    harness.seconds_per_step, harness.seconds_per_token = 0.01, 1e-6
    harness.submit("stream", 1, max_tokens=100)
    for _ in range(3):
        harness.step()
    harness.submit("long", 1000, max_tokens=1)
    chunks = [harness.rows(harness.step())[-1] for _ in range(12)]
    assert [end - start for _, start, end in chunks][:10] == [8] * 5 + [17, 35, 71, 143, 287]


def test_prompts_are_served_where_the_model_errs() -> None:
    """Half of the surplus is left to prompts, however noisy the machine."""
    harness = Cadence()
    harness.submit("long", 800, max_tokens=1)
    for number in range(40):
        plan = harness.plan()
        harness.apply(step_seconds=harness.seconds(plan) * (0.5 if number % 2 else 2.0))
    assert sum(row.num_tokens for row in plan.chunks) >= _STREAMS


def test_drafts_do_not_take_the_time_of_prompts_and_of_other_streams() -> None:
    harness = Cadence(streams=4, adaptive_drafts=False)
    for number in range(8):
        harness.submit(f"drafting{number}", [5, 6, 7, 8] * 10, max_tokens=200, max_drafts=8)
    for _ in range(12):
        harness.timed()
    alone = 0.01 + 0.001 * (4 + 8)
    plans = [harness.timed() for _ in range(20)]
    assert any(row.num_drafts for plan in plans if plan is not None for row in plan.chunks)
    assert max(map(harness.seconds, plans)) / alone <= 2.0
    harness.submit("long", 400, max_tokens=1)
    plans = [harness.timed() for _ in range(8)]
    assert max(map(harness.seconds, plans)) / alone < 2.1
    assert all(max(row.num_tokens for row in plan.chunks) >= 8 for plan in plans if plan is not None)
