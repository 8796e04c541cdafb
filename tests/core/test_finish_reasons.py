"""How requests end, and what ending leaves behind, in examples to check by hand."""

from __future__ import annotations

from dataclasses import replace

from core.harness import Rig, answer, make_request

from lineclear.errors import DeadlineExceeded
from lineclear.scheduler.core.events import Failed, Finished, FinishReason


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
