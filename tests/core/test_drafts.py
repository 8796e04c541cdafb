"""Rows with drafts: their plans, when they end, and when they gain too little. The toy worker drafts by the seed."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest
from core.harness import CoreHarness, answer, make_request

from lineclear.scheduler.core.drafts import DraftCosts
from lineclear.scheduler.core.inflight_step import kv_of_drafts
from lineclear.scheduler.core.sequence import Sequence
from lineclear.scheduler.core.step_time_model import StepTimeModel
from lineclear.wire.messages import StepPlan, StepResult

RIGHT, HALF_RIGHT, WRONG = 3, 1, 4  # seeds by their share of drafts that are right


def drafts_of(plan: StepPlan | None) -> list[int]:
    return [] if plan is None else [row.num_drafts for row in plan.chunks]


def test_drafts_attend_to_all_positions_up_to_their_own() -> None:
    assert kv_of_drafts(5, 3) == 6 + 7 + 8


def serve(seed: int, *, others: int = 0, per_token: float = 1e-5, max_tokens: int = 120) -> CoreHarness:
    """Serve a request with drafts, and others without, by a worker with steps of 10 ms and more."""
    h = CoreHarness(worker_num_blocks=512, worker_num_slots=32, worker_max_model_len=512)
    h.seconds_per_step, h.seconds_per_token = 0.01, per_token
    h.submit("drafting", 30, max_tokens=max_tokens, seed=seed, max_drafts=8)
    for i in range(others):
        h.submit(f"plain{i}", 10 + i, max_tokens=max_tokens, seed=1)
    h.run()
    return h


def test_drafts_that_are_accepted_go_on() -> None:
    h = serve(RIGHT)
    assert [sum(drafts_of(plan)) for plan in h.plans[1:-2]] == [4] + [8] * (len(h.plans) - 4), "the first is a trial"


def test_number_of_drafts_follows_the_share_that_is_accepted() -> None:
    rows = [sum(drafts_of(plan)) for plan in serve(HALF_RIGHT, per_token=0.002, max_tokens=400).plans]
    assert 1 <= mean(filter(None, rows[20:])) <= 4


def test_drafts_that_are_rejected_are_tried_seldom() -> None:
    h = serve(WRONG, max_tokens=400, per_token=0.001)
    rows = [i for i, plan in enumerate(h.plans) if any(drafts_of(plan))]
    assert max(rows) > 100, "it is tried again"
    assert h.end("drafting").stats.drafted_tokens < 0.25 * 400, "of which each costs less than a tenth of a token"


def test_no_drafts_where_a_position_costs_as_much_as_a_row() -> None:
    h = serve(RIGHT, others=15, per_token=0.05)
    rows = [plan for plan in h.plans[20:] if any(drafts_of(plan))]
    assert rows == []


@pytest.mark.parametrize(("num_rows", "has_drafts"), [(64, True), (65, False)])
def test_no_drafts_above_a_batch_size(num_rows: int, has_drafts: bool) -> None:
    h = CoreHarness(worker_num_blocks=1024, worker_num_slots=128, max_batch_size=128, worker_max_model_len=256)
    h.seconds_per_step, h.seconds_per_token = 0.05, 1e-5
    for i in range(num_rows - 1):
        h.submit(f"plain{i}", 1 + i % 3, max_tokens=60)
    for _ in range(20):
        h.step()
    h.submit("drafting", 4, max_tokens=30, seed=RIGHT, max_drafts=4)
    assert any(any(drafts_of(h.step())) for _ in range(8)) is has_drafts


def test_other_requests_do_not_wait_for_drafts() -> None:
    h = serve(RIGHT, others=3)
    slots = {row.slot for plan in h.plans for row in plan.chunks if row.num_drafts}
    assert len(slots) == 1
    assert all(len(plan.decodes.slots) >= 3 for plan in h.plans[5:20])


def test_tries_end_at_the_first_rejected_draft() -> None:
    costs, sequence = DraftCosts(), Sequence(make_request("a", 5, max_drafts=8), (0.0, 1), 0.0)
    for num_accepted, hits, tries in ((8, 8.0, 8.0), (0, 7.0, 8.0), (3, 9.125, 11.0)):
        costs.observe_row(sequence, 8, 8, num_accepted)
        assert (sequence.draft_hits, sequence.draft_tries) == (hits, tries)


def test_drafts_that_the_worker_did_not_find_cost_nothing() -> None:
    costs, sequence = DraftCosts(), Sequence(make_request("a", 5, max_drafts=8), (0.0, 1), 0.0)
    costs.credit, costs.per_draft = 0.0, 0.25
    costs.observe_row(sequence, 8, 2, 2)
    assert costs.credit == 6 * 0.25 + 2
    assert (sequence.draft_hits, sequence.draft_tries) == (2.0, 2.0)


def linear_model(base: float) -> StepTimeModel:
    model = StepTimeModel()
    for tokens in (1, 8, 2, 16, 4, 1, 3, 9, 5, 7) * 8:
        model.observe(tokens, 10 * tokens, base + 0.001 * tokens)
    return model


def observe(costs: DraftCosts, result: StepResult, seconds: float, *, has_drafts: bool) -> None:
    for _ in range(60):
        costs.observe_step(result, seconds, has_drafts=has_drafts)


def test_draft_costs_a_token_where_steps_have_no_base() -> None:
    costs = DraftCosts()
    assert costs.of_row(StepTimeModel(), 4, 100, 0.0) == (0.0, 0.1), "not measured"
    assert costs.of_row(StepTimeModel(), 5, 100, 0.0)[0] == float("inf"), "not measured, and many rows"
    assert costs.of_row(linear_model(0.0), 32, 320, 1.0) == pytest.approx((1.0, 1.0), abs=0.05)


def test_row_costs_what_its_steps_take_beyond_the_prediction() -> None:
    """A step takes 9 ms, and 10 ms from result to result; with drafts 12 ms. A pause counts as one step."""
    costs, model, step = DraftCosts(), linear_model(0.008), StepResult(1, 1, (), step_seconds=0.009)
    observe(costs, step, 0.010, has_drafts=False)
    observe(costs, step, 0.012, has_drafts=True)
    assert costs.of_row(model, 1, 10, 0.0) == pytest.approx((0.2, 0.1), abs=0.02)
    assert costs.of_row(model, 1, 10, 2.0)[0] == pytest.approx(2.2, abs=0.02)
    observe(costs, step, 3600.0, has_drafts=True)
    assert costs.of_row(model, 1, 10, 0.0)[0] <= 1.0


def test_time_to_make_drafts_is_a_cost_of_their_positions() -> None:
    costs, model = DraftCosts(), linear_model(0.008)
    made = StepResult(1, 1, (), step_seconds=0.03, num_drafted=(8,), draft_seconds=0.016)
    observe(costs, made, 0.03, has_drafts=True)
    assert costs.of_row(model, 1, 10, 0.0)[1] == pytest.approx(1 / 9 + 2 / 9, abs=0.03)


def test_time_to_make_drafts_is_no_time_of_the_step() -> None:
    """The worker needs 10 ms for each step, and 30 ms more for its drafts."""
    h = CoreHarness(worker_num_blocks=512, worker_max_model_len=256, adaptive_drafts=False)
    h.submit("a", 20, max_tokens=60, seed=RIGHT, max_drafts=4)
    while h.core.num_live:
        h.plan()
        result = h.compute()
        drafting = 0.03 if any(result.num_drafted) else 0.0
        h.record(h.core.apply(replace(result, step_seconds=0.01 + drafting, draft_seconds=drafting), h.now))
    base, per_token, per_kv = h.core.snapshot().workers[0].step_time
    assert base + 5 * per_token + 100 * per_kv == pytest.approx(0.01, rel=0.1)


def test_trials_of_many_requests_begin_one_after_the_other() -> None:
    h = serve_wrong(24)
    drafting = [len(drafts_of(plan)) - drafts_of(plan).count(0) for plan in h.plans]
    assert 0 < max(drafting) < 24
    assert len({row.slot for plan in h.plans for row in plan.chunks if row.num_drafts}) > 6


def test_drafts_in_vain_cost_a_small_share_of_all_tokens() -> None:
    counters = serve_wrong(16).core.snapshot().counters
    assert 0 < counters.spec_decode_num_draft_tokens < 0.04 * counters.generation_tokens


def serve_wrong(num_requests: int) -> CoreHarness:
    """Serve requests whose drafts are all wrong."""
    h = CoreHarness(worker_num_blocks=1024, worker_num_slots=32, worker_max_model_len=512, max_batch_size=32)
    h.seconds_per_step, h.seconds_per_token = 0.01, 0.001
    for i in range(num_requests):
        h.submit(f"r{i}", 10, max_tokens=400, seed=4 * i, max_drafts=8)
    h.run()
    return h


def test_credit_has_a_share_of_the_rows_and_a_bound() -> None:
    costs = DraftCosts()
    costs.credit = 0.0
    costs.earn(50)
    assert costs.credit == 0.5
    costs.earn(5000)
    assert costs.credit == 6.0


def test_drafts_beside_more_streams_than_ever_measured() -> None:
    """A burst of short requests joins while a stream waits for its drafts; no step of their number was measured."""
    h = CoreHarness(
        adaptive_drafts=False,
        pipeline_depth=2,
        max_batch_size=128,
        worker_num_slots=128,
        worker_num_blocks=1024,
        target_batch_tokens=512,
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
