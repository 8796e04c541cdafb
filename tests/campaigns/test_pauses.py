"""Pauses around a death, on timelines that a reader can check by hand."""

from __future__ import annotations

from campaigns.pauses import Death, Pauses, Timeline

DEATH = Death(at=10.0, lost_at=10.2, is_kill=True)


def test_streams_are_told_apart_by_their_recoveries() -> None:
    killed = Timeline((9.0, 9.9, 10.5, 10.6), recoveries=1)
    living = Timeline((9.0, 9.95, 10.05, 10.15, 10.25, 12.0), recoveries=0)
    before = Timeline((7.0, 7.4, 7.6, 8.0), recoveries=0)
    found = Pauses.of([killed, living, before], [DEATH])
    assert [round(gap, 6) for gap in found.killed] == [0.6]
    assert [round(gap, 6) for gap in found.living] == [0.1]  # the gap to 12.0 is after the loss
    assert [round(gap, 6) for gap in found.control] == [0.4]  # those that overlap 7.5 to 7.7


def test_answers_that_span_two_deaths_are_not_counted() -> None:
    later = DEATH._replace(at=11.0, lost_at=11.1)
    found = Pauses.of([Timeline((9.0, 12.0), recoveries=1)], [DEATH, later])
    assert (found.killed, found.living, found.control) == ([], [], [])


def test_pauses_without_another_worker_are_told_apart() -> None:
    found = Pauses.of([Timeline((9.0, 9.9, 14.5), recoveries=1)], [DEATH._replace(was_only=True)])
    assert found.killed == []
    assert [round(gap, 6) for gap in found.killed_alone] == [4.6]


def test_only_kills_count_as_pauses_of_the_dead_worker() -> None:
    hung = DEATH._replace(is_kill=False)
    found = Pauses.of([Timeline((9.0, 12.0), 1), Timeline((9.0, 10.1, 10.3), 0)], [hung])
    assert found.killed == []
    assert len(found.living) == 1
