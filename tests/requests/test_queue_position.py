"""The place in the queue and the predicted wait: in the first response, in GetResult and in QueueFull."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from support.serving import HELLO_IDS, Serving, error_of, read_all, serving, text_request, until
from support.session_driver import Caller, submit

from lineclear.client import AsyncClient, Queued
from lineclear.errors import QueueFull
from lineclear.scheduler.core.events import FinishReason, QueuePosition
from lineclear.v1 import inference_pb2 as pb

ASKING = text_request(output={"queue_position": True})
QUEUED = pb.Queued(requests_ahead=3, predicted_wait=Duration(seconds=1, nanos=500_000_000))


async def test_waiting_request_gets_its_place_at_once(s: Serving) -> None:
    s.engine.position = QueuePosition(3, 1.5)
    call = s.generate(ASKING)
    assert await call.read() == pb.GenerateResponse(queued=QUEUED)
    key = await s.engine.next_request()
    s.engine.start(key)
    started = await call.read()
    assert started.HasField("started")
    assert not started.HasField("queued")
    call.cancel()
    await s.idle()


async def test_request_that_does_not_ask_begins_with_started(s: Serving) -> None:
    s.engine.position = QueuePosition(3, 1.5)
    s.engine.answer = lambda request: HELLO_IDS
    responses = await read_all(s.generate())
    assert responses[0].HasField("started")
    assert not any(response.HasField("queued") for response in responses)


async def test_unknown_wait_is_unset(s: Serving) -> None:
    s.engine.position = QueuePosition(0, None)
    call = s.generate(ASKING)
    queued = (await call.read()).queued
    assert (queued.requests_ahead, queued.HasField("predicted_wait")) == (0, False)
    call.cancel()
    await s.idle()


async def test_session_sends_the_place_as_an_event(s: Serving) -> None:
    s.engine.position = QueuePosition(3, 1.5)
    caller = Caller(s)
    await caller.send(submit(1, ASKING))
    await caller.until(lambda: caller.messages)
    assert caller.messages[0].events[0].response == pb.GenerateResponse(queued=QUEUED)
    key = await s.engine.next_request()
    s.engine.start(key)
    s.engine.tokens(key, HELLO_IDS)
    s.engine.finish_by(key, FinishReason.LENGTH)
    await caller.until(lambda: caller.finished)
    assert caller.tokens[1] == HELLO_IDS
    caller.call.cancel()
    await s.idle()


async def test_submitted_request_gets_its_place_at_once(s: Serving) -> None:
    s.engine.position = QueuePosition(3, 1.5)
    answer = await s.stub.Submit(pb.SubmitRequest(request=ASKING))
    assert answer.queued == QUEUED
    attached = s.stub.Attach(pb.AttachRequest(request_id=answer.request_id))
    assert (await attached.read()).response == pb.GenerateResponse(queued=QUEUED)
    key = await s.engine.next_request()
    s.engine.start(key)
    started = (await attached.read()).response
    assert (started.HasField("started"), started.HasField("queued")) == (True, False)
    late = s.stub.Attach(pb.AttachRequest(request_id=answer.request_id))
    assert not (await late.read()).response.HasField("queued")  # it does not wait any more
    await s.stub.Cancel(pb.CancelRequest(request_id=answer.request_id))
    await s.idle()


async def test_submitted_request_that_does_not_ask_or_wait_gets_no_place(s: Serving) -> None:
    s.engine.position = QueuePosition(3, 1.5)
    answers = [await s.stub.Submit(pb.SubmitRequest(request=text_request()))]
    s.engine.position = None
    answers.append(await s.stub.Submit(pb.SubmitRequest(request=ASKING)))
    assert not any(answer.HasField("queued") for answer in answers)
    for answer in answers:
        await s.stub.Cancel(pb.CancelRequest(request_id=answer.request_id))
    await s.idle()


async def test_submitted_request_that_the_core_rejects_is_not_kept(s: Serving) -> None:
    s.engine.refusal = QueueFull("no", retry_after_seconds=1.0)
    error = await error_of(s.stub.Submit(pb.SubmitRequest(request=text_request(request_id="full"))))
    assert (error.reason, error.retry_after_seconds) == ("QUEUE_FULL", 1.0)
    gone = await error_of(s.stub.GetResult(pb.GetResultRequest(request_id="full")))
    assert gone.reason == "UNKNOWN_REQUEST"
    s.engine.refusal = None
    again = await s.stub.Submit(pb.SubmitRequest(request=text_request(request_id="full")))
    await s.stub.Cancel(pb.CancelRequest(request_id=again.request_id))
    await s.idle()


async def test_result_of_a_waiting_request_has_its_place(s: Serving) -> None:
    s.engine.position = QueuePosition(3, 1.5)
    name = (await s.stub.Submit(pb.SubmitRequest(request=ASKING))).request_id
    result = await s.stub.GetResult(pb.GetResultRequest(request_id=name))
    assert (result.state, result.response.queued) == (pb.RESULT_STATE_WAITING, QUEUED)
    s.engine.start(await s.engine.next_request())
    await until(lambda: s.manager.requests)
    result = await s.stub.GetResult(pb.GetResultRequest(request_id=name))
    assert not result.response.HasField("queued")
    await s.stub.Cancel(pb.CancelRequest(request_id=name))
    await s.idle()


async def test_client_shows_the_place(s: Serving) -> None:
    s.engine.position = QueuePosition(3, None)
    s.engine.answer = lambda request: HELLO_IDS
    async with AsyncClient(s.server.address, max_attempts=1) as client:
        stream = client.stream("hi", queue_position=True)
        async with stream:
            deltas = [delta async for delta in stream]
        assert stream.queued == Queued(3, None)
        assert deltas[0].started is not None
        assert stream.result.token_ids == tuple(HELLO_IDS)
        other = await client.stream("hi").read_all()
        assert other.token_ids == tuple(HELLO_IDS)


async def test_client_shows_the_place_of_a_submitted_request(s: Serving) -> None:
    s.engine.position = QueuePosition(3, 1.5)
    async with AsyncClient(s.server.address, max_attempts=1) as client:
        submitted = await client.submit("hi", queue_position=True)
        assert submitted.queued == (await submitted.poll()).queued == Queued(3, 1.5)
        key = await s.engine.next_request()
        stream = submitted.attach()
        s.engine.start(key)
        s.engine.tokens(key, HELLO_IDS)
        s.engine.finish_by(key, FinishReason.LENGTH)
        assert (await stream.read_all()).token_ids == tuple(HELLO_IDS)
        assert (await submitted.poll()).queued is None
        assert client.submitted(submitted.request_id).queued is None


async def test_full_queue_names_the_predicted_wait(tmp_path: Path) -> None:
    async with serving(tmp_path, max_queue_size=1) as s:
        s.engine.predicted_wait = 8.25
        call = s.generate()
        await s.engine.next_request()
        error = await error_of(s.generate())
        assert error.metadata == {"waiting": "1", "limit": "1", "predicted_wait_seconds": "8.250"}
        assert error.retry_after_seconds == pytest.approx(4.125)
        call.cancel()
        await s.idle()
