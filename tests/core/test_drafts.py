"""Rows with drafts: their plans, when they end, and when they gain nothing. The toy worker drafts by the seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core.harness import CoreHarness, answer

from lineclear.scheduler.core.draft_costs import DraftCosts, DraftTimes, TrialBudget
from lineclear.scheduler.core.draft_history import DraftHistory
from lineclear.scheduler.core.events import Finished, FinishReason, TokensReady
from lineclear.scheduler.core.inflight_step import BadResult, kv_of_drafts
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


def test_drafts_attend_to_all_positions_up_to_their_own() -> None:
    assert kv_of_drafts(5, 3) == 6 + 7 + 8


def test_drafts_preempt_nobody() -> None:
    h = always(worker_num_blocks=12, worker_block_size=4)
    requests = [h.submit(name, 8, max_tokens=16, seed=RIGHT, max_drafts=8) for name in "ab"]
    h.run()
    assert [h.outputs(request.request_id) for request in requests] == [answer(request) for request in requests]
    assert h.core.snapshot().counters.preemptions == 0


def test_drafts_take_no_block_that_another_row_needs() -> None:
    """Three blocks are free: one for each row, and the reserve of running sequences."""
    h = always(worker_num_blocks=7, worker_block_size=4, max_batch_size=2)
    for name in "ab":
        h.submit(name, 8, max_tokens=20, seed=RIGHT, max_drafts=8)
    h.step()
    plan = h.plan()
    assert plan is not None
    assert [(row.num_drafts, len(row.new_blocks)) for row in plan.chunks] == [(3, 1), (3, 1)]


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


def observe(history: DraftHistory, num_drafted: int, num_accepted: int, costs: DraftCosts = FREE) -> None:
    history.charge(costs, num_drafted)
    history.observe(num_drafted, num_drafted, num_accepted)


def test_history_follows_results() -> None:
    history = DraftHistory()
    before = history.accepted
    observe(history, 4, 4)
    assert history.accepted > before
    for _ in range(20):
        observe(history, 4, 0)
    assert history.accepted < 0.15
    assert history.best_length(8, FREE) > 0, "some were accepted, and they cost nothing"
    assert history.best_length(8, FREE._replace(per_position=0.2)) == 0


def test_accepted_share_moves_a_tenth_of_the_way_with_each_draft() -> None:
    history = DraftHistory(found=0.5, accepted=0.6)
    observe(history, 3, 2)
    assert history.accepted == pytest.approx((0.9 * (0.9 * 0.6 + 0.1) + 0.1) * 0.9), "two were accepted, one was not"
    assert history.found == pytest.approx(0.55)
    observe(history, 0, 0)
    assert history.found == pytest.approx(0.495)


def test_length_ends_where_the_next_draft_costs_more_than_its_chance() -> None:
    history = DraftHistory()
    history.accepted, history.found = 0.8, 1.0
    assert history.best_length(16, DraftCosts(0.5, 0.0)) == 3, "0.8, 0.64, 0.512, but 0.41 costs 0.5"
    assert history.best_length(2, DraftCosts(0.5, 0.0)) == 2
    assert history.best_length(16, DraftCosts(0.9, 0.0)) == 0


def test_row_must_gain_its_own_cost_after_the_trial() -> None:
    history = DraftHistory()
    history.accepted, history.found = 0.6, 0.5  # gains 0.75 tokens at most
    assert history.best_length(16, DraftCosts(0.0, 1.0)) == 16, "a trial"
    history.trial_rows, history.balance = 0, 1.0
    assert history.best_length(16, DraftCosts(0.0, 1.0)) == 0
    assert history.best_length(16, DraftCosts(0.0, 0.5)) == 16


def test_trial_that_lost_tokens_ends_in_a_pause() -> None:
    """One draft of eight was accepted, and eight rows of 0.2 tokens cost more."""
    history, costs = DraftHistory(), DraftCosts(0.0, 0.3)
    for num_accepted in (0, 1, 0):
        observe(history, 2, num_accepted, costs)
        assert history.best_length(8, costs) > 0
    observe(history, 2, 0, costs)
    assert history.balance == pytest.approx(-0.2)
    assert history.best_length(8, costs) == 0


def test_drafts_that_the_worker_did_not_find_cost_only_the_row() -> None:
    history, costs = DraftHistory(), DraftCosts(0.25, 0.5)
    assert history.charge(costs, 8) == 2.5
    assert history.observe(8, 2, 1) == 6 * 0.25 + 1
    assert history.balance == 1 - 0.5 - 2 * 0.25


def test_gains_of_long_ago_do_not_pay_for_losses() -> None:
    history, costs = DraftHistory(), DraftCosts(0.0, 0.5)
    for _ in range(50):
        observe(history, 8, 8, costs)
    for _ in range(8):
        assert history.best_length(8, costs) > 0
        observe(history, 8, 0, costs)
    assert history.best_length(8, costs) == 0


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
    observe(history, 8, 8)
    history.rest(100)
    assert history.paused_until == 116


def test_draft_model_is_tried_with_drafts_enough_to_pay() -> None:
    """A position costs half a token and a row 0.4: one draft never pays, five do."""
    costs, lookup, model = DraftCosts(0.55, 0.4), DraftHistory(), DraftHistory(1.0, 0.9)
    assert lookup.best_length(6, costs) == 1
    assert model.best_length(6, costs) == 5
    for _ in range(4):
        observe(model, 5, 5, costs)
    assert model.best_length(6, costs) >= 4
    for _ in range(12):
        observe(model, 5, 0, costs)
    assert model.best_length(6, costs) == 0
    model.resume()
    assert (model.found, model.accepted) == (1.0, 0.8)


def test_requests_begin_with_the_expected_shares() -> None:
    h = CoreHarness(expected_drafts=(1.0, 0.9))
    h.seconds_per_step = 0.01
    h.submit("a", 5, max_tokens=60, seed=RIGHT, max_drafts=8)
    h.step()
    assert drafts_of(h.step()) == [8], "0.9 ** 8 is more than the cost of a position"


# --- costs ----------------------------------------------------------------------------------------------------------


def linear_model(base: float) -> StepTimeModel:
    model = StepTimeModel()
    for tokens in (1, 8, 2, 16, 4, 1, 3, 9, 5, 7) * 8:
        model.observe(tokens, 10 * tokens, base + 0.001 * tokens)
    return model


def test_cost_of_a_position_is_that_of_a_row_where_steps_have_no_base() -> None:
    times = DraftTimes()
    assert times.costs(StepTimeModel(), 1, 100, 2, is_pipelined=False).per_position == 0.1, "not fitted"
    costs = times.costs(linear_model(0.0), 32, 320, 2, is_pipelined=True)
    assert costs == pytest.approx((1.0, 1.0), abs=0.05)


def test_row_costs_what_its_steps_took_beyond_the_prediction() -> None:
    """A step takes 9 ms, and 10 ms from result to result. With a row with drafts it takes 1 ms, or 2 ms, more."""
    times, model = DraftTimes(), linear_model(0.008)
    for _ in range(40):
        times.observe(0.009, 0.010)
        times.observe_rows(1, 0.009, 0.012, is_ahead=False)
        times.observe_rows(4, 0.009, 0.014, is_ahead=True)
    assert times.costs(model, 1, 10, 2, is_pipelined=False) == pytest.approx((0.1, 0.2), abs=0.02)
    assert times.costs(model, 1, 10, 2, is_pipelined=True) == pytest.approx((0.1, 1.1), abs=0.02)
    assert times.costs(model, 1, 10, 3, is_pipelined=True).per_row == pytest.approx(2.1, abs=0.02)


def test_pause_of_the_machine_counts_as_one_step() -> None:
    times, model = DraftTimes(), linear_model(0.008)
    times.observe(0.009, 3600.0)
    times.observe_rows(1, 0.009, 3600.0, is_ahead=False)
    assert times.costs(model, 1, 10, 2, is_pipelined=False).per_row <= 1.1


@pytest.mark.parametrize("depth", [1, 2])
def test_waiting_for_results_is_a_cost_where_plans_are_made_ahead(depth: int) -> None:
    """The way between scheduler and worker takes 5 ms, a step 10 ms, and a row gains a quarter of a token."""
    h = CoreHarness(worker_num_blocks=512, worker_max_model_len=1024, pipeline_depth=depth)
    h.submit("a", 30, max_tokens=900, seed=1, max_drafts=1)
    while h.core.num_live:
        while h.plan():
            pass
        h.now += 0.010 if len(h.flights) > 1 else 0.015
        h.apply(step_seconds=0.010)
    late = [num for plan in h.plans[300:] for num in drafts_of(plan) if num]
    assert (len(late) > 100) is (depth == 1)


def test_time_to_make_drafts_is_a_cost_of_their_positions() -> None:
    times, model = DraftTimes(), linear_model(0.008)
    for _ in range(4):
        times.observe_drafts(8, 0.016)
    assert times.costs(model, 1, 10, 1, is_pipelined=False).per_position == pytest.approx(1 / 9 + 2 / 9, abs=0.03)


def test_time_to_make_drafts_is_no_time_of_the_step() -> None:
    """The worker needs 10 ms for each step, and 30 ms more for its drafts."""
    h = CoreHarness(worker_num_blocks=512, worker_max_model_len=256)
    h.submit("a", 20, max_tokens=60, seed=RIGHT, max_drafts=4)
    while h.core.num_live:
        h.plan()
        result = h.compute()
        drafting = 0.03 if any(result.num_drafted) else 0.0
        h.record(h.core.apply(replace(result, step_seconds=0.01 + drafting, draft_seconds=drafting), h.now))
    base, per_token, per_kv = h.core.snapshot().workers[0].step_time
    assert base + 5 * per_token + 100 * per_kv == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("seconds", [-0.1, 0.2, float("nan")])
def test_result_with_impossible_draft_seconds_is_refused(seconds: float) -> None:
    h = always()
    h.submit("a", 5, max_tokens=30, seed=0, max_drafts=4)
    h.plan()
    with pytest.raises(BadResult):
        h.core.apply(replace(h.compute(), step_seconds=0.1, draft_seconds=seconds), h.now)


# --- trials of many requests ----------------------------------------------------------------------------------------


def test_trials_of_many_requests_begin_one_after_the_other() -> None:
    h = CoreHarness(worker_num_blocks=512, worker_num_slots=32, worker_max_model_len=256, max_batch_size=32)
    h.seconds_per_step, h.seconds_per_token = 0.01, 0.0005
    for i in range(24):
        h.submit(f"r{i}", 10, max_tokens=150, seed=4 * i, max_drafts=8)  # drafts of these seeds are all wrong
    h.run()
    drafting = [len(drafts_of(plan)) - drafts_of(plan).count(0) for plan in h.plans]
    assert 0 < max(drafting) < 24
    tried = {row.slot for plan in h.plans for row in plan.chunks if row.num_drafts}
    assert len(tried) > 6


def test_drafts_in_vain_cost_a_small_share_of_all_tokens() -> None:
    h = CoreHarness(worker_num_blocks=512, worker_num_slots=32, worker_max_model_len=512, max_batch_size=16)
    h.seconds_per_step, h.seconds_per_token = 0.01, 0.001
    for i in range(16):
        h.submit(f"r{i}", 10, max_tokens=400, seed=4 * i, max_drafts=8)
    h.run()
    counters = h.core.snapshot().counters
    assert 0 < counters.spec_decode_num_draft_tokens < 0.04 * counters.generation_tokens


def test_budget_has_a_share_of_the_tokens_and_a_bound() -> None:
    budget = TrialBudget()
    budget.add(-10.0)
    owed = budget.tokens
    budget.earn(50, 4)
    assert budget.tokens - owed == pytest.approx(1.0), "0.5 % of 50 steps of 4 rows"
    budget.earn(50, 4)
    assert budget.tokens - owed == pytest.approx(1.0)
    budget.earn(5000, 64)
    assert budget.tokens == 6.0


def test_drafts_beside_more_streams_than_ever_measured() -> None:
    """A burst of short requests joins while a stream waits for its drafts; no step of their number was measured."""
    h = always(
        pipeline_depth=2, max_batch_size=128, worker_num_slots=128, worker_num_blocks=1024, target_batch_tokens=512
    )
    h.seconds_per_step, h.seconds_per_token = 0.01, 0.001
    for length in (2, 4, 1, 3, 2, 1, 4, 3, 2, 1):
        h.submit(f"teach{h.now}{len(h.plans)}", length, max_tokens=1)
        h.step()
    h.submit("drafting", 4, max_tokens=60, seed=RIGHT, max_drafts=4)
    h.step()
    assert drafts_of(h.plan()) != [0]
    requests = [h.submit(f"burst{number}", 1, max_tokens=20) for number in range(60)]
    h.plan()
    h.apply()
    plan = h.plan()
    assert plan is not None
    assert len(plan.decodes.slots) == 60
    assert drafts_of(plan) == [0]
    h.run()
    assert all(h.outputs(request.request_id) == answer(request) for request in requests)
