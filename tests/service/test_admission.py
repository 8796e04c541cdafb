"""Who is let in: bounds by request, token and tenant, refusals that cost nothing and say when to come back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.serving import TOKENIZER, error_of, serving, text_request

from lineclear.errors import QueueFull
from lineclear.grpc_status import from_status
from lineclear.scheduler.requests.queue_quota import QueueQuota, QuotaLimits
from lineclear.v1 import inference_pb2 as pb

IDS = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def room(clock: Clock | None = None, **limits: int) -> QueueQuota:
    return QueueQuota(QuotaLimits(**{"requests": 100, "tokens": 1000, **limits}), clock or Clock())


# --- when to come back ------------------------------------------------------------------------------------------------


def test_half_the_queue_at_the_rate_of_the_last_seconds() -> None:
    clock = Clock()
    waiting = room(clock)
    for _ in range(60):
        waiting.reserve("")
        waiting.add_tokens("", 10)
    for _ in range(5):  # four a second for five seconds
        for _ in range(4):
            waiting.release("", 10, began=True)
        clock.now += 1
    # 40 wait, 20 left in the 5 seconds and the one that is running: 40 / 20 * 6 / 2.
    assert waiting.retry_after_seconds() == pytest.approx(6.0)


def test_long_prompts_count_by_their_tokens() -> None:
    clock = Clock()
    waiting = room(clock, tokens=10_000)
    for tokens in (10, 10, 500):
        waiting.reserve("")
        waiting.add_tokens("", tokens)
    for _ in range(2):
        waiting.release("", 10, began=True)
    # By requests it would be 1 / 2 of a second; by tokens 500 / 20 * 1 / 2.
    assert waiting.retry_after_seconds() == pytest.approx(12.5)


def test_what_lies_long_back_says_nothing_and_no_figure_is_absurd() -> None:
    clock = Clock()
    waiting = room(clock, requests=10_000)
    for _ in range(10_000):
        waiting.reserve("")
    assert waiting.retry_after_seconds() == 1.0
    waiting.release("", 0, began=True)
    assert waiting.retry_after_seconds() == 60.0
    clock.now += 12
    assert waiting.retry_after_seconds() == 1.0
    for _ in range(9_999):
        waiting.release("", 0, began=True)
    assert waiting.retry_after_seconds() == 0.05


def test_those_who_gave_up_are_no_sign_of_speed() -> None:
    waiting = room()
    for _ in range(10):
        waiting.reserve("")
    for _ in range(5):
        waiting.release("", 0, began=False)
    assert waiting.retry_after_seconds() == 1.0


# --- bounds -----------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 40), st.booleans()), max_size=80))
def test_no_bound_is_ever_passed_and_the_counts_return_to_nothing(moves: list[tuple[str, int, bool]]) -> None:
    waiting = room(requests=9, tokens=60, requests_per_tenant=4, tokens_per_tenant=30)
    inside: list[tuple[str, int]] = []
    for tenant, tokens, leaves in moves:
        if leaves and inside:
            who, weight = inside.pop(0)
            waiting.release(who, weight, began=bool(tokens % 2))
            continue
        mine = [weight for who, weight in inside if who == tenant]
        total = sum(weight for _, weight in inside)
        try:
            waiting.reserve(tenant)
        except QueueFull:
            assert len(inside) >= 9 or len(mine) >= 4 or total >= 60
            continue
        assert len(inside) < 9
        assert len(mine) < 4
        try:
            waiting.add_tokens(tenant, tokens)
        except QueueFull:
            assert total + tokens > 60 or sum(mine) + tokens > 30
            waiting.release(tenant, 0, began=False)
            continue
        # One that is alone may be longer than the bound.
        assert total + tokens <= 60 or not total
        assert sum(mine) + tokens <= 30 or not sum(mine)
        inside.append((tenant, tokens))
        assert len(waiting) == len(inside)
    for who, weight in inside:
        waiting.release(who, weight, began=True)
    assert (len(waiting), waiting.num_tenants) == (0, 0)


def tenant(name: str) -> dict[str, Any]:
    return {"metadata": (("x-tenant-id", name),)}


async def test_one_tenant_does_not_fill_the_queue(tmp_path: Path) -> None:
    async with serving(tmp_path, max_queue_size=10, max_queue_size_per_tenant=2) as s:
        mine = [s.generate(IDS, **tenant("a")) for _ in range(2)]
        await s.engine.next_request(2)
        error = await error_of(s.generate(IDS, **tenant("a")))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert error.metadata == {"waiting_of_tenant": "2", "limit_of_tenant": "2"}
        others = [s.generate(IDS, **tenant("b")), s.generate(IDS)]
        await s.engine.next_request(4)
        s.engine.start(s.engine.submitted[0].request_id)
        again = s.generate(IDS, **tenant("a"))
        await s.engine.next_request(5)
        for call in (*mine, *others, again):
            call.cancel()
        await s.idle()
        assert (len(s.service._quota), s.service._quota.num_tenants) == (0, 0)


async def test_the_core_is_told_tenants_apart_and_no_names(tmp_path: Path) -> None:
    async with serving(tmp_path) as s:
        calls = [s.generate(IDS, **tenant("acme")), s.generate(IDS, **tenant("acme")), s.generate(IDS)]
        await s.engine.next_request(3)
        other = s.generate(IDS, **tenant("other"))
        await s.engine.next_request(4)
        shares = Counter(request.tenant for request in s.engine.submitted)
        assert sorted(shares.values()) == [1, 1, 2]
        assert shares[""] == 1
        assert not any("acme" in share for share in shares)
        for call in (*calls, other):
            call.cancel()
        await s.idle()


async def test_tokens_of_all_and_of_one_tenant_are_bounded(tmp_path: Path) -> None:
    limits = {"max_queue_tokens": 10, "max_queue_tokens_per_tenant": 5}
    async with serving(tmp_path, **limits) as s:
        calls = [s.generate(IDS, **tenant("a"))]
        await s.engine.next_request(1)
        error = await error_of(s.generate(IDS, **tenant("a")))
        assert error.metadata == {"waiting_tokens_of_tenant": "3", "limit_tokens_of_tenant": "5"}
        calls += [s.generate(IDS, **tenant(name)) for name in "bc"]
        await s.engine.next_request(3)
        error = await error_of(s.generate(IDS, **tenant("d")))
        assert error.metadata == {"waiting_tokens": "9", "limit_tokens": "10"}
        assert len(s.engine.submitted) == 3
        for call in calls:
            call.cancel()
        await s.idle()


async def test_a_refusal_looks_at_nothing_large(tmp_path: Path) -> None:
    """Not even at whether the request is right: that would cost."""
    long = text_request("x" * 2000, sampling={"top_p": 7.0})

    async with serving(tmp_path, max_queue_size=1, max_prompt_bytes=100) as s:
        first = s.generate(IDS)
        await s.engine.next_request(1)
        assert (await error_of(s.generate(long))).reason == "QUEUE_FULL"
        stats = await s.stub.GetStats(pb.GetStatsRequest())
        assert stats.totals.requests_rejected == 1
        first.cancel()


async def test_a_small_request_that_is_wrong_does_not_wait_for_room_to_hear_it(tmp_path: Path) -> None:
    """By Generate, in a Session and by Submit; and it is not counted as one that found no room."""
    wrong = text_request(sampling={"top_p": 7.0})

    async with serving(tmp_path, max_queue_size=1) as s:
        first = s.generate(IDS)
        await s.engine.next_request(1)
        for call in (s.generate(wrong), s.stub.Submit(pb.SubmitRequest(request=wrong))):
            error = await error_of(call)
            assert (error.reason, [v.field for v in error.violations]) == ("INVALID_REQUEST", ["sampling.top_p"])
        session = s.stub.Session()
        await session.write(pb.SessionRequest(submits=[pb.SubmitCommand(handle=1, request=wrong)]))
        assert from_status((await session.read()).events[0].error).reason == "INVALID_REQUEST"
        session.cancel()
        assert (await error_of(s.generate(text_request()))).reason == "QUEUE_FULL"
        stats = await s.stub.GetStats(pb.GetStatsRequest())
        assert stats.totals.requests_rejected == 1
        first.cancel()


async def test_an_invalid_request_leaves_no_trace(tmp_path: Path) -> None:
    async with serving(tmp_path, max_queue_size=1) as s:
        for _ in range(3):
            assert (await error_of(s.generate(text_request(sampling={"top_p": 7.0})))).code == "INVALID_ARGUMENT"
            assert (await error_of(s.generate(text_request("x" * 600)))).reason == "PROMPT_TOO_LONG"
        s.engine.answer = lambda request: TOKENIZER.encode_sealed("ok")
        assert [r async for r in s.generate()][-1].finished.finish_reason == pb.FINISH_REASON_LENGTH
        assert len(s.service._quota) == 0
