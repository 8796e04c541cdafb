"""Rows that report scores of the prompt or a vector instead of a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core.harness import VOCABULARY, CoreHarness, answer
from support.toy import expected_scores, expected_vector

from lineclear.errors import NonFiniteLogits
from lineclear.scheduler.core.events import FinishReason, Pooled, Scored
from lineclear.scheduler.core.inflight_step import BadResult
from lineclear.scheduler.core.sequence import Request, Scoring
from lineclear.wire.messages import Pooling, PoolingKind, RowOutput, Scores

LAST, MEAN = (Pooling(kind) for kind in PoolingKind)
NONE, SAMPLE, SCORE, POOL = RowOutput


def joined(scores: list[Scores]) -> Scores:
    """Return the scores of several rows as one."""
    columns = (tuple(value for row in scores for value in row[field]) for field in range(3))
    return Scores(*columns)


def scores(harness: CoreHarness, request_id: str) -> tuple[list[int], Scores]:
    """Return the first positions of the reports, and all reported scores."""
    events = [e for e in harness.events if isinstance(e, Scored) and e.request_id == request_id]
    return [e.first_position for e in events], joined([e.scores for e in events])


def right(request: Request) -> Scores:
    assert request.scoring is not None
    return joined(expected_scores(request.prompt, *request.scoring, VOCABULARY))


def outputs(harness: CoreHarness) -> list[tuple[int, int, RowOutput]]:
    """Return start, end and output of each row so far."""
    return [(row.start, row.start + row.num_tokens, row.output) for plan in harness.plans for row in plan.rows]


def test_scores_of_prompt_come_before_its_answer_each_once() -> None:
    harness = CoreHarness(target_batch_tokens=8)
    request = harness.submit("a", 20, max_tokens=3, scoring=Scoring(0, 2))
    harness.run()
    assert outputs(harness)[:4] == [(0, 8, SCORE), (8, 16, SCORE), (16, 19, SCORE), (19, 20, SAMPLE)]
    assert scores(harness, "a") == ([0, 8, 16], right(request))
    assert harness.outputs("a") == answer(request)


def test_scores_behind_reported_positions() -> None:
    whole = Scores((-1.0, -2.0, -3.0), (1, 2, 3, 4, 5, 6), (-0.1, -0.2, -0.3, -0.4, -0.5, -0.6))
    assert whole.behind(1) == Scores((-2.0, -3.0), (3, 4, 5, 6), (-0.3, -0.4, -0.5, -0.6))
    assert whole.behind(0) == whole
    assert Scores((-1.0, -2.0)).behind(1) == Scores((-2.0,))


def test_request_without_output_ends_with_its_scores() -> None:
    harness = CoreHarness()
    request = harness.submit("a", 10, max_tokens=0, scoring=Scoring(6))
    harness.run()
    assert outputs(harness) == [(0, 6, NONE), (6, 9, SCORE)], "the last token needs no row"
    assert scores(harness, "a") == ([6], right(request))
    end = harness.finished("a")
    assert (end.reason, end.stats.completion_tokens) == (FinishReason.NO_OUTPUT, 0)


def test_scored_positions_are_no_cache_hits() -> None:
    harness = CoreHarness()
    prompt = [7 * i % VOCABULARY for i in range(24)]
    harness.submit("before", prompt, max_tokens=1)
    harness.run()
    request = harness.submit("a", prompt, max_tokens=0, scoring=Scoring(10))
    harness.run()
    assert outputs(harness)[1:] == [(10, 23, SCORE)], "positions below the first score come from the cache"
    assert scores(harness, "a")[1] == right(request)


def test_continuations_share_the_prefix() -> None:
    harness = CoreHarness(target_batch_tokens=64)
    prefix = [7 * i % VOCABULARY for i in range(24)]
    requests = [harness.submit(f"{i}", [*prefix, i, i + 1], max_tokens=0, scoring=Scoring(23)) for i in range(4)]
    harness.run()
    computed = sum(end - start for start, end, _ in outputs(harness))
    assert computed == 25 + 3 * (1 + 4), "one prefix, and the block that ends with the first score of each"
    assert all(scores(harness, f"{i}")[1] == right(request) for i, request in enumerate(requests))


def test_vector_of_last_token() -> None:
    harness = CoreHarness(target_batch_tokens=8)
    request = harness.submit("a", 20, max_tokens=0, pooling=LAST)
    harness.run()
    assert outputs(harness) == [(0, 8, NONE), (8, 16, NONE), (16, 20, POOL)]
    assert [e for e in harness.events if isinstance(e, Pooled)] == [Pooled("a", expected_vector(request.prompt, LAST))]
    again = harness.submit("b", request.prompt, max_tokens=0, pooling=LAST)
    harness.run()
    assert outputs(harness)[3:] == [(19, 20, POOL)], "all but the last position come from the cache"
    assert Pooled("b", expected_vector(again.prompt, LAST)) in harness.events


def test_mean_needs_all_positions() -> None:
    harness = CoreHarness(target_batch_tokens=8)
    request = harness.submit("a", 20, max_tokens=0, pooling=MEAN)
    harness.run()
    harness.submit("b", request.prompt, max_tokens=0, pooling=MEAN)
    harness.run()
    assert outputs(harness) == 2 * [(0, 8, POOL), (8, 16, POOL), (16, 20, POOL)]
    vector = expected_vector(request.prompt, MEAN)
    assert [e for e in harness.events if isinstance(e, Pooled)] == [Pooled("a", vector), Pooled("b", vector)]


@pytest.mark.parametrize("asks", [{"scoring": Scoring(0)}, {"pooling": MEAN}, {"pooling": LAST}])
def test_values_that_are_not_finite_fail_the_request(asks: dict[str, Any]) -> None:
    harness = CoreHarness(is_bad=lambda context: len(context) == 8 and context[0] == 1)
    harness.submit("bad", [1] * 8 + ([2] if "scoring" in asks else []), max_tokens=0, **asks)
    beside = harness.submit("beside", [2] * 8, max_tokens=3)
    harness.run()
    assert isinstance(harness.error("bad"), NonFiniteLogits)
    assert not [e for e in harness.events if isinstance(e, Scored | Pooled)]
    assert harness.outputs("beside") == answer(beside)


def test_result_with_other_outputs_is_refused() -> None:
    harness = CoreHarness()
    harness.submit("scored", 10, max_tokens=0, scoring=Scoring(0))
    harness.submit("pooled", 8, max_tokens=0, pooling=LAST)
    harness.submit("sampled", 8, max_tokens=1)
    harness.plan()
    result = harness.compute()
    others = [replace(result, scores=wrong) for wrong in ((), (Scores((-1.0,)),), (Scores((-1.0,) * 9, (3,)),))]
    others += [replace(result, vectors=()), replace(result, vectors=(b"",))]
    for other in (*others, replace(result, counts=(2,)), replace(result, bad_rows=frozenset({3}))):
        with pytest.raises(BadResult):
            harness.core.apply(other, harness.now)
    harness.record(harness.core.apply(replace(result, counts=(1,)), harness.now))
    assert harness.core.num_live == 0
