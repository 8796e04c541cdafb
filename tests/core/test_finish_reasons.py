"""How requests end: finish reasons, statistics and released resources."""

from __future__ import annotations

from dataclasses import replace

from core.harness import CoreHarness, answer, make_request

from lineclear.scheduler.core.events import Finished, FinishReason


def test_eos_ends_answer_and_is_part_of_it() -> None:
    first = answer(make_request("a", 5, max_tokens=9))
    harness = CoreHarness()
    harness.submit("a", 5, max_tokens=9, eos=first[3])
    harness.run()
    end = harness.finished("a")
    assert (end.reason, end.matched_token_id) == (FinishReason.STOP_EOS, first[3])
    assert harness.outputs("a") == first[: first.index(first[3]) + 1]


def test_eos_at_max_tokens_is_stop_eos() -> None:
    first = answer(make_request("a", 5, max_tokens=4))
    harness = CoreHarness()
    harness.submit("a", 5, max_tokens=4, eos=first[3])
    harness.run()
    end = harness.finished("a")
    assert end.reason is FinishReason.STOP_EOS


def test_stop_token_before_min_tokens_is_ignored() -> None:
    first = answer(make_request("a", 5, max_tokens=9))
    harness = CoreHarness()
    harness.submit("a", 5, max_tokens=9, eos=first[0], min_tokens=2)
    harness.run()
    assert len(harness.outputs("a")) > 2


def test_stop_token_is_reported_as_matched() -> None:
    plain = make_request("a", 5, max_tokens=9)
    token = answer(plain)[1]
    harness = CoreHarness()
    sampling = replace(plain.sampling, stop_ids=(token,))
    harness.core.submit(replace(plain, sampling=sampling, stop_ids=frozenset({token})), 0.0)
    harness.run()
    end = harness.finished("a")
    assert (end.reason, end.matched_token_id) == (FinishReason.STOP_TOKEN, token)


def test_samples_after_the_end_count_as_wasted() -> None:
    first = answer(make_request("a", 5, max_tokens=9))
    harness = CoreHarness(pipeline_depth=3)
    harness.submit("a", 5, max_tokens=9, eos=first[0])
    for _ in range(3):
        harness.plan()
    while harness.flights:
        harness.apply()
    assert harness.outputs("a") == first[:1]
    assert harness.counters.wasted_samples == 2
    assert harness.core.snapshot().blocks_used == 0


def test_stop_string_counts_tokens_up_to_the_cut() -> None:
    harness = CoreHarness()
    harness.submit("a", 5, max_tokens=9)
    for _ in range(4):
        harness.step()
    (end,) = harness.core.finish_at_stop_string("a", 2, harness.now)
    assert isinstance(end, Finished)
    assert (end.reason, end.stats.completion_tokens) == (FinishReason.STOP_STRING, 2)
    assert harness.core.finish_at_stop_string("a", 2, harness.now) == []


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
