"""Two tenants with separate tokens: neither sees, blocks or evicts the requests of the other."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from security.test_token_file import ALICE, BOB
from security.test_token_file import token_file as write_tokens
from structlog.testing import capture_logs
from support.every_method import bearer
from support.serving import SMILE_IDS, Serving, error_of, read_all, serving, text_request
from support.session_driver import Caller
from support.session_driver import submit as session_submit

from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.core.policies import share_of
from lineclear.status_codec import from_status
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Logprobs

TOKENS = {"alice": ALICE, "bob": BOB}
LONG = text_request(sampling={"max_tokens": 100})


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    return str(write_tokens(tmp_path, f"alice {ALICE}", f"bob {BOB}"))


def of(tenant: str) -> dict[str, Any]:
    """Return the call options of a tenant."""
    return {"metadata": bearer(TOKENS[tenant])}


async def submit(s: Serving, tenant: str, request: pb.GenerateRequest | None = None) -> str:
    answer = await s.stub.Submit(pb.SubmitRequest(request=request or text_request()), **of(tenant))
    return str(answer.request_id)


async def submit_to_the_end(
    s: Serving, tenant: str, request: pb.GenerateRequest | None = None, tokens: Sequence[int] = (5,)
) -> str:
    """Submit a request and return when its answer is complete and kept."""
    s.engine.answer = lambda request: tokens
    name = await submit(s, tenant, request)
    await s.idle()
    s.engine.answer = None
    return name


async def num_kept(s: Serving, tenant: str, names: Sequence[str]) -> int:
    """Return how many of these answers the tenant can still read."""
    count = 0
    for name in names:
        call = s.stub.GetResult(pb.GetResultRequest(request_id=name), **of(tenant))
        try:
            await call
            count += 1
        except Exception:
            assert (await error_of(call)).reason == "UNKNOWN_REQUEST"
    return count


async def test_two_tenants_may_use_the_same_request_id(tmp_path: Path, token_file: str) -> None:
    """By Generate, Session and Submit; each tenant cancels its own request by that id."""
    named = text_request(request_id="invoice-4711")

    async with serving(tmp_path, token_file=token_file) as s:
        first = s.generate(named, **of("alice"))
        alices = await s.engine.next_request(1)
        second = s.generate(named, **of("bob"))
        bobs = await s.engine.next_request(2)
        again = await error_of(s.generate(named, **of("bob")))
        assert (again.code, again.reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST")
        cancel = pb.CancelRequest(request_id="invoice-4711")
        assert (await s.stub.Cancel(cancel, **of("bob"))).found
        assert (await error_of(second)).reason == "CANCELLED"
        assert s.engine.cancelled == [bobs]
        s.engine.start(alices)
        assert (await first.read()).started.request_id == "invoice-4711"
        assert await submit(s, "bob", named) == "invoice-4711"
        session = s.stub.Session(**of("bob"))
        await session.write(pb.SessionRequest(submits=[pb.SubmitCommand(handle=1, request=named)]))
        assert from_status((await session.read()).events[0].error).reason == "DUPLICATE_REQUEST"  # for bob's own Submit
        assert (await s.stub.Cancel(cancel, **of("alice"))).found
        assert (await error_of(first)).reason == "CANCELLED"
        assert s.engine.cancelled == [bobs, alices]
        session.cancel()


async def test_tenant_does_not_evict_a_smaller_tenants_answers(tmp_path: Path, token_file: str) -> None:
    async with serving(tmp_path, token_file=token_file, max_submitted=20) as s:
        alices = [await submit_to_the_end(s, "alice") for _ in range(5)]
        bobs = [await submit_to_the_end(s, "bob") for _ in range(40)]
        assert await num_kept(s, "alice", alices) == 5
        assert await num_kept(s, "bob", bobs) == 15
        assert await num_kept(s, "bob", bobs[-15:]) == 15


async def test_largest_tenant_is_evicted_for_a_new_one(tmp_path: Path, token_file: str) -> None:
    """Evicts down to equal shares, the oldest first."""

    async with serving(tmp_path, token_file=token_file, max_submitted=10) as s:
        bobs = [await submit_to_the_end(s, "bob") for _ in range(10)]
        alices = [await submit_to_the_end(s, "alice") for _ in range(10)]
        assert await num_kept(s, "bob", bobs) == 5
        assert await num_kept(s, "bob", bobs[-5:]) == 5
        assert await num_kept(s, "alice", alices) == 5


async def test_shares_are_counted_in_tokens_too(tmp_path: Path, token_file: str) -> None:
    """A long answer of one tenant counts as much as many short ones of another."""

    async with serving(tmp_path, token_file=token_file, max_submitted_tokens=300) as s:
        short = text_request(sampling={"max_tokens": 10})
        alices = [await submit_to_the_end(s, "alice", short, [5] * 10) for _ in range(5)]
        bobs = [await submit_to_the_end(s, "bob", LONG, [5] * 100) for _ in range(6)]
        assert await num_kept(s, "alice", alices) == 5
        assert await num_kept(s, "bob", bobs) == 2


async def test_submitted_requests_per_tenant_are_limited(tmp_path: Path, token_file: str) -> None:
    """Requests in progress are never evicted, so without a limit they could fill the whole store."""

    async with serving(tmp_path, token_file=token_file, max_submitted=4, max_submitted_per_tenant=3) as s:
        for _ in range(3):
            await submit(s, "bob")
        error = await error_of(submit(s, "bob"))
        assert (error.reason, error.metadata) == ("QUEUE_FULL", {"kept_of_tenant": "3", "limit_of_tenant": "3"})
        await submit(s, "alice")


async def test_answer_beyond_a_tenants_limit_evicts_its_own(tmp_path: Path, token_file: str) -> None:
    """Also where another tenant keeps more tokens."""
    async with serving(tmp_path, token_file=token_file, max_submitted_tokens=300, max_submitted_per_tenant=2) as s:
        bobs = [await submit_to_the_end(s, "bob", LONG, [5] * 100) for _ in range(2)]
        short = text_request(sampling={"max_tokens": 10})
        alices = [await submit_to_the_end(s, "alice", short, [5] * 10) for _ in range(3)]
        assert await num_kept(s, "bob", bobs) == 2
        assert await num_kept(s, "alice", alices[1:]) == 2


async def test_kept_answers_are_limited_in_bytes(tmp_path: Path) -> None:
    """Log probabilities take far more memory than tokens, so a limit in tokens does not suffice."""
    heavy = text_request(output=pb.OutputOptions(logprobs=True, top_logprobs=20), sampling={"max_tokens": 100})

    async def most(s: Serving, request: pb.GenerateRequest) -> int:
        for count in range(256):
            error = None
            try:
                await s.stub.Submit(pb.SubmitRequest(request=request))
            except grpc.aio.AioRpcError:
                error = await error_of(s.stub.Submit(pb.SubmitRequest(request=request)))
            if error is not None:
                assert (error.reason, error.metadata["limit_bytes"]) == ("QUEUE_FULL", "200000")
                return count
        raise AssertionError("no bound")

    async with serving(tmp_path, max_submitted_bytes=200_000) as s:
        num_heavy = await most(s, heavy)
        assert 3 <= num_heavy <= 6
    async with serving(tmp_path, max_submitted_bytes=200_000) as s:
        assert await most(s, LONG) >= 3 * num_heavy


async def test_counted_bytes_match_memory(tmp_path: Path) -> None:
    options = pb.OutputOptions(logprobs=True, top_logprobs=20, token_timings=True)
    top = tuple((token, -float(token)) for token in range(400, 420))

    async with serving(tmp_path, max_unread_tokens=10_000) as s:
        await submit_and_feed(s, options, top, 10)  # one-time allocations
        gc.collect()
        tracemalloc.start()
        before = s.manager.submitted.num_bytes
        await submit_and_feed(s, options, top, 1000)
        gc.collect()
        memory, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        counted = s.manager.submitted.num_bytes - before
        assert memory < 1.3 * counted
        assert counted < 600 * 1000
        answer = list(s.manager.submitted)[-1]
        message = answer.outputs[0].message(999, 1000)
        assert [(c.token_id, c.logprob) for c in message.logprobs[0].top_logprobs] == list(top)
        assert message.logprobs[0].logprob == -999.0


async def submit_and_feed(
    s: Serving, options: pb.OutputOptions, top: tuple[tuple[int, float], ...], count: int
) -> None:
    """Submit a request and keep its answer of `count` tokens."""
    number = len(s.engine.submitted) + 1
    await s.stub.Submit(pb.SubmitRequest(request=text_request(output=options)))
    key = await s.engine.next_request(number)
    s.engine.start(key)
    for index in range(count):
        s.engine.tokens(key, [5], [Logprobs(-float(index), top)])
    s.engine.finish_by(key, FinishReason.LENGTH)
    await s.idle()


async def test_stats_reveal_nothing_about_other_tenants(tmp_path: Path, token_file: str) -> None:
    async with serving(tmp_path, token_file=token_file) as s:
        before = await s.stub.GetStats(pb.GetStatsRequest(), **of("bob"))
        s.engine.answer = lambda request: SMILE_IDS
        assert [r async for r in s.generate(text_request("secret " * 9), **of("alice"))]
        after = await s.stub.GetStats(pb.GetStatsRequest(), **of("bob"))
        assert after.worker.up
        assert (after.batching_strategy, after.scheduling_policy) == ("continuous", "fifo")
        assert after.uptime.ToNanoseconds() > 0
        after.uptime.CopyFrom(before.uptime)
        assert after == before
        assert not after.HasField("counters")
        assert not after.HasField("e2e_request_latency_seconds")


@pytest.mark.parametrize("settings", [{"share_stats_across_tenants": True}, {"token_file": ""}])
async def test_stats_are_complete_without_tenants(tmp_path: Path, token_file: str, settings: dict[str, Any]) -> None:
    async with serving(tmp_path, **{"token_file": token_file, **settings}) as s:
        s.engine.answer = lambda request: SMILE_IDS
        assert [r async for r in s.generate(**of("alice"))]
        stats = await s.stub.GetStats(pb.GetStatsRequest(), **of("bob"))
        assert stats.e2e_request_latency_seconds.count == 1
        assert stats.generation_tokens_per_second > 0


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("metadata", "tenant", "trace_id"),
    [
        ({"x-tenant-id": "shop-7@eu"}, "shop-7@eu", None),
        ({"x-tenant-id": "Tell me a story"}, f"#{share_of('Tell me a story')}", None),
        ({"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}, None, TRACE),
        ({"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "x-tenant-id": "shop"}, "shop", TRACE),
        ({"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"}, None, None),
        ({"traceparent": f"00-{TRACE.upper()}-00f067aa0ba902b7-01"}, None, None),
        ({"traceparent": "tell me a story of 32 hex digits"}, None, None),
        ({}, None, None),
    ],
)
@pytest.mark.parametrize("kind", ["generate", "session", "submit"])
async def test_log_line_of_a_request_names_tenant_and_trace(
    tmp_path: Path, kind: str, metadata: dict[str, str], tenant: str | None, trace_id: str | None
) -> None:
    options = {"metadata": tuple(metadata.items())}
    async with serving(tmp_path) as s:
        s.engine.answer = lambda request: [5]
        with capture_logs() as lines:
            if kind == "generate":
                await read_all(s.generate(**options))
            elif kind == "submit":
                await s.stub.Submit(pb.SubmitRequest(request=text_request()), **options)
            else:
                caller = Caller(s, **options)
                await caller.send(session_submit(1))
                await caller.until(lambda: 1 in caller.finished)
            await s.idle()
        (line,) = [line for line in lines if line["event"] == "request_ended"]
        assert (line.get("tenant"), line.get("trace_id")) == (tenant, trace_id)


async def test_log_line_of_a_request_names_the_proven_tenant(tmp_path: Path, token_file: str) -> None:
    async with serving(tmp_path, token_file=token_file) as s:
        s.engine.answer = lambda request: [5]
        options = of("alice")
        with capture_logs() as lines:
            await read_all(s.generate(metadata=(*options["metadata"], ("x-tenant-id", "bob"))))
            await s.idle()
        (line,) = [line for line in lines if line["event"] == "request_ended"]
        assert line["tenant"] == "alice"
        assert TOKENS["alice"] not in str(lines)
