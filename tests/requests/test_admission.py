"""Admission quota: limits by request, token and tenant, and retry hints of rejections."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.answers import answered, invalid_fields, of_tenant
from support.serving import TOKENIZER, Serving, error_of, serving, text_request
from support.session_driver import Caller, submit

from lineclear.errors import QueueFull
from lineclear.scheduler.core.policies import share_of
from lineclear.scheduler.requests.tenant_limits import QueueLimiter, QueuePlace
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import inference_pb2 as pb

IDS = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def new_quota(clock: Clock | None = None, **limits: int) -> QueueLimiter:
    settings = SchedulerSettings(**{"max_queue_size": 100, "max_queue_tokens": 1000, **limits})
    return QueueLimiter(settings, clock or Clock())


def places_of(quota: QueueLimiter, count: int, tokens: int = 0) -> list[QueuePlace]:
    """Return the places of `count` requests with `tokens` each."""
    places = [quota.reserve("") for _ in range(count)]
    for place in places:
        place.add_tokens(tokens)
    return places


def test_retry_hint_is_half_the_queue_at_the_recent_rate() -> None:
    clock = Clock()
    quota = new_quota(clock)
    places = places_of(quota, 60, tokens=10)
    for _ in range(5):  # four a second for five seconds
        for _ in range(4):
            places.pop().release(started=True)
        clock.now += 1
    # 40 wait; 20 started within 5 full seconds and the current one: 40 / 20 * 6 / 2.
    assert quota.retry_after_seconds() == pytest.approx(6.0)


def test_retry_hint_counts_prompt_tokens() -> None:
    quota = new_quota(max_queue_tokens=10_000)
    short, _ = places_of(quota, 2, tokens=10), places_of(quota, 1, tokens=500)
    for place in short:
        place.release(started=True)
    # By requests 1 / 2 of a second; by tokens 500 / 20 * 1 / 2.
    assert quota.retry_after_seconds() == pytest.approx(12.5)


def test_retry_hint_bounds() -> None:
    clock = Clock()
    quota = new_quota(clock, max_queue_size=10_000)
    places = places_of(quota, 10_000)
    ended = places.pop()
    ended.release(started=False)
    ended.release(started=True)  # no effect
    assert quota.retry_after_seconds() == 1.0
    places.pop().release(started=True)
    assert quota.retry_after_seconds() == 60.0
    clock.now += 12
    assert quota.retry_after_seconds() == 1.0
    for place in places:
        place.release(started=True)
    assert quota.retry_after_seconds() == 0.05


@settings(max_examples=60, deadline=None)
@given(moves=st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 40), st.booleans()), max_size=80))
def test_no_limit_is_exceeded_and_counts_return_to_zero(moves: list[tuple[str, int, bool]]) -> None:
    per_tenant = {"max_queue_size_per_tenant": 4, "max_queue_tokens_per_tenant": 30}
    quota = new_quota(max_queue_size=9, max_queue_tokens=60, **per_tenant)
    queue: list[tuple[str, int, QueuePlace]] = []
    for tenant, tokens, ends in moves:
        if ends and queue:
            queue.pop(0)[2].release(started=bool(tokens % 2))
            continue
        own = [count for name, count, _ in queue if name == tenant]
        total = sum(count for _, count, _ in queue)
        try:
            place = quota.reserve(tenant)
        except QueueFull:
            assert len(queue) >= 9 or len(own) >= 4 or total >= 60
            continue
        assert len(queue) < 9
        assert len(own) < 4
        try:
            place.add_tokens(tokens)
        except QueueFull:
            assert total + tokens > 60 or sum(own) + tokens > 30
            place.release(started=False)
            continue
        # A single prompt may exceed the limit.
        assert total + tokens <= 60 or not total
        assert sum(own) + tokens <= 30 or not sum(own)
        queue.append((tenant, tokens, place))
        assert len(quota) == len(queue)
    for _, _, place in queue:
        place.release(started=True)
    assert (len(quota), quota.tenants()) == (0, ())


async def test_one_tenant_does_not_fill_the_queue(tmp_path: Path) -> None:
    async with serving(tmp_path, max_queue_size=10, max_queue_size_per_tenant=2) as s:
        calls = [s.generate(IDS, **of_tenant("a")) for _ in range(2)]
        await s.engine.next_request(2)
        error = await error_of(s.generate(IDS, **of_tenant("a")))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert error.metadata == {"waiting_of_tenant": "2", "limit_of_tenant": "2"}
        calls += [s.generate(IDS, **of_tenant("b")), s.generate(IDS)]
        await s.engine.next_request(4)
        s.engine.start(s.engine.submitted[0].request_id)
        calls.append(s.generate(IDS, **of_tenant("a")))
        await s.engine.next_request(5)
        for call in calls:
            call.cancel()
        await s.idle()
        assert (len(s.service.quota), s.service.quota.tenants()) == (0, ())


async def test_core_gets_hashed_tenants(s: Serving) -> None:
    calls = [s.generate(IDS, **of_tenant(tenant)) for tenant in ("acme", "acme", "other", "")]
    await s.engine.next_request(len(calls))
    shares = Counter(request.tenant for request in s.engine.submitted)
    assert sorted(shares.values()) == [1, 1, 2]
    assert shares[""] == 1
    assert not any("acme" in share for share in shares)


def named(handle: int, tenant: str) -> pb.SessionRequest:
    return pb.SessionRequest(submits=[pb.SubmitCommand(handle=handle, request=IDS, tenant=tenant)])


async def test_session_names_a_tenant_per_request(tmp_path: Path) -> None:
    async with serving(tmp_path, max_queue_size_per_tenant=2) as s:
        caller = Caller(s, **of_tenant("a"))
        await caller.send(named(1, "b"), named(2, "b"), named(3, "b"), named(4, ""), named(5, "a"), named(6, "a"))
        await caller.until(lambda: len(caller.failed) == 2)
        assert {handle: error.reason for handle, error in caller.failed.items()} == dict.fromkeys((3, 6), "QUEUE_FULL")
        await s.engine.next_request(4)
        assert [request.tenant for request in s.engine.submitted] == [share_of(name) for name in "bbaa"]
        await caller.send(named(7, "x" * 100))
        await s.engine.next_request(5)
        assert s.engine.submitted[4].tenant == share_of("x" * 64)
        caller.call.cancel()
        await s.idle()
        assert s.service.quota.tenants() == ()


async def test_proven_tenant_is_not_renamed_in_a_session(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("alice alice-token-0123456789abcdef\n")
    path.chmod(0o600)
    async with serving(tmp_path, token_file=str(path)) as s:
        caller = Caller(s, metadata=(("authorization", "Bearer alice-token-0123456789abcdef"),))
        await caller.send(named(1, "bob"))
        await s.engine.next_request(1)
        assert s.engine.submitted[0].tenant == share_of("alice")
        caller.call.cancel()
        await s.idle()


async def test_queue_tokens_are_limited_in_total_and_per_tenant(tmp_path: Path) -> None:
    limits = {"max_queue_tokens": 10, "max_queue_tokens_per_tenant": 5}
    async with serving(tmp_path, **limits) as s:
        calls = [s.generate(IDS, **of_tenant("a"))]
        await s.engine.next_request(1)
        error = await error_of(s.generate(IDS, **of_tenant("a")))
        assert error.metadata == {"waiting_tokens_of_tenant": "3", "limit_tokens_of_tenant": "5"}
        calls += [s.generate(IDS, **of_tenant(name)) for name in "bc"]
        await s.engine.next_request(3)
        error = await error_of(s.generate(IDS, **of_tenant("d")))
        assert error.metadata == {"waiting_tokens": "9", "limit_tokens": "10"}
        assert len(s.engine.submitted) == 3


async def test_full_queue_rejects_before_validating_large_requests(tmp_path: Path) -> None:
    async with serving(tmp_path, max_queue_size=1, max_prompt_bytes=100) as s:
        waiting = s.generate(IDS)
        await s.engine.next_request(1)
        assert (await error_of(s.generate(text_request("x" * 2000, sampling={"top_p": 7.0})))).reason == "QUEUE_FULL"
        stats = await s.stub.GetStats(pb.GetStatsRequest())
        assert stats.counters.requests_rejected == 1
        waiting.cancel()


async def test_small_invalid_request_is_rejected_before_the_quota(tmp_path: Path) -> None:
    """In Generate, Session and Submit; and only the valid one is rejected by the quota."""
    invalid = text_request(sampling={"top_p": 7.0})
    async with serving(tmp_path, max_queue_size=1) as s:
        waiting = s.generate(IDS)
        await s.engine.next_request(1)
        for call in (s.generate(invalid), s.stub.Submit(pb.SubmitRequest(request=invalid))):
            assert await invalid_fields(call) == ["sampling.top_p"]
        caller = Caller(s)
        await caller.send(submit(1, invalid))
        await caller.until(lambda: caller.failed)
        assert caller.failed[1].reason == "INVALID_REQUEST"
        assert (await error_of(s.generate(text_request()))).reason == "QUEUE_FULL"
        assert s.service.stats.rejected == {"invalid_request": 3, "queue_full": 1}
        waiting.cancel()


async def test_invalid_request_releases_its_place(tmp_path: Path) -> None:
    async with serving(tmp_path, max_queue_size=1) as s:
        for _ in range(3):
            assert await invalid_fields(s.generate(text_request(sampling={"top_p": 7.0}))) == ["sampling.top_p"]
            assert (await error_of(s.generate(text_request("x" * 600)))).reason == "PROMPT_TOO_LONG"
        assert await answered(s, TOKENIZER.encode_sealed("ok"))
        assert len(s.service.quota) == 0
