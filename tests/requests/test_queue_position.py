"""The place in the queue and the predicted wait: in responses, in QueueFull, and against the deadline of a request."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from support.answers import answered
from support.processes import endless, starting
from support.processes import error_of as failure_of
from support.serving import HELLO_IDS, Serving, error_of, serving, text_request
from support.session_driver import Caller, submit

from lineclear.client import AsyncClient, Queued
from lineclear.errors import DeadlineUnreachable, QueueFull
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
    responses = await answered(s, HELLO_IDS)
    assert not any(response.HasField("queued") for response in responses)


async def test_unknown_wait_is_unset(s: Serving) -> None:
    s.engine.position = QueuePosition(0, None)
    queued = (await s.generate(ASKING).read()).queued
    assert (queued.requests_ahead, queued.HasField("predicted_wait")) == (0, False)


async def test_session_sends_the_place_as_an_event(s: Serving) -> None:
    s.engine.position = QueuePosition(3, 1.5)
    caller = Caller(s)
    await caller.send(submit(1, ASKING))
    await caller.until(lambda: caller.messages)
    assert caller.messages[0].events[0].response == pb.GenerateResponse(queued=QUEUED)
    s.engine.start(await s.engine.next_request())
    await caller.until(lambda: caller.started)


async def test_submitted_request_shows_its_place_while_it_waits(s: Serving) -> None:
    """In the response, to each reader, and in its result."""
    s.engine.position = QueuePosition(3, 1.5)
    answer = await s.stub.Submit(pb.SubmitRequest(request=ASKING))
    assert answer.queued == QUEUED
    attach, get = pb.AttachRequest(request_id=answer.request_id), pb.GetResultRequest(request_id=answer.request_id)
    attached = s.stub.Attach(attach)
    assert (await attached.read()).response == pb.GenerateResponse(queued=QUEUED)
    result = await s.stub.GetResult(get)
    assert (result.state, result.response.queued) == (pb.RESULT_STATE_WAITING, QUEUED)
    s.engine.start(await s.engine.next_request())
    started = (await attached.read()).response
    assert (started.HasField("started"), started.HasField("queued")) == (True, False)
    assert not (await s.stub.Attach(attach).read()).response.HasField("queued")
    assert not (await s.stub.GetResult(get)).response.HasField("queued")


async def test_submitted_request_that_does_not_ask_or_wait_gets_no_place(s: Serving) -> None:
    s.engine.position = QueuePosition(3, 1.5)
    assert not (await s.stub.Submit(pb.SubmitRequest(request=text_request()))).HasField("queued")
    s.engine.position = None
    assert not (await s.stub.Submit(pb.SubmitRequest(request=ASKING))).HasField("queued")


async def test_submitted_request_that_the_core_rejects_is_not_kept(s: Serving) -> None:
    s.engine.refusal = QueueFull("no", retry_after_seconds=1.0)
    error = await error_of(s.stub.Submit(pb.SubmitRequest(request=text_request(request_id="full"))))
    assert (error.reason, error.retry_after_seconds) == ("QUEUE_FULL", 1.0)
    gone = await error_of(s.stub.GetResult(pb.GetResultRequest(request_id="full")))
    assert gone.reason == "UNKNOWN_REQUEST"
    s.engine.refusal = None
    assert (await s.stub.Submit(pb.SubmitRequest(request=text_request(request_id="full")))).request_id == "full"


async def test_client_shows_the_place(s: Serving) -> None:
    s.engine.position = QueuePosition(3, None)
    s.engine.answer = lambda request: HELLO_IDS
    async with (
        AsyncClient(s.server.address, max_attempts=1) as client,
        client.stream("hi", queue_position=True) as stream,
    ):
        deltas = [delta async for delta in stream]
        assert stream.queued == Queued(3, None)
        assert deltas[0].started is not None
        assert stream.result.token_ids == tuple(HELLO_IDS)


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
        assert not call.done()


# --- deadlines that would pass in the queue ---------------------------------------------------------------------------


async def test_call_with_unreachable_deadline_is_rejected(tmp_path: Path) -> None:
    async with serving(tmp_path, reject_unmeetable_deadlines=True) as s:
        s.engine.refusal = DeadlineUnreachable("no", metadata={"requests_ahead": "7", "least_wait_seconds": "20.000"})
        error = await error_of(s.generate(timeout=10))
        assert isinstance(error, DeadlineUnreachable)
        assert (error.code, error.retry_after_seconds) == ("DEADLINE_EXCEEDED", None)
        assert error.metadata == {"requests_ahead": "7", "least_wait_seconds": "20.000"}
        assert s.engine.submitted[0].deadline is not None


def test_deadline_behind_long_answers_is_rejected(model: Path) -> None:
    flags = ("--reject-unmeetable-deadlines", "--max-batch-size", "1", "--output-length-estimator", "none")
    with starting(model, *flags) as start:
        server = start(min_step_seconds=0.01, max_step_seconds=0.01)
        first, long = endless(1), endless(2)
        first.sampling.max_tokens = 10
        long.output.queue_position = True
        assert list(server.stub.Generate(first))  # now the pace is known
        calls = [server.stub.Generate(long) for _ in range(4)]
        for call in calls:
            next(call)
        with pytest.raises(grpc.RpcError) as caught:
            next(server.stub.Generate(long, timeout=2.0))
        error = failure_of(caught.value)
        assert error.reason == "DEADLINE_UNREACHABLE"
        assert error.metadata["requests_ahead"] == "3"
        assert next(server.stub.Generate(long, timeout=60.0)).queued.requests_ahead == 3
