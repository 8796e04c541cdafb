"""Acceptance of drafts, on results written by hand."""

from __future__ import annotations

from lineclear.wire.messages import Decodes, Row, RowOutput, StepPlan, StepResult
from lineclear.worker.drafts.verification import verified

PLAN = StepPlan(
    epoch=1,
    step=1,
    decodes=Decodes((5,), (9,)),
    chunks=(Row(0, 4, 1, RowOutput.SAMPLE, (), 2), Row(3, 7, 2, RowOutput.SAMPLE)),
)
DRAFTS = {0: (11, 12)}
"""The samples are those of slot 5, three of slot 0, and that of slot 3."""


def _verified(*tokens: int, stuck: int | None = None) -> StepResult:
    rows = frozenset() if stuck is None else frozenset({stuck})
    return verified(StepResult(1, 1, tokens, stuck_rows=rows), PLAN, DRAFTS)


def test_leading_equal_drafts_are_accepted() -> None:
    found = _verified(1, 11, 12, 13, 2)
    assert (found.counts, found.num_drafted) == ((1, 3, 1), (0, 2, 0))
    assert _verified(1, 11, 7, 13, 2).tokens == (1, 11, 7, 2)
    assert _verified(1, 7, 12, 13, 2).tokens == (1, 7, 2)


def test_stuck_sample_is_counted_by_row() -> None:
    found = _verified(1, 11, 12, 13, 0, stuck=4)
    assert found.stuck_rows == {2}
    assert found.tokens == (1, 11, 12, 13, 0)
    assert _verified(0, 11, 12, 13, 2, stuck=0).stuck_rows == {0}
    assert _verified(1, 0, 12, 13, 2, stuck=1).stuck_rows == {1}


def test_row_ends_before_a_stuck_sample() -> None:
    found = _verified(1, 11, 12, 0, 2, stuck=3)
    assert (found.tokens, found.counts, found.stuck_rows) == ((1, 11, 12, 2), (1, 2, 1), frozenset())


def test_stuck_sample_behind_a_wrong_draft_does_not_count() -> None:
    found = _verified(1, 7, 12, 0, 2, stuck=3)
    assert (found.tokens, found.stuck_rows) == ((1, 7, 2), frozenset())
