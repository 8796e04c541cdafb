"""What a step has in it: prompts in chunks, decodes, and how many tokens, in examples to check by hand.

Blocks have 4 positions unless said.
"""

from __future__ import annotations

import pytest
from core.harness import Rig, answer

from lineclear.scheduler.core.events import Finished, FinishReason
from lineclear.scheduler.core.step_time_model import StepTimeModel


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


@pytest.mark.parametrize(("target", "prompt_tokens"), [(0.05, pytest.approx(49, abs=6)), (1e-9, 8)])
def test_the_inter_token_target_cuts_prompts_but_never_to_nothing(target: float, prompt_tokens: int) -> None:
    # At 1 ms a token, 50 ms hold 50 tokens, one of them the decode's. A target that cannot be met leaves prompts 8
    # tokens a step: slow, not stuck.
    rig = Rig(target_batch_tokens=256, inter_token_target_seconds=target, decode_stretch=1000.0, worker_num_blocks=512)
    rig.seconds_per_token = 0.001
    rig.submit("old", 20, max_tokens=100)
    for number, length in enumerate((3, 8, 7, 5, 6, 4, 2, 8, 1, 7)):
        rig.submit(f"teach{number}", length, max_tokens=1)
        rig.step()
    rig.submit("long", 200, max_tokens=1)
    assert [end - start for _, start, end in rig.rows(rig.step())] == [1, prompt_tokens]


@pytest.mark.parametrize(("decodes", "prompt_tokens"), [(1, 8), (11, 11), (20, 16)])
def test_prompts_get_as_many_tokens_as_there_are_decodes_within_bounds_whatever_they_cost(
    monkeypatch: pytest.MonkeyPatch, decodes: int, prompt_tokens: int
) -> None:
    monkeypatch.setattr(StepTimeModel, "more_within", lambda *_: 0.0)
    rig = Rig(target_batch_tokens=256, worker_num_blocks=512, worker_num_slots=32)
    for number in range(decodes):
        rig.submit(f"old{number}", 2, max_tokens=100)
    rig.step()
    rig.submit("long", 200, max_tokens=1)
    assert [end - start for _, start, end in rig.rows(rig.step())] == [*[1] * decodes, prompt_tokens]


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
    monkeypatch.setattr(StepTimeModel, "more_within", lambda model, s, t, kv, context: 5.0 if context < 100 else 0.0)
    rig = Rig(target_batch_tokens=64, worker_num_blocks=1024, worker_max_model_len=1024)
    prefix = [5 + i % 40 for i in range(800)]
    rig.submit("first", prefix, max_tokens=1)
    rig.run()
    rig.submit("old", 4, max_tokens=100)
    rig.step()
    rig.step()
    rig.submit("short", 8, max_tokens=1)  # the tokens that prompts get in any case
    rig.submit("behind", [*prefix, 1, 2, 3], max_tokens=1)
    rig.submit("later", 1, max_tokens=1)
    assert [(start, end) for _, start, end in rig.rows(rig.step())] == [(5, 6), (0, 8)]
    assert [(start, end) for _, start, end in rig.rows(rig.step())] == [(6, 7), (800, 803), (0, 1)]
