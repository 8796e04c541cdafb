"""Submitted requests: computed without a reader, limited, read from any index, and visible to their caller only."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from support.answers import invalid_fields
from support.serving import (
    SMILE,
    SMILE_IDS,
    Serving,
    error_of,
    read_all,
    serving,
    text_of,
    text_request,
    tokens_of,
    until,
)

from lineclear.errors import LineclearError, NonFiniteLogits
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import ANONYMOUS, Identity
from lineclear.status_codec import from_status
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Logprobs


async def submit(s: Serving, request: pb.GenerateRequest | None = None, **options: Any) -> str:
    answer = await s.stub.Submit(pb.SubmitRequest(request=request or text_request()), **options)
    return str(answer.request_id)


async def submit_to_the_end(
    s: Serving, request: pb.GenerateRequest | None = None, answer: Sequence[int] = SMILE_IDS
) -> str:
    s.engine.answer = lambda request: answer
    name = await submit(s, request)
    await s.idle()
    s.engine.answer = None
    return name


async def result(s: Serving, request_id: str, **options: Any) -> pb.GetResultResponse:
    found: pb.GetResultResponse = await s.stub.GetResult(pb.GetResultRequest(request_id=request_id), **options)
    return found


def attach(s: Serving, request_id: str, from_index: int = 0, **options: Any) -> Any:
    return s.stub.Attach(pb.AttachRequest(request_id=request_id, from_index=from_index), **options)


async def attached(s: Serving, request_id: str, from_index: int = 0) -> list[pb.GenerateResponse]:
    """Return all responses from an index to the end."""
    return await read_all(attach(s, request_id, from_index), from_index)


def cancel(s: Serving, request_id: str, **options: Any) -> Any:
    return s.stub.Cancel(pb.CancelRequest(request_id=request_id), **options)


async def started(s: Serving, request: pb.GenerateRequest | None = None, num_tokens: int = 0) -> tuple[str, str]:
    """Return name and key of a submitted request whose answer has begun."""
    name = await submit(s, request)
    key = await s.engine.next_request()
    s.engine.start(key)
    s.engine.tokens(key, SMILE_IDS[:num_tokens])
    return name, key


async def test_answer_is_read_from_any_index(s: Serving) -> None:
    name = await submit(s, text_request(request_id="mine"))
    assert name == "mine"
    key = await s.engine.next_request()
    assert (await result(s, name)).state == pb.RESULT_STATE_WAITING
    early = asyncio.ensure_future(attached(s, name))
    s.engine.start(key)
    s.engine.tokens(key, SMILE_IDS[:4])
    await until(lambda: s.manager.submitted.find(ANONYMOUS, name).outputs[0].next_index == 4)
    now = await result(s, name)
    assert (now.state, list(now.response.token_ids)) == (pb.RESULT_STATE_RUNNING, SMILE_IDS[:4])
    late = asyncio.ensure_future(attached(s, name, 2))
    for token in SMILE_IDS[4:]:
        s.engine.tokens(key, [token])
    s.engine.finish_by(key, FinishReason.LENGTH)
    assert (tokens_of(await early), text_of(await early)) == (SMILE_IDS, SMILE)
    assert tokens_of(await late) == SMILE_IDS[2:]
    for have in range(len(SMILE_IDS) + 1):
        responses = await attached(s, name, have)
        assert tokens_of(responses) == SMILE_IDS[have:]
        assert SMILE.endswith(text_of(responses))
    assert text_of(await attached(s, name)) == SMILE
    last = await result(s, name)
    assert last.state == pb.RESULT_STATE_FINISHED
    assert (last.response.text, list(last.response.token_ids)) == (SMILE, SMILE_IDS)
    assert last.response.finished.usage.completion_tokens == len(SMILE_IDS)
    assert last.response.started.request_id == "mine"
    await s.idle()


async def test_held_back_text_comes_with_the_end(s: Serving) -> None:
    name = await submit_to_the_end(s, text_request(stop={"strings": ["😀😀"]}))
    assert (await result(s, name)).response.text == SMILE
    assert text_of(await attached(s, name)) == SMILE
    assert text_of(await attached(s, name, len(SMILE_IDS))) == "😀"


async def test_a_long_answer_comes_in_several_messages(tmp_path: Path) -> None:
    async with serving(tmp_path, max_unread_tokens=10_000) as s:
        responses = await attached(s, await submit_to_the_end(s, answer=[5] * 2500))
        assert tokens_of(responses) == [5] * 2500
        assert [len(r.token_ids) for r in responses] == [1024, 1024, 452]


async def test_logprobs_and_times_stay_with_their_tokens(s: Serving) -> None:
    options = pb.OutputOptions(logprobs=True, token_timings=True)
    name, key = await started(s, text_request(output=options))
    s.engine.tokens(key, SMILE_IDS[:3], [Logprobs(-1.0), Logprobs(-2.0), Logprobs(-3.0)])
    s.engine.finish_by(key, FinishReason.LENGTH)
    await s.idle()
    (message,) = await attached(s, name, 1)
    assert [entry.logprob for entry in message.logprobs] == [-2.0, -3.0]
    assert len(message.token_times_us) == 2
    assert not (await result(s, name)).response.logprobs


async def test_failure_is_kept(s: Serving) -> None:
    name, key = await started(s, num_tokens=2)
    s.engine.fail(key, NonFiniteLogits("nan"))
    await s.idle()
    found = await result(s, name)
    assert (found.state, from_status(found.error).reason) == (pb.RESULT_STATE_FAILED, "NON_FINITE_LOGITS")
    assert list(found.response.token_ids) == SMILE_IDS[:2]
    call = attach(s, name)
    assert list((await call.read()).response.token_ids) == SMILE_IDS[:2]
    assert (await error_of(call)).reason == "NON_FINITE_LOGITS"


async def test_only_cancel_ends_a_submitted_request(s: Serving) -> None:
    name, _ = await started(s)
    call = attach(s, name)
    await call.read()
    call.cancel()
    generating = s.generate(text_request(request_id="live"))
    await s.engine.next_request(2)
    assert s.engine.cancelled == []
    assert (await cancel(s, name)).found
    assert (await cancel(s, "live")).found
    assert not (await cancel(s, "nobody")).found
    assert (await error_of(generating)).reason == "CANCELLED"
    await s.idle()
    assert sorted(s.engine.cancelled) == sorted(r.request_id for r in s.engine.submitted)
    assert from_status((await result(s, name)).error).reason == "CANCELLED"
    assert (await cancel(s, name)).found  # removed
    for call in (result(s, name), attach(s, name)):
        assert (await error_of(call)).reason == "UNKNOWN_REQUEST"


async def test_attach_beyond_the_answer_is_rejected(s: Serving) -> None:
    name = await submit_to_the_end(s)
    assert await invalid_fields(attach(s, name, len(SMILE_IDS) + 1)) == ["from_index"]
    more = s.stub.Attach(pb.AttachRequest(request_id=name, more_from_indexes=[0]))
    assert await invalid_fields(more) == ["more_from_indexes"]


async def test_longest_ended_answer_is_evicted(tmp_path: Path) -> None:
    async with serving(tmp_path, max_submitted=3, max_submitted_tokens=60) as s:
        s.engine.answer = lambda request: [5] * 10
        small = {"sampling": {"max_tokens": 15}}  # of which the answer needs ten
        names = [await submit(s, text_request(**small)) for _ in range(4)]
        assert (await error_of(result(s, names[0]))).code == "NOT_FOUND"
        for name in names[1:]:
            assert (await result(s, name)).state == pb.RESULT_STATE_FINISHED
        # 30 tokens are kept; 45 more need the space of two of the three.
        s.engine.answer = None
        await submit(s, text_request(sampling={"max_tokens": 45}))
        assert len(s.manager.submitted) == 2
        assert s.manager.submitted.num_tokens == 55
        # Answers in progress are never evicted.
        error = await error_of(submit(s, text_request(sampling={"max_tokens": 20})))
        assert (error.reason, error.metadata["limit_tokens"]) == ("QUEUE_FULL", "60")
        assert error.retry_after_seconds is not None
        await until(lambda: len(s.service.streams) == 1)  # the rejected request is removed from the engine too


async def test_answer_expires_and_is_freed(tmp_path: Path) -> None:
    """The lifetime starts at the end of the answer, so a slow machine cannot expire it early."""
    async with serving(tmp_path, submitted_ttl_seconds=0.2) as s:
        loop = asyncio.get_running_loop()
        name, key = await started(s, num_tokens=2)
        reference = weakref.ref(s.manager.submitted.find(ANONYMOUS, name))
        ended_at = loop.time()
        s.engine.finish_by(key, FinishReason.LENGTH)
        await until(lambda: len(s.manager.submitted) == 0)
        assert loop.time() - ended_at > 0.9 * 0.2  # uvloop counts whole milliseconds
        assert s.manager.submitted.num_tokens == 0
        gc.collect()
        assert reference() is None


async def test_removed_answer_is_not_kept_by_its_timer(s: Serving) -> None:
    name = await submit_to_the_end(s)
    reference = weakref.ref(s.manager.submitted.find(ANONYMOUS, name))
    await cancel(s, name)
    gc.collect()
    assert reference() is None


async def test_answers_are_invisible_to_other_callers(s: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def caller(context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
        return Identity(str(dict(context.invocation_metadata() or ())["who"]), "token")

    monkeypatch.setattr(identity, "caller", caller)
    alice, bob = {"metadata": (("who", "alice"),)}, {"metadata": (("who", "bob"),)}
    name = await submit(s, **alice)
    for call in (result(s, name, **bob), attach(s, name, **bob)):
        assert (await error_of(call)).code == "NOT_FOUND"
    assert not (await cancel(s, name, **bob)).found
    assert s.engine.cancelled == []
    assert (await cancel(s, name, **alice)).found


async def test_duplicate_is_reported_before_other_errors(tmp_path: Path) -> None:
    """A retry of an admitted request gets the duplicate error, also with a full queue or an invalid field."""
    async with serving(tmp_path, max_queue_size=1) as s:
        await submit_to_the_end(s, text_request(request_id="a"))
        waiting = s.generate(text_request(request_id="b"))
        await s.engine.next_request(2)
        for fields in ({}, {"sampling": {"temperature": -1}}):
            assert (await error_of(submit(s, text_request(request_id="a", **fields)))).reason == "DUPLICATE_REQUEST"
        assert (await error_of(submit(s, text_request(request_id="c")))).reason == "QUEUE_FULL"
        assert len(s.engine.submitted) == 2
        waiting.cancel()


async def test_concurrent_submits_of_one_request_id_admit_one(s: Serving) -> None:
    same = pb.SubmitRequest(request=text_request(request_id="a"))
    calls = [asyncio.ensure_future(error_of(s.stub.Submit(same))) for _ in range(4)]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    refused = [end.reason for end in ends if isinstance(end, LineclearError)]
    assert refused == ["DUPLICATE_REQUEST"] * 3
    assert len(s.engine.submitted) == len(s.manager.submitted) == 1


async def test_drain_error_has_resume_metadata(s: Serving) -> None:
    name, _ = await started(s, num_tokens=2)
    call = attach(s, name)
    assert (await call.read()).response.HasField("started")
    await until(lambda: s.manager.submitted.find(ANONYMOUS, name).outputs[0].next_index == 2)
    await s.manager.drain(timeout_seconds=0)
    error = await error_of(call)
    assert (error.reason, error.metadata["next_index"]) == ("SHUTDOWN_INTERRUPTED", "2")
    assert from_status((await result(s, name)).error).reason == "SHUTDOWN_INTERRUPTED"
