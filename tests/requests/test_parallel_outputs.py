"""Several outputs of one request over a socket: indexes, shares of the queue place, errors and unread limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from support.answers import invalid_fields
from support.serving import HELLO_IDS, Serving, error_of, serving, text_request, until
from support.session_driver import Caller, cancel, submit

from lineclear.errors import NonFiniteLogits, QueueFull, SlowConsumer
from lineclear.scheduler.core.events import FinishReason
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc


def several(n: int, **fields: object) -> pb.GenerateRequest:
    return text_request(sampling={"n": n, "seed": 7}, **fields)


async def begun(s: Serving, call: Any, count: int) -> tuple[Any, list[str]]:
    """Return the call and the keys of its outputs, which are started."""
    await s.engine.next_request(count)
    keys = [request.request_id for request in s.engine.submitted]
    for key in keys:
        s.engine.start(key)
    return call, keys


async def test_siblings_are_submitted_together_with_seeds_of_their_own(s: Serving) -> None:
    call = s.generate(several(3))
    await s.engine.next_request(3)
    first, *siblings = s.engine.submitted
    assert [request.sampling.seed for request in s.engine.submitted] == [7, 8, 9]
    assert [request.is_sibling for request in s.engine.submitted] == [False, True, True]
    assert all(request.prompt == first.prompt for request in siblings)
    call.cancel()
    await s.idle()
    assert sorted(s.engine.cancelled) == sorted(request.request_id for request in s.engine.submitted)


async def test_a_place_in_the_queue_is_free_when_all_outputs_have_started(tmp_path: Path) -> None:
    async with serving(tmp_path, max_queue_size=1) as s:
        call = s.generate(several(2))
        await s.engine.next_request(2)
        keys = [request.request_id for request in s.engine.submitted]
        assert isinstance(await error_of(s.generate(text_request("x"))), QueueFull)
        s.engine.start(keys[0])
        assert (await call.read()).started.num_outputs == 2
        assert isinstance(await error_of(s.generate(text_request("x"))), QueueFull)
        s.engine.start(keys[1])
        assert (await call.read()).index == 1
        assert len(s.service.quota) == 0


async def test_an_error_of_one_output_ends_all_after_their_tokens(s: Serving) -> None:
    call, keys = await begun(s, s.generate(several(2)), 2)
    s.engine.step({key: [HELLO_IDS[0]] for key in keys})
    s.engine.fail(keys[1], NonFiniteLogits("bad"))
    tokens = {0: 0, 1: 0}
    with pytest.raises(grpc.aio.AioRpcError):  # noqa: PT012
        while True:
            message = await call.read()
            tokens[message.index] += len(message.token_ids)
    assert tokens == {0: 1, 1: 1}
    assert isinstance(await error_of(call), NonFiniteLogits)
    assert s.engine.cancelled == [keys[0]]
    await s.idle()


async def test_unread_tokens_of_all_outputs_count_together(tmp_path: Path) -> None:
    async with serving(tmp_path, max_unread_tokens=12) as s:
        reply = await s.stub.Submit(pb.SubmitRequest(request=several(3)))
        assert reply.request_id  # read at once: no limit is reached
        _, keys = await begun(s, reply, 3)
        for key in keys:
            s.engine.tokens(key, HELLO_IDS[:1] * 30)
        request = next(iter(s.manager.requests))
        await until(lambda: all(output.num_received == 30 for output in request.outputs))
        request.outputs[0].subscribe(lambda: None)
        request.outputs[1].subscribe(lambda: None)
        s.engine.tokens(keys[0], HELLO_IDS[:1] * 10)  # beyond its share of 4, within the limit
        await until(lambda: request.outputs[0].num_received == 40)
        assert not request.outputs[0].has_ended
        s.engine.tokens(keys[1], HELLO_IDS[:1] * 10)
        answer = await s.stub.GetResult(pb.GetResultRequest(request_id=reply.request_id))
        await until(lambda: len(s.engine.cancelled) > 0)
        assert answer.state in (pb.RESULT_STATE_RUNNING, pb.RESULT_STATE_FAILED)
        assert request.outputs[1].has_ended
        request.cancel(SlowConsumer("done"))


async def test_session_rows_name_the_output(s: Serving) -> None:
    call = inference_pb2_grpc.InferenceServiceStub(s.channel).Session()
    await call.write(submit(5, several(3)))
    await call.write(submit(6))
    _, keys = await begun(s, call, 4)
    started: set[tuple[int, int]] = set()
    while len(started) < 4:
        started |= {(event.handle, event.response.index) for event in (await call.read()).events}
    s.engine.step({key: [HELLO_IDS[0]] for key in keys})
    message = await call.read()
    rows = sorted(zip(message.handles, message.outputs, strict=True))
    assert rows == [(5, 0), (5, 1), (5, 2), (6, 0)], "also the row behind those of other outputs"
    only = cancel(5)
    only.cancels[0].index = 1
    await call.write(only)
    await until(lambda: s.engine.cancelled == [keys[1]])
    message = await call.read()
    assert [(e.response.index, e.response.finished.finish_reason) for e in message.events] == [
        (1, pb.FINISH_REASON_CANCELLED)
    ]
    for key in (keys[0], *keys[2:]):
        s.engine.finish_by(key, FinishReason.LENGTH)
    await call.done_writing()
    while (message := await call.read()) is not grpc.aio.EOF:
        assert all(event.HasField("response") for event in message.events)
    assert (await call.code()).name == "OK"
    await s.idle()


async def test_an_output_is_cancelled_while_the_prompt_is_tokenized(
    s: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers, is_let_go = s.service.tokenizers, asyncio.Event()
    encode = tokenizers.encode

    async def later(text: str) -> list[int]:
        await is_let_go.wait()
        return await encode(text)

    monkeypatch.setattr(tokenizers, "encode", later)
    caller = Caller(s)
    message = submit(5, several(2))
    message.cancels.add(handle=5, index=0)
    await caller.send(message)
    await until(lambda: len(s.engine.cancelled) > 0)
    is_let_go.set()
    await caller.read()
    assert not caller.failed
    cancelled = caller.finished[5]
    assert cancelled.finish_reason == pb.FINISH_REASON_CANCELLED
    assert not cancelled.timings.HasField("queue_time"), "it never started"
    await s.engine.next_request()
    (other,) = s.engine.submitted
    assert other.sampling.seed == 8, "output 1 goes on"
    assert cancelled.usage.prompt_tokens == len(other.prompt) > 0
    caller.call.cancel()
    await s.idle()


@pytest.mark.parametrize(
    ("resume", "field"),
    [
        ({"token_ids": [1]}, "resume.token_ids"),
        ({"outputs": [{"token_ids": [1]}]}, "resume.outputs"),
        ({"outputs": [{"is_complete": True}] * 2}, "resume.outputs"),
        ({"outputs": [{"token_ids": [1]}, {"token_ids": [2**31]}]}, "resume.outputs[1].token_ids[0]"),
        ({}, "resume.outputs"),
    ],
)
async def test_invalid_resumes_of_outputs(s: Serving, resume: dict[str, object], field: str) -> None:
    output = {} if resume else {"echo": True}
    request = several(2, resume={"model_fingerprint": "m", **resume}, output=output)
    assert field in await invalid_fields(s.generate(request))


async def test_a_resume_computes_the_outputs_that_are_not_complete(s: Serving) -> None:
    fingerprint = s.engine.worker_status.hello.model_fingerprint
    outputs = [{"is_complete": True}, {"token_ids": HELLO_IDS[:2]}, {"token_ids": HELLO_IDS[:1]}]
    call = s.generate(several(3, resume={"model_fingerprint": fingerprint, "outputs": outputs}))
    await s.engine.next_request(2)
    assert [request.output for request in s.engine.submitted] == [tuple(HELLO_IDS[:2]), tuple(HELLO_IDS[:1])]
    assert [request.sampling.seed for request in s.engine.submitted] == [8, 9]
    call.cancel()
    await s.idle()
