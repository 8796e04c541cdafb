"""The rows of a step: chunks of prompts, decodes, and the number of tokens. Blocks have 4 positions by default."""

from __future__ import annotations

import pytest
from core.harness import CoreHarness
from core.test_cadence import Cadence
from support.toy import expected_vector

from lineclear.scheduler.core.events import Pooled
from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.wire.messages import Pooling, PoolingKind, RowOutput, Scores


@pytest.mark.parametrize(("target", "prompt_tokens"), [(0.05, pytest.approx(49, abs=6)), (1e-9, 8)])
def test_inter_token_target_limits_chunks_but_not_to_zero(target: float, prompt_tokens: int) -> None:
    # At 1 ms a token, 50 ms are 50 tokens, one of them the decode's. A target that cannot be met leaves prompts 8
    # tokens a step.
    harness = CoreHarness(
        target_batch_tokens=256,
        target_inter_token_latency_seconds=target,
        max_prefill_slowdown=1000.0,
        worker_num_blocks=512,
    )
    harness.seconds_per_token = 0.001
    harness.submit("old", 20, max_tokens=100)
    for number, length in enumerate((3, 8, 7, 5, 6, 4, 2, 8, 1, 7)):
        harness.submit(f"teach{number}", length, max_tokens=1)
        harness.step()
    harness.submit("long", 200, max_tokens=1)
    assert [end - start for _, start, end in harness.rows(harness.step())] == [1, prompt_tokens]


@pytest.mark.parametrize(("decodes", "prompt_tokens"), [(1, 8), (11, 11), (20, 16)])
def test_min_chunk_follows_decodes_within_bounds(
    monkeypatch: pytest.MonkeyPatch, decodes: int, prompt_tokens: int
) -> None:
    monkeypatch.setattr(StepTimeModel, "chunk_within", lambda *_, **__: 0.0)
    harness = CoreHarness(target_batch_tokens=256, worker_num_blocks=512, worker_num_slots=32)
    for number in range(decodes):
        harness.submit(f"old{number}", 2, max_tokens=100)
    harness.step()
    harness.submit("long", 200, max_tokens=1)
    assert [end - start for _, start, end in harness.rows(harness.step())] == [*[1] * decodes, prompt_tokens]


@pytest.mark.parametrize(
    ("stretch", "decodes", "prompts", "prompt_tokens"),
    [(2.0, 7, 1, 17), (4.0, 7, 1, 51), (100.0, 7, 1, 183), (2.0, 1, 6, 66)],
)
def test_chunk_size_follows_max_prefill_slowdown(
    stretch: float, decodes: int, prompts: int, prompt_tokens: int
) -> None:
    # One decode alone takes 11 ms, seven take 17 ms. A step may take 2 times as long, 7 times with six prompts.
    # The inter-token target of 200 ms bounds it all.
    harness = Cadence(streams=0, max_prefill_slowdown=stretch)
    for number in range(decodes):
        harness.submit(f"old{number}", 4, max_tokens=100)
    harness.step()
    harness.step()
    for number in range(prompts):
        harness.submit(f"new{number}", 400 // prompts, max_tokens=1)
    sizes = [end - start for _, start, end in harness.rows(harness.step())]
    assert sizes[:decodes] == [1] * decodes
    assert sum(sizes[decodes:]) == pytest.approx(prompt_tokens, abs=4)


def test_prompt_too_deep_for_this_step_joins_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    # The step has time for five more tokens at position 0, and for none after 800 positions.
    def fitting(model: StepTimeModel, s: float, t: float, kv: float, n: float, context: float, **_: bool) -> float:
        return 5.0 if context < 100 else 0.0

    monkeypatch.setattr(StepTimeModel, "chunk_within", fitting)
    harness = CoreHarness(target_batch_tokens=64, worker_num_blocks=1024, worker_max_model_len=1024)
    prefix = [5 + i % 40 for i in range(800)]
    harness.submit("first", prefix, max_tokens=1)
    harness.run()
    harness.submit("old", 4, max_tokens=100)
    harness.step()
    harness.step()
    harness.submit("short", 8, max_tokens=1)  # the smallest chunk
    harness.submit("behind", [*prefix, 1, 2, 3], max_tokens=1)
    harness.submit("later", 1, max_tokens=1)
    assert [(start, end) for _, start, end in harness.rows(harness.step())] == [(5, 6), (0, 8)]
    assert [(start, end) for _, start, end in harness.rows(harness.step())] == [(6, 7), (800, 803), (0, 1)]


def test_vector_of_last_token() -> None:
    last, none, pool = Pooling(PoolingKind.LAST), RowOutput.NONE, RowOutput.POOL

    def outputs() -> list[tuple[int, int, RowOutput]]:
        return [(row.start, row.start + row.num_tokens, row.output) for plan in harness.plans for row in plan.rows]

    harness = CoreHarness(target_batch_tokens=8)
    request = harness.submit("a", 20, max_tokens=0, pooling=last)
    harness.run()
    assert outputs() == [(0, 8, none), (8, 16, none), (16, 20, pool)]
    assert [e for e in harness.events if isinstance(e, Pooled)] == [Pooled("a", expected_vector(request.prompt, last))]
    again = harness.submit("b", request.prompt, max_tokens=0, pooling=last)
    harness.run()
    assert outputs()[3:] == [(19, 20, pool)], "all but the last position come from the cache"
    assert Pooled("b", expected_vector(again.prompt, last)) in harness.events


def test_scores_behind_reported_positions() -> None:
    whole = Scores((-1.0, -2.0, -3.0), (1, 2, 3, 4, 5, 6), (-0.1, -0.2, -0.3, -0.4, -0.5, -0.6))
    assert whole.behind(1) == Scores((-2.0, -3.0), (3, 4, 5, 6), (-0.3, -0.4, -0.5, -0.6))
    assert whole.behind(0) == whole
    assert Scores((-1.0, -2.0)).behind(1) == Scores((-2.0,))
