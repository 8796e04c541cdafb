"""Rows with drafts: their plans, when they end, and when they gain nothing. The toy worker drafts by the seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core.harness import CoreHarness, answer

from lineclear.scheduler.core.draft_history import DraftCosts, DraftHistory, draft_costs
from lineclear.scheduler.core.events import Finished, FinishReason, TokensReady
from lineclear.scheduler.core.inflight_step import BadResult
from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.wire.messages import StepPlan

RIGHT, WRONG = 3, 4  # seeds whose drafts are all right, and all wrong
FREE = DraftCosts(0.0, 0.0)


def drafts_of(plan: StepPlan | None) -> list[int]:
    return [] if plan is None else [row.num_drafts for row in plan.chunks]


def always(**sizes: Any) -> CoreHarness:
    return CoreHarness(adaptive_drafts=False, **sizes)


def test_accepted_drafts_take_fewer_steps() -> None:
    plain, drafting = CoreHarness(), always()
    for h, max_drafts in ((plain, 0), (drafting, 4)):
        request = h.submit("a", 5, max_tokens=40, seed=RIGHT, max_drafts=max_drafts)
        h.run()
        assert h.outputs("a") == answer(request)
    assert len(plain.plans) == 40
    assert len(drafting.plans) <= 20
    stats = drafting.end("a").stats
    assert stats.drafted_tokens == stats.accepted_tokens == 40 - len(drafting.plans)


def test_rejected_drafts_change_nothing() -> None:
    h = always()
    request = h.submit("a", 5, max_tokens=20, seed=WRONG, max_drafts=4)
    h.run()
    assert h.outputs("a") == answer(request)
    assert h.end("a").stats.drafted_tokens > h.end("a").stats.accepted_tokens == 0


def test_tokens_of_a_step_have_consecutive_indices() -> None:
    h = always()
    h.submit("a", 5, max_tokens=40, seed=RIGHT, max_drafts=4)
    h.run()
    ready = [event for event in h.events if isinstance(event, TokensReady)]
    assert [event.first_index for event in ready] == list(range(40))


def test_answer_ends_inside_accepted_drafts() -> None:
    """The worker returns the tokens behind the end as well."""
    for seed in range(RIGHT, 400, 4):
        h = always()
        request = h.submit("a", 3, max_tokens=30, eos=0, seed=seed, max_drafts=8)
        h.run()
        end = h.end("a")
        assert isinstance(end, Finished)
        assert h.outputs("a") == answer(request)
        if end.reason is FinishReason.STOP_EOS and end.stats.accepted_tokens + len(h.plans) > len(h.outputs("a")):
            return
    raise AssertionError("no answer ended inside accepted drafts")


def test_drafts_stop_before_max_tokens() -> None:
    h = always()
    h.submit("a", 5, max_tokens=3, seed=RIGHT, max_drafts=8)
    h.step()
    assert drafts_of(h.step()) == [1], "one draft and one token more"


def test_one_row_in_flight_beside_others_that_decode_ahead() -> None:
    h = always(pipeline_depth=2)
    h.submit("a", 5, max_tokens=30, seed=WRONG, max_drafts=4)
    h.submit("b", 5, max_tokens=30, seed=1)
    h.step()
    for _ in range(12):
        while h.plan():
            pass
        rows = [row for plan in h.flights for row in plan.chunks if row.num_drafts]
        assert len(rows) <= 1
        assert len(h.flights) == 2, "the other request is planned ahead"
        h.apply()


def test_drafts_preempt_nobody() -> None:
    h = always(worker_num_blocks=12, worker_block_size=4)
    requests = [h.submit(name, 8, max_tokens=16, seed=RIGHT, max_drafts=8) for name in "ab"]
    h.run()
    assert [h.outputs(request.request_id) for request in requests] == [answer(request) for request in requests]
    assert h.core.snapshot().counters.preemptions == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": (2,), "tokens": (1, 2)},
        {"counts": (0,), "tokens": ()},
        {"num_drafted": (5,)},
        {"num_drafted": (0, 0)},
    ],
    ids=["more-tokens-than-drafts", "no-token", "more-drafts-than-allowed", "a-row-too-many"],
)
def test_result_that_does_not_fit_its_drafts_is_refused(changes: dict[str, Any]) -> None:
    h = always()
    h.submit("a", 5, max_tokens=30, seed=0, max_drafts=4)
    h.step()
    h.plan()
    result = h.compute()
    with pytest.raises(BadResult):
        h.core.apply(_without_drafts(result, changes), h.now)


def _without_drafts(result: Any, changes: dict[str, Any]) -> Any:
    return replace(result, **{"tokens": result.tokens[:1], "counts": (), "num_drafted": ()} | changes)


# --- adaptive -------------------------------------------------------------------------------------------------------


def serve(seed: int, *, others: int = 0, per_token: float = 1e-5, max_tokens: int = 120) -> CoreHarness:
    """Serve a request with drafts, and others without, by a worker with steps of 10 ms and more."""
    h = CoreHarness(worker_num_blocks=512, worker_num_slots=32, worker_max_model_len=256)
    h.seconds_per_step, h.seconds_per_token = 0.01, per_token
    h.submit("drafting", 30, max_tokens=max_tokens, seed=seed, max_drafts=8)
    for i in range(others):
        h.submit(f"plain{i}", 10 + i, max_tokens=max_tokens, seed=1)
    h.run()
    return h


def test_right_drafts_get_longer() -> None:
    h = serve(RIGHT)
    assert drafts_of(h.plans[1])[0] < 8
    assert max(d for plan in h.plans for d in drafts_of(plan)) == 8


def test_wrong_drafts_are_tried_seldom() -> None:
    h = serve(WRONG, max_tokens=200)
    rows = [i for i, plan in enumerate(h.plans) if any(drafts_of(plan))]
    assert 0 < len(rows) < 60
    assert len([i for i in rows if i > 100]) < 20, "pauses get longer"
    assert max(rows) > 60, "it is tried again"


def test_no_drafts_where_a_position_costs_as_much_as_a_row() -> None:
    h = serve(RIGHT, others=15, per_token=0.05)
    rows = [plan for plan in h.plans[20:] if any(drafts_of(plan))]
    assert rows == []


def test_other_requests_do_not_wait_for_drafts() -> None:
    h = serve(RIGHT, others=3)
    slots = {row.slot for plan in h.plans for row in plan.chunks if row.num_drafts}
    assert len(slots) == 1
    assert all(len(plan.decodes.slots) >= 3 for plan in h.plans[5:20])


def test_history_follows_results() -> None:
    history = DraftHistory()
    before = history.accepted
    history.observe(4, 4)
    assert history.accepted > before
    for _ in range(20):
        history.observe(4, 0)
    assert history.accepted < 0.15
    assert history.best_length(8, FREE) > 0, "one was accepted, and they cost nothing"
    assert history.best_length(8, FREE._replace(per_position=0.2)) == 0


def test_length_ends_where_the_next_draft_costs_more_than_its_chance() -> None:
    history = DraftHistory()
    history.accepted, history.found = 0.8, 1.0
    assert history.best_length(16, DraftCosts(0.5, 0.0)) == 3, "0.8, 0.64, 0.512, but 0.41 costs 0.5"
    assert history.best_length(2, DraftCosts(0.5, 0.0)) == 2
    assert history.best_length(16, DraftCosts(0.9, 0.0)) == 0


def test_row_that_leaves_out_a_step_must_gain_a_token_after_its_trial() -> None:
    history = DraftHistory()
    history.accepted, history.found = 0.6, 0.5  # gains 0.75 tokens at most
    assert history.best_length(16, DraftCosts(0.0, 1.0)) == 16, "a trial"
    history.trial_rows, history.has_gained = 0, True
    assert history.best_length(16, DraftCosts(0.0, 1.0)) == 0
    assert history.best_length(16, FREE) == 16


def test_trial_without_an_accepted_draft_ends_in_a_pause() -> None:
    history = DraftHistory()
    for num_drafted in (0, 3, 0):
        history.observe(num_drafted, 0)
        assert history.best_length(8, FREE) > 0
    history.observe(0, 0)
    assert history.best_length(8, FREE) == 0


def test_pauses_double_until_drafts_gain_again() -> None:
    history = DraftHistory()
    ends = []
    for _ in range(3):
        history.rest(100)
        ends.append(history.paused_until)
    assert ends == [116, 132, 164]
    history.resume()
    assert history.paused_until is None
    assert history.found >= 0.15


def test_cost_of_a_position_is_that_of_a_row_where_steps_have_no_base() -> None:
    model = StepTimeModel()
    assert draft_costs(model, 1, 100, is_pipelined=False).per_position == 0.1, "not fitted"
    for tokens in (1, 8, 2, 16, 4, 1, 3, 9, 5, 7) * 4:
        model.observe(tokens, 10 * tokens, 0.001 * tokens)
    assert draft_costs(model, 32, 320, is_pipelined=True) == pytest.approx((1.0, 1.0), abs=0.05)
