"""How requests end: finish reasons, statistics and released resources."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core.harness import CoreHarness, answer, make_request

from lineclear.scheduler.core.events import FinishReason


@pytest.mark.parametrize("max_tokens", [9, 4])
def test_eos_ends_answer_and_is_part_of_it(max_tokens: int) -> None:
    first = answer(make_request("a", 5, max_tokens=9))
    harness = CoreHarness()
    harness.submit("a", 5, max_tokens=max_tokens, eos=first[3])
    harness.run()
    end = harness.finished("a")
    assert (end.reason, end.matched_token_id) == (FinishReason.STOP_EOS, first[3])
    assert harness.outputs("a") == first[: first.index(first[3]) + 1]


def test_stop_token_is_reported_as_matched() -> None:
    plain = make_request("a", 5, max_tokens=9)
    token = answer(plain)[1]
    harness = CoreHarness()
    sampling = replace(plain.sampling, stop_ids=(token,))
    harness.core.submit(replace(plain, sampling=sampling, stop_ids=frozenset({token})), 0.0)
    harness.run()
    end = harness.finished("a")
    assert (end.reason, end.matched_token_id) == (FinishReason.STOP_TOKEN, token)


def test_cancel_in_flight_releases_slot_and_blocks() -> None:
    harness = CoreHarness(pipeline_depth=2)
    harness.submit("a", 5, max_tokens=9)
    harness.plan()
    harness.cancel("a")
    assert harness.core.snapshot().blocks_used == 0
    assert harness.core.plan(harness.epoch, 0.0) is None
    harness.apply()
    assert harness.outputs("a") == []


def test_steps_count_positions_computed_and_held() -> None:
    harness = CoreHarness()
    harness.submit("a", 6, 3)
    harness.submit("b", 4, 3)
    totals = []
    for _ in range(3):
        harness.step()
        snapshot = harness.core.snapshot()
        totals.append((snapshot.last_step_tokens, snapshot.last_step_positions))
    assert totals == [(10, 10), (2, 12), (2, 14)]
    assert (harness.counters.step_tokens, harness.counters.step_positions) == (14, 36)
