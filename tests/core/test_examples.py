"""What the scheduler does, one behaviour each, small enough to check by hand. Blocks have 4 positions unless said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core.rig import Rig, answer, make_request

from lineclear.errors import (
    CannotFit,
    DeadlineExceeded,
    DeviceOutOfMemory,
    Draining,
    DuplicateRequest,
    InternalError,
    NonFiniteLogits,
    PromptTooLong,
    QueueFull,
)
from lineclear.scheduler.scheduling.core import BadResult
from lineclear.scheduler.scheduling.events import Failed, Finished, FinishReason, Preempted
from lineclear.scheduler.scheduling.stepmodel import StepModel
from lineclear.wire.types import StepError, StepErrorKind

OUT_OF_MEMORY = StepErrorKind.OUT_OF_MEMORY


# --- steps ----------------------------------------------------------------------------------------------------------


def test_a_request_is_prefilled_once_and_then_decoded() -> None:
    rig = Rig()
    request = rig.submit("a", 5, max_tokens=3)
    rig.run()
    # The third output is sampled from position 6 and never computed itself.
    assert [rig.rows(plan) for plan in rig.plans] == [[(0, 0, 5)], [(0, 5, 6)], [(0, 6, 7)]]
    assert rig.outputs("a") == answer(request)


def test_long_prompts_are_cut_into_the_tokens_decodes_leave() -> None:
    rig = Rig(target_batch_tokens=8)
    rig.submit("short", 3, max_tokens=9)
    rig.step()
    long = rig.submit("long", 20, max_tokens=2)
    plans = [rig.step() for _ in range(4)]
    assert [rig.rows(plan) for plan in plans] == [
        [(0, 3, 4), (1, 0, 7)],
        [(0, 4, 5), (1, 7, 14)],
        [(0, 5, 6), (1, 14, 20)],
        [(0, 6, 7), (1, 20, 21)],
    ]
    assert rig.outputs("long") == answer(long)


def test_prefill_first_lets_prompts_go_before_decodes() -> None:
    rig = Rig(target_batch_tokens=8, order="prefill_first")
    rig.submit("short", 3, max_tokens=9)
    rig.step()
    rig.submit("long", 20, max_tokens=2)
    assert [rig.rows(rig.step()) for _ in range(3)] == [[(1, 0, 8)], [(1, 8, 16)], [(0, 3, 4), (1, 16, 20)]]


def test_the_next_step_is_planned_before_the_token_is_known() -> None:
    rig = Rig(pipeline_depth=3)
    rig.submit("a", 4, max_tokens=5)
    assert [rig.rows(rig.plan()) for _ in range(4)] == [[(0, 0, 4)], [(0, 4, 5)], [(0, 5, 6)], []]


def test_no_row_is_planned_past_max_tokens() -> None:
    rig = Rig(pipeline_depth=3)
    request = rig.submit("a", 4, max_tokens=2)
    rig.run()
    assert sum(len(plan.rows) for plan in rig.plans) == 2
    assert rig.outputs("a") == answer(request)
    assert rig.counters.wasted_samples == 0


def test_max_tokens_1_takes_one_step_and_no_block_for_the_output() -> None:
    rig = Rig(worker_num_blocks=1)
    rig.submit("a", 4, max_tokens=1)
    rig.run()
    assert [rig.rows(plan) for plan in rig.plans] == [[(0, 0, 4)]]
    end = rig.end("a")
    assert isinstance(end, Finished)
    assert (end.reason, end.record.completion_tokens) == (FinishReason.LENGTH, 1)


@pytest.mark.parametrize(("target", "prompt_tokens"), [(0.05, pytest.approx(49, abs=6)), (1e-9, 16)])
def test_the_inter_token_target_cuts_prompts_but_never_to_nothing(target: float, prompt_tokens: int) -> None:
    # At 1 ms a token, 50 ms hold 50 tokens, one of them the decode's. A target that cannot be met leaves prompts 16
    # tokens a step: slow, not stuck.
    rig = Rig(target_batch_tokens=256, inter_token_target_seconds=target, decode_stretch=1000.0, worker_num_blocks=512)
    rig.seconds_per_token = 0.001
    rig.submit("old", 20, max_tokens=100)
    for number, length in enumerate((3, 9, 12, 5, 14, 11, 2, 8, 16, 7)):
        rig.submit(f"teach{number}", length, max_tokens=1)
        rig.step()
    rig.submit("long", 200, max_tokens=1)
    assert [end - start for _, start, end in rig.rows(rig.step())] == [1, prompt_tokens]


def taught(decode_stretch: float = 2.0) -> Rig:
    """A rig whose model of steps has settled on 10 ms and 1 ms a token."""
    rig = Rig(target_batch_tokens=512, worker_num_blocks=512, worker_max_model_len=1024, decode_stretch=decode_stretch)
    rig.seconds_per_step, rig.seconds_per_token = 0.01, 0.001
    for number, length in enumerate((30, 9, 120, 5, 14, 60, 2, 80, 16, 7, 40, 25)):
        rig.submit(f"teach{number}", length, max_tokens=1)
        rig.step()
    return rig


@pytest.mark.parametrize(("stretch", "prompt_tokens"), [(2.0, 17), (4.0, 51), (100.0, 183)])
def test_a_prompt_makes_a_step_so_many_times_as_long_as_its_decodes(stretch: float, prompt_tokens: int) -> None:
    # Seven decodes alone take 17 ms; the inter-token target of 200 ms bounds it all.
    rig = taught(stretch)
    for number in range(7):
        rig.submit(f"old{number}", 4, max_tokens=100)
    rig.step()
    rig.step()
    rig.submit("long", 400, max_tokens=1)
    assert [end - start for _, start, end in rig.rows(rig.step())] == [*[1] * 7, pytest.approx(prompt_tokens, abs=4)]


def test_the_more_wait_for_a_first_token_the_longer_a_step_may_take() -> None:
    # One runs and six wait: a step may take seven times as long as its decode alone, 11 ms.
    rig = taught()
    rig.submit("old", 4, max_tokens=100)
    rig.step()
    rig.step()
    for number in range(6):
        rig.submit(f"new{number}", 50, max_tokens=1)
    assert sum(end - start for _, start, end in rig.rows(rig.step())) == pytest.approx(67, abs=4)


def test_who_would_begin_where_a_token_is_too_dear_for_this_step_joins_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # At its beginning the step has time for five tokens more, behind 800 positions for none.
    monkeypatch.setattr(StepModel, "more_within", lambda model, s, t, kv, context: 5.0 if context < 100 else 0.0)
    rig = Rig(target_batch_tokens=64, worker_num_blocks=1024, worker_max_model_len=1024)
    prefix = [5 + i % 40 for i in range(800)]
    rig.submit("first", prefix, max_tokens=1)
    rig.run()
    rig.submit("old", 4, max_tokens=100)
    rig.step()
    rig.step()
    rig.submit("short", 16, max_tokens=1)  # the tokens that prompts get in any case
    rig.submit("behind", [*prefix, 1, 2, 3], max_tokens=1)
    rig.submit("later", 1, max_tokens=1)
    assert [(start, end) for _, start, end in rig.rows(rig.step())] == [(5, 6), (0, 16)]
    assert [(start, end) for _, start, end in rig.rows(rig.step())] == [(6, 7), (800, 803), (0, 1)]


# --- ends -----------------------------------------------------------------------------------------------------------


def test_eos_ends_an_answer_and_is_part_of_it() -> None:
    first = answer(make_request("a", 5, max_tokens=9))
    rig = Rig()
    rig.submit("a", 5, max_tokens=9, eos=first[3])
    rig.run()
    end = rig.end("a")
    assert isinstance(end, Finished)
    assert (end.reason, end.matched_token_id) == (FinishReason.STOP_EOS, first[3])
    assert rig.outputs("a") == first[: first.index(first[3]) + 1]


def test_eos_exactly_at_max_tokens_is_eos_and_not_length() -> None:
    first = answer(make_request("a", 5, max_tokens=4))
    rig = Rig()
    rig.submit("a", 5, max_tokens=4, eos=first[3])
    rig.run()
    end = rig.end("a")
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.STOP_EOS


def test_a_stop_token_before_min_tokens_does_not_end_the_answer() -> None:
    first = answer(make_request("a", 5, max_tokens=9))
    rig = Rig()
    rig.submit("a", 5, max_tokens=9, eos=first[0], min_tokens=2)
    rig.run()
    assert len(rig.outputs("a")) > 2


def test_a_stop_token_of_the_request_is_named_as_such() -> None:
    plain = make_request("a", 5, max_tokens=9)
    token = answer(plain)[1]
    rig = Rig()
    sampling = replace(plain.sampling, stop_ids=(token,))
    rig.core.submit(replace(plain, sampling=sampling, stop_ids=frozenset({token})), 0.0)
    rig.run()
    end = rig.end("a")
    assert isinstance(end, Finished)
    assert (end.reason, end.matched_token_id) == (FinishReason.STOP_TOKEN, token)


def test_samples_planned_behind_an_end_are_wasted_and_counted() -> None:
    first = answer(make_request("a", 5, max_tokens=9))
    rig = Rig(pipeline_depth=3)
    rig.submit("a", 5, max_tokens=9, eos=first[0])
    for _ in range(3):
        rig.plan()
    while rig.flights:
        rig.apply()
    assert rig.outputs("a") == first[:1]
    assert rig.counters.wasted_samples == 2
    assert rig.core.snapshot().blocks_used == 0


def test_a_stop_string_ends_the_account_where_the_text_was_cut() -> None:
    rig = Rig()
    rig.submit("a", 5, max_tokens=9)
    for _ in range(4):
        rig.step()
    (end,) = rig.core.finish("a", 2, rig.now)
    assert isinstance(end, Finished)
    assert (end.reason, end.record.completion_tokens) == (FinishReason.STOP_STRING, 2)
    assert rig.core.finish("a", 2, rig.now) == []


def test_a_cancelled_request_gives_everything_back_while_it_is_in_flight() -> None:
    rig = Rig(pipeline_depth=2)
    rig.submit("a", 5, max_tokens=9)
    rig.plan()
    rig.cancel("a")
    assert rig.core.snapshot().blocks_used == 0
    assert rig.core.plan(0.0) is None
    rig.apply()
    assert rig.outputs("a") == []


def test_deadlines_end_requests_in_the_queue_and_while_running() -> None:
    rig = Rig(max_batch_size=1)
    rig.submit("runs", 5, max_tokens=50, deadline=2.0)
    rig.submit("waits", 5, deadline=1.0)
    rig.step()
    assert rig.core.next_deadline() == 1.0
    assert rig.core.expire(0.999) == []
    (first,) = rig.core.expire(1.0)
    assert isinstance(first, Failed)
    assert (first.request_id, type(first.error), str(first.error)) == (
        "waits",
        DeadlineExceeded,
        "the deadline passed in the queue",
    )
    (second,) = rig.core.expire(2.0)
    assert isinstance(second, Failed)
    assert str(second.error) == "the deadline passed while running"
    assert rig.core.next_deadline() is None
    assert rig.counters.requests_expired == 2


# --- the door -------------------------------------------------------------------------------------------------------


def test_the_queue_has_a_limit_in_requests() -> None:
    rig = Rig(max_queue_size=2)
    rig.submit("a", 1)
    rig.submit("b", 1)
    with pytest.raises(QueueFull) as caught:
        rig.submit("c", 1)
    assert caught.value.metadata == {"waiting": "2", "limit": "2"}
    rig.step()
    rig.submit("c", 1)


def test_the_queue_has_a_limit_in_tokens_but_takes_one_request_of_any_size() -> None:
    rig = Rig(max_queue_tokens=10)
    rig.submit("huge", 30)
    with pytest.raises(QueueFull):
        rig.submit("tiny", 1)
    rig.cancel("huge")
    rig.submit("six", 6)
    rig.submit("four", 4)
    with pytest.raises(QueueFull):
        rig.submit("tiny", 1)


def test_what_can_never_run_is_refused_at_the_door() -> None:
    rig = Rig(worker_num_blocks=2, worker_max_model_len=40)
    with pytest.raises(PromptTooLong):
        rig.submit("long", 38, max_tokens=3)
    with pytest.raises(CannotFit):
        rig.submit("big", 6, max_tokens=4)  # 9 positions, 3 blocks
    rig.submit("fits", 5, max_tokens=4)  # 8 positions, 2 blocks
    with pytest.raises(DuplicateRequest):
        rig.submit("fits", 1)
    assert rig.counters.requests_rejected == 3
    rig.run()


def test_draining_refuses_and_finishes_what_is_here() -> None:
    rig = Rig(strategy="fixed_size")
    rig.submit("a", 5)
    assert rig.step() is None  # one of eight
    rig.core.drain(rig.now)
    with pytest.raises(Draining):
        rig.submit("b", 5)
    rig.run()
    assert rig.core.snapshot().draining


# --- the prefix cache -----------------------------------------------------------------------------------------------


def test_the_same_prompt_again_hits_all_full_blocks_but_never_the_last_token() -> None:
    rig = Rig()
    prompt = list(range(8))
    rig.submit("a", prompt, max_tokens=1)
    rig.run()
    rig.submit("b", prompt, max_tokens=1)
    rig.run()
    # Eight tokens are two blocks; the second holds the last token, which must be computed to sample the next.
    assert rig.end("b").record.cached_tokens == 4
    rig.submit("c", [*prompt, 9], max_tokens=1)
    rig.run()
    assert rig.end("c").record.cached_tokens == 8
    assert (rig.counters.cached_tokens, rig.counters.looked_up_tokens) == (12, 25)
    assert rig.outputs("b") == rig.outputs("a")


def test_an_answer_is_cached_for_the_next_turn() -> None:
    rig = Rig()
    first = rig.submit("a", 6, max_tokens=8)
    rig.run()
    # 13 positions were computed (the last output never is): three full blocks.
    rig.submit("b", [*first.prompt, *rig.outputs("a"), 1, 2], max_tokens=1)
    rig.run()
    assert rig.end("b").record.cached_tokens == 12


def test_running_requests_share_what_is_computed_but_not_what_is_planned() -> None:
    rig = Rig(pipeline_depth=2)
    prompt = list(range(20))
    rig.submit("a", prompt, max_tokens=9)
    rig.plan()
    rig.submit("b", [*prompt, 5], max_tokens=9)
    rig.plan()
    rig.apply()
    rig.submit("c", [*prompt, 6], max_tokens=9)
    rig.plan()
    shared = {init.slot: len(init.blocks) for plan in rig.plans for init in plan.inits}
    assert shared == {0: 0, 1: 0, 2: 5}


def test_another_salt_misses() -> None:
    rig = Rig()
    prompt = list(range(9))
    for request_id, salt in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        rig.submit(request_id, prompt, max_tokens=1, cache_salt=salt)
        rig.run()
    assert [rig.end(i).record.cached_tokens for i in "abc"] == [0, 0, 8]


def test_the_cache_can_be_off_and_can_be_emptied() -> None:
    for rig, hits in ((Rig(prefix_cache=False), 0), (Rig(), 8)):
        prompt = list(range(9))
        for request_id in "ab":
            rig.submit(request_id, prompt, max_tokens=1)
            rig.run()
        assert rig.end("b").record.cached_tokens == hits
        rig.core.forget_prefixes()
        rig.submit("c", prompt, max_tokens=1)
        rig.run()
        assert rig.end("c").record.cached_tokens == 0


# --- too few blocks -------------------------------------------------------------------------------------------------


def test_the_cheapest_of_the_younger_yields_and_comes_back_with_the_same_answer() -> None:
    # Twelve blocks of one position. The middle one has computed most, so the youngest, with less to lose, yields.
    rig = Rig(worker_num_blocks=12, worker_block_size=1, prefix_cache=False)
    requests = [rig.submit("oldest", 2, max_tokens=8), rig.submit("large", 4, 6), rig.submit("small", 1, 6)]
    rig.run()
    preempted = [e.request_id for e in rig.events if isinstance(e, Preempted)]
    assert preempted
    assert preempted[0] == "small"
    assert "oldest" not in preempted
    for request in requests:
        assert rig.outputs(request.request_id) == answer(request)


def test_newest_yields_when_the_setting_says_so() -> None:
    rig = Rig(worker_num_blocks=12, worker_block_size=1, prefix_cache=False, victim="newest")
    rig.submit("oldest", 2, max_tokens=8)
    rig.submit("small", 1, max_tokens=6)
    rig.submit("large", 4, max_tokens=6)
    rig.run()
    assert next(e.request_id for e in rig.events if isinstance(e, Preempted)) == "large"


def test_a_request_preempted_often_is_pinned_and_then_left_alone() -> None:
    rig = Rig(worker_num_blocks=12, worker_block_size=1, prefix_cache=False, max_preemptions=1)
    for number in range(6):
        rig.submit(f"r{number}", 2, max_tokens=8)
    rig.run()
    counts = [rig.end(f"r{number}").record.preemptions for number in range(6)]
    assert max(counts) == 1
    assert counts[0] == 0


def test_max_preemptions_0_means_never() -> None:
    rig = Rig(worker_num_blocks=12, worker_block_size=1, prefix_cache=False, max_preemptions=0)
    for number in range(6):
        rig.submit(f"r{number}", 2, max_tokens=8)
    rig.run()
    assert rig.counters.preemptions == 0


def test_a_request_that_fills_the_pool_runs_when_it_is_alone() -> None:
    rig = Rig(worker_num_blocks=1, worker_block_size=4)
    request = rig.submit("a", 1, max_tokens=4)
    rig.run()
    assert rig.outputs("a") == answer(request)


def test_a_large_head_is_overtaken_a_bounded_number_of_times() -> None:
    rig = Rig(worker_num_blocks=10, max_bypasses=2, max_batch_size=3)
    rig.submit("running", 20, max_tokens=12)  # 5 of 10 blocks, later 8
    rig.step()
    rig.submit("large", 24, max_tokens=1)
    for number in range(5):
        rig.submit(f"small{number}", 1, max_tokens=1)
    rig.run()
    order = rig.started()
    assert order.index("large") - order.index("running") - 1 == 2
    assert order[:4] == ["running", "small0", "small1", "large"]


def test_max_bypasses_0_is_strictly_by_rank() -> None:
    rig = Rig(worker_num_blocks=10, max_bypasses=0, max_batch_size=3)
    rig.submit("running", 20, max_tokens=12)
    rig.step()
    rig.submit("large", 24, max_tokens=1)
    rig.submit("small", 1, max_tokens=1)
    rig.run()
    assert rig.started() == ["running", "large", "small"]


def test_rows_of_a_stay_that_ended_do_not_count_for_the_next() -> None:
    rig = Rig(worker_num_blocks=14, worker_block_size=1, pipeline_depth=3, target_batch_tokens=4)
    rig.submit("old", 1, max_tokens=12)
    rig.submit("gone", 1, max_tokens=12)
    rig.step()
    rig.submit("young", 9, max_tokens=1)
    assert rig.rows(rig.plan()) == [(0, 1, 2), (1, 1, 2), (2, 0, 2)]  # takes nine blocks and computes two positions
    assert rig.rows(rig.plan()) == [(0, 2, 3), (1, 2, 3)]  # "gone" is short of a block, and "young" yields
    rig.cancel("gone")
    cached = rig.core.snapshot().blocks_cached
    # Room again: it begins anew while the result of its first two positions is still on its way. When that comes, no
    # block of its new stay is known to be filled.
    assert rig.rows(rig.plan()) == [(0, 3, 4), (1, 0, 3)]
    rig.apply()
    rig.cancel("young")
    assert rig.core.snapshot().blocks_cached == cached


# --- orders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "expected_order"),
    [
        ("fifo", "abcd"),
        ("prefill_first", "abcd"),
        ("priority", "dabc"),
        ("shortest", "cbad"),
        ("deadline", "bdac"),
    ],
)
def test_each_order_serves_in_its_order(order: str, expected_order: str) -> None:
    rig = Rig(order=order, max_batch_size=1, ageing_seconds=30.0)
    rig.submit("a", 9, max_tokens=1)
    rig.submit("b", 6, max_tokens=1, deadline=100.0)
    rig.submit("c", 2, max_tokens=1)
    rig.submit("d", 20, max_tokens=1, priority=0, deadline=200.0)
    rig.run()
    assert "".join(rig.started()) == expected_order


def test_waiting_is_worth_priority() -> None:
    rig = Rig(order="priority", max_batch_size=1, ageing_seconds=1.0)
    rig.submit("patient", 2, max_tokens=1, priority=130)
    rig.now = 3.0
    rig.submit("important", 2, max_tokens=1, priority=128)
    rig.run()
    assert rig.started() == ["patient", "important"]


# --- strategies -----------------------------------------------------------------------------------------------------


def test_continuous_takes_whoever_comes_at_the_next_step() -> None:
    rig = Rig()
    rig.submit("a", 2, max_tokens=9)
    rig.step()
    rig.submit("b", 2, max_tokens=9)
    assert len(rig.rows(rig.step())) == 2


def test_an_idle_engine_waits_for_min_batch_size_or_the_timeout() -> None:
    rig = Rig(min_batch_size=2, batch_timeout_seconds=0.05)
    rig.now = 123456.789
    rig.submit("a", 2)
    assert rig.plan() is None
    assert rig.core.next_deadline() == 123456.789 + 0.05
    rig.now = 123456.789 + 0.05
    assert rig.step() is not None  # at the very moment, whatever the rounding
    assert rig.core.next_deadline() is None
    rig.run()
    rig.submit("b", 2)
    assert rig.plan() is None
    rig.submit("c", 2)
    assert len(rig.rows(rig.step())) == 2


def test_fixed_size_waits_for_a_full_batch_and_lets_nobody_join_it() -> None:
    rig = Rig(strategy="fixed_size", max_batch_size=3)
    for request_id in "ab":
        rig.submit(request_id, 2, max_tokens=2)
    assert rig.step() is None
    rig.submit("c", 2, max_tokens=5)
    rig.submit("d", 2)
    assert len(rig.rows(rig.step())) == 3
    for request_id in "ef":
        rig.submit(request_id, 2)
    while rig.core.num_live > 3:
        rig.step()
    assert rig.started() == ["a", "b", "c"]
    rig.run()
    assert rig.started() == ["a", "b", "c", "d", "e", "f"]


def test_a_fixed_batch_is_admitted_whole_even_if_its_first_members_end_before_the_last_begins() -> None:
    rig = Rig(strategy="fixed_size", max_batch_size=3, target_batch_tokens=4)
    for request_id in "abc":
        rig.submit(request_id, 4, max_tokens=1)
    rig.run()
    assert rig.started() == ["a", "b", "c"]


def test_a_place_left_by_a_cancelled_member_is_not_for_late_comers() -> None:
    rig = Rig(strategy="fixed_size", max_batch_size=3, target_batch_tokens=4)
    for request_id in "abc":
        rig.submit(request_id, 4, max_tokens=3)
    rig.step()
    rig.cancel("b")
    rig.cancel("c")
    rig.now = 1.0
    rig.submit("late", 1)
    while rig.core.num_live > 1:
        rig.step()
    assert rig.started() == ["a"]


def test_a_fixed_batch_begins_when_the_queue_refuses() -> None:
    rig = Rig(strategy="fixed_size", max_batch_size=8, max_queue_size=2)
    rig.submit("a", 2)
    rig.submit("b", 2)
    assert rig.step() is None
    with pytest.raises(QueueFull):
        rig.submit("c", 2)
    assert len(rig.rows(rig.step())) == 2


def test_dynamic_timeout_admits_groups() -> None:
    rig = Rig(strategy="dynamic_timeout", max_batch_size=4, batch_timeout_seconds=1.0)
    rig.submit("a", 2, max_tokens=50)
    assert rig.plan() is None
    assert rig.core.next_deadline() == 1.0
    rig.now = 1.0
    assert len(rig.rows(rig.step())) == 1
    rig.submit("b", 2, max_tokens=50)
    rig.submit("c", 2, max_tokens=50)
    assert len(rig.rows(rig.step())) == 1  # three slots are free, two wait
    rig.submit("d", 2, max_tokens=50)
    assert len(rig.rows(rig.step())) == 4


def test_adaptive_admits_what_keeps_the_target_and_more_when_the_queue_grows() -> None:
    # 5 ms a token and a target of 12 ms: two rows, or more as the queue presses.
    rig = Rig(strategy="adaptive", max_batch_size=8, inter_token_target_seconds=0.012, worker_num_blocks=256)
    rig.seconds_per_token = 0.005
    rig.submit("a", 3, max_tokens=60)
    for number in range(12):
        rig.submit(f"teach{number}", 1 + number % 5, max_tokens=1)
        rig.step()
    while rig.core.num_live > 1:
        rig.step()
    rig.submit("b", 1, max_tokens=60)
    rig.submit("c", 1, max_tokens=60)
    rig.step()
    rig.step()
    assert rig.core.snapshot().requests_running == 2
    for number in range(30):
        rig.submit(f"crowd{number}", 1, max_tokens=60)
    rig.step()
    assert rig.core.snapshot().requests_running == 8


# --- timers ---------------------------------------------------------------------------------------------------------


def test_a_full_pipeline_is_not_woken_by_a_timer_that_has_passed() -> None:
    rig = Rig(strategy="dynamic_timeout", max_batch_size=4, batch_timeout_seconds=1.0, pipeline_depth=1)
    for request_id in "abc":
        rig.submit(request_id, 2, max_tokens=9)
    rig.now = 1.0
    assert rig.plan() is not None
    rig.submit("d", 2)
    rig.cancel("a")  # now two slots are free and one waits, until 2.0
    rig.now = 2.5
    assert rig.plan() is None
    assert rig.core.next_deadline() is None
    rig.apply()
    assert len(rig.rows(rig.plan())) == 3


# --- the worker -----------------------------------------------------------------------------------------------------


def test_a_lost_worker_costs_time_and_nothing_else() -> None:
    rig = Rig(pipeline_depth=2)
    requests = [rig.submit(f"r{number}", 5 + number, max_tokens=8) for number in range(3)]
    for _ in range(3):
        rig.step()
    rig.plan()
    rig.lose()
    assert rig.plan() is None
    rig.join(num_blocks=16, block_size=8)
    rig.run()
    for request in requests:
        assert rig.outputs(request.request_id) == answer(request)
        assert rig.end(request.request_id).record.recoveries == 1


def test_who_does_not_fit_the_next_worker_fails() -> None:
    rig = Rig()
    rig.submit("large", 30, max_tokens=10)
    rig.submit("small", 3, max_tokens=2)
    rig.step()
    rig.join(num_blocks=2)
    end = rig.end("large")
    assert isinstance(end, Failed)
    assert isinstance(end.error, CannotFit)
    rig.run()
    assert isinstance(rig.end("small"), Finished)


def test_out_of_memory_halves_the_budget_until_it_fits_and_doubles_it_again() -> None:
    rig = Rig(target_batch_tokens=16, worker_num_blocks=300, worker_max_model_len=1200)
    rig.submit("old", 2, max_tokens=1000)
    for budget in (16, 8, 4):
        for _ in range(40):
            rig.step()  # all get well past the place of the last time: nobody is a suspect any more
        rig.submit(f"long{budget}", 40, max_tokens=1)
        rig.step()
        plan = rig.plan()
        assert plan is not None
        assert sum(row.num_tokens for row in plan.rows) == budget
        assert rig.core.fail_step(StepError(rig.epoch, plan.step, OUT_OF_MEMORY), rig.now) == []
        rig.lose()
        rig.join()
    budgets = []
    for number in range(450):
        if number % 40 == 0:
            rig.submit(f"more{number}", 100, max_tokens=1)
        plan = rig.step()
        assert plan is not None
        budgets.append(sum(row.num_tokens for row in plan.rows))
    assert max(budgets[:200]) == 2
    assert max(budgets[200:400]) == 4
    assert max(budgets[400:]) == 8


def test_out_of_memory_alone_fails_the_request() -> None:
    rig = Rig()
    rig.submit("huge", 30)
    plan = rig.plan()
    assert plan is not None
    (end,) = rig.core.fail_step(StepError(rig.epoch, plan.step, OUT_OF_MEMORY), rig.now)
    assert isinstance(end, Failed)
    assert isinstance(end.error, DeviceOutOfMemory)


def test_a_failed_step_that_is_not_the_oldest_says_nothing() -> None:
    rig = Rig()
    rig.submit("a", 3)
    plan = rig.plan()
    assert plan is not None
    assert rig.core.fail_step(StepError(rig.epoch, plan.step + 1, OUT_OF_MEMORY), rig.now) == []
    assert rig.core.num_live == 1


# --- results that cannot be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"step": 2},
        {"epoch": 7},
        {"tokens": ()},
        {"tokens": (1, 2)},
        {"logprobs": (None, None)},
        {"bad_rows": frozenset({1})},
        {"bad_rows": frozenset({-1})},
        {"step_seconds": float("nan")},
        {"step_seconds": float("inf")},
        {"step_seconds": -0.001},
    ],
    ids=str,
)
def test_a_result_that_cannot_be_is_refused_whole(change: dict[str, object]) -> None:
    rig = Rig()
    request = rig.submit("a", 3)
    rig.plan()
    good = rig.compute()
    before = rig.core.snapshot()
    with pytest.raises(BadResult):
        rig.core.apply(replace(good, **change), rig.now)
    assert rig.core.snapshot() == before
    rig.core.check()
    rig.core.apply(good, rig.now)
    with pytest.raises(BadResult):
        rig.core.apply(good, rig.now)  # twice
    rig.run()
    assert isinstance(rig.end("a"), Finished)
    assert answer(request)[1:] == rig.outputs("a")


@pytest.mark.parametrize("token", [-1, 97, 2**31 - 1])
def test_a_token_out_of_the_vocabulary_fails_its_request_only(token: int) -> None:
    rig = Rig()
    rig.submit("a", 3)
    neighbour = rig.submit("b", 3)
    rig.plan()
    rig.apply(tokens=(token, answer(neighbour)[0]))
    end = rig.end("a")
    assert isinstance(end, Failed)
    assert isinstance(end.error, InternalError)
    rig.run()
    assert rig.outputs("b") == answer(neighbour)


def test_blocks_of_a_bad_row_are_zeroed_before_reuse_and_never_shared() -> None:
    prompt = list(range(9))
    rig = Rig(worker_num_blocks=4, is_bad=lambda context: len(context) == 11)
    rig.submit("a", prompt, max_tokens=6)
    rig.submit("b", 2, max_tokens=1)
    for _ in range(3):
        rig.step()
    end = rig.end("a")
    assert isinstance(end, Failed)
    assert isinstance(end.error, NonFiniteLogits)
    assert len(rig.outputs("a")) == 2
    dirty = {block for plan in rig.plans for row in plan.rows if row.slot == 0 for block in row.new_blocks}
    rig.submit("c", prompt, max_tokens=2)
    plan = rig.step()
    assert plan is not None
    assert plan.inits[0].blocks == ()
    taken = set(plan.rows[0].new_blocks)
    assert set(plan.zero_blocks) == taken & dirty != set()


def test_a_dirty_block_that_another_shares_is_zeroed_when_the_last_lets_go() -> None:
    prompt = list(range(8))
    rig = Rig(worker_num_blocks=8, is_bad=lambda context: context[-1] == 90)
    rig.submit("clean", [*prompt, 1], max_tokens=6)
    rig.step()
    rig.submit("bad", [*prompt, 90], max_tokens=6)
    rig.step()  # shares the two blocks of the prompt, and fails
    assert isinstance(rig.end("bad"), Failed)
    rig.cancel("clean")
    rig.submit("next", 30, max_tokens=1)
    plan = rig.step()
    assert plan is not None
    assert {0, 1} <= set(plan.zero_blocks)


def test_blocks_left_with_rows_in_flight_are_zeroed_before_reuse_until_the_rows_prove_finite() -> None:
    bad: list[bool] = [False]
    rig = Rig(worker_num_blocks=4, pipeline_depth=2, max_batch_size=1, is_bad=lambda context: bad[0])
    for turn, dirty in enumerate((False, True)):
        rig.submit(f"a{turn}", 5, max_tokens=8)
        rig.plan()
        (begun,) = rig.plans[-1].chunks
        rig.apply()
        rig.plan()
        rig.cancel(f"a{turn}")  # while its second step is in flight
        bad[0] = dirty
        rig.apply()
        bad[0] = False
        rig.submit(f"b{turn}", [5 * i for i in range(14)], max_tokens=1)  # takes all four blocks
        plan = rig.plan()
        assert plan is not None
        assert set(plan.zero_blocks) == ({begun.new_blocks[1]} if dirty else set())
        rig.run()


def test_a_block_whose_rows_are_still_in_flight_is_zeroed_at_once() -> None:
    rig = Rig(worker_num_blocks=4, pipeline_depth=2, max_batch_size=1)
    rig.submit("a", 5, max_tokens=8)
    rig.plan()
    rig.cancel("a")
    rig.submit("b", [5 * i for i in range(14)], max_tokens=1)
    plan = rig.plan()
    assert plan is not None
    assert sorted(plan.zero_blocks) == [0, 1]
    rig.run()
