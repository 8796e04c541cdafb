"""Clients connect, hang up, vanish and reuse request ids: no state remains, and no call waits for another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from support.serving import (
    BOUND_SECONDS,
    HELLO,
    HELLO_IDS,
    TOKENIZER,
    Serving,
    read_all,
    serving,
    text_of,
    text_request,
    tokens_of,
    until,
)

from lineclear.scheduler import metrics_export
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.engine.engine_stats import EngineSnapshot
from lineclear.scheduler.grpc_api.error_interceptor import ErrorInterceptor
from lineclear.scheduler.grpc_api.response_writer import ResponseWriter, write_only
from lineclear.v1 import inference_pb2 as pb


async def test_request_id_can_be_reused_at_once(s: Serving) -> None:
    """The engine's last events about the first request must not reach the second."""
    first, key = await s.start_call(text_request(request_id="same"))
    await first.read()
    del s.engine.requests[key]  # the engine's Failed(Cancelled) is not published yet
    first.cancel()
    await s.idle()
    second = s.generate(text_request(request_id="same"))
    other = await s.engine.next_request(2)
    assert other != key
    s.engine.tokens(key, [5])
    s.engine.start(other)
    s.engine.tokens(other, HELLO_IDS)
    s.engine.finish_by(other, FinishReason.LENGTH)
    responses = await read_all(second)
    assert tokens_of(responses) == HELLO_IDS
    assert responses[0].started.request_id == "same"


@pytest.mark.parametrize("phase", ["queued", "streaming", "stop string found"])
async def test_hanging_up_cancels(s: Serving, phase: str) -> None:
    call = s.generate(text_request(stop={"strings": ["Hello"]} if phase == "stop string found" else None))
    key = await s.engine.next_request()
    if phase == "stop string found":
        s.engine.finish = lambda key, count: s.engine.stopped.append((key, count))  # type: ignore[method-assign]
    if phase != "queued":
        s.engine.start(key)
        await call.read()
        s.engine.tokens(key, HELLO_IDS)
        await call.read()
    call.cancel()
    await s.idle()
    assert s.engine.cancelled == [key]


class LostClient:
    """A client to which gRPC can send nothing any more."""

    def __init__(self, *, has_headers: bool = False) -> None:
        self.has_headers = has_headers

    async def send_initial_metadata(self, metadata: object) -> None:
        if not self.has_headers:
            raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch", "8", ())

    async def write(self, message: object) -> None:
        raise cygrpc.ExecuteBatchError("Failed grpc_call_start_batch", "8", ())


async def test_hang_up_before_the_headers_is_no_incident() -> None:
    """gRPC first reports that the headers cannot be sent, and then that the call is cancelled."""
    client = cast("Any", LostClient())
    await check_cancellation(ResponseWriter(client, BOUND_SECONDS).send_headers(()))
    with pytest.raises(cygrpc.ExecuteBatchError):  # an error without a cancellation is a bug
        await ResponseWriter(client, 0.001).send_headers(())


@pytest.mark.parametrize("is_first", [True, False])
async def test_hang_up_during_a_stream_is_no_incident(is_first: bool) -> None:
    writer = ResponseWriter(cast("Any", LostClient(has_headers=True)), BOUND_SECONDS)
    if not is_first:
        await writer.send_headers(())
    await check_cancellation(writer.write(pb.GenerateResponse()))


async def test_hang_up_before_a_unary_response_is_no_incident() -> None:
    async def answer_empty(request: object, context: object) -> pb.CancelResponse:
        return pb.CancelResponse()

    handler = grpc.unary_unary_rpc_method_handler(answer_empty, pb.CancelRequest.FromString)
    reading = Mock(first=AsyncMock(return_value=pb.CancelRequest()))
    interceptor, call = ErrorInterceptor("s", reading=reading), cast("Any", Mock(method="/s/Cancel"))
    guarded: Any = await interceptor.intercept_service(AsyncMock(return_value=handler), call)
    await check_cancellation(guarded.stream_stream(None, LostClient()))
    with pytest.raises(cygrpc.ExecuteBatchError):
        await write_only(cast("Any", LostClient()), pb.CancelResponse(), 0.001)


async def check_cancellation(sending: Coroutine[Any, Any, None]) -> None:
    """`sending` waits for its cancellation and fails with nothing else."""
    task = asyncio.create_task(sending)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_many_streams_while_a_fifth_hangs_up(tmp_path: Path) -> None:
    """64 streams at once, each with its own text: the others receive all of it, and no request remains."""

    async def read_one_answer(s: Serving) -> None:
        s.engine.answer = lambda request: HELLO_IDS
        await read_all(s.generate())
        s.engine.answer = None
        s.engine.submitted.clear()

    async with serving(tmp_path, max_batch_size=64) as s:
        await read_one_answer(s)
        before = len(asyncio.all_tasks())
        chance = random.Random(5)
        words = [f"{'Hello, how are you? ' * 2}{n}" for n in range(64)]
        answers = [TOKENIZER.encode_sealed(word) for word in words]
        leavers = set(chance.sample(range(64), 13))

        async def client(number: int) -> None:
            call = s.generate(text_request(request_id=f"r{number}"))
            if number not in leavers:
                responses = await read_all(call)
                assert tokens_of(responses) == answers[number]
                assert text_of(responses) == words[number]
                return
            for _ in range(chance.randrange(3)):
                await call.read()
            call.cancel()

        async def engine() -> None:
            sent = {}
            while len(sent) < 64 or s.engine.requests:
                await asyncio.sleep(0)
                for request in s.engine.submitted:
                    key = request.request_id
                    number = int(key[1:].partition("~")[0])
                    if key not in sent:
                        sent[key] = 0
                        s.engine.start(key)
                    if key not in s.engine.requests:
                        continue
                    take = chance.randrange(3)
                    if take and chance.random() < 0.5:
                        s.engine.tokens(key, answers[number][sent[key] : sent[key] + take])
                        sent[key] += take
                    if sent[key] >= len(answers[number]):
                        s.engine.finish_by(key, FinishReason.LENGTH)

        feeding = asyncio.create_task(engine())
        await asyncio.gather(*(client(n) for n in range(64)))
        # Calls that hung up before their request was read never reached the engine.
        feeding.cancel()
        await s.idle()
        await until(lambda: len(asyncio.all_tasks()) <= before)
        assert len(s.service.quota) == 0
        cancelled = {int(key[1:].partition("~")[0]) for key in s.engine.cancelled}
        assert cancelled <= leavers
        stats = await s.stub.GetStats(pb.GetStatsRequest())
        assert stats.gauges.open_streams == 0


async def test_statistics_of_a_stuck_engine_are_earlier_ones(s: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the metrics page. Neither waits for the engine without end."""
    s.engine.predicted_wait = 7.5
    monkeypatch.setattr(s.engine, "fresh_snapshot", Future[EngineSnapshot])
    both = asyncio.gather(s.stub.GetStats(pb.GetStatsRequest()), metrics_export.current(s.manager, None))
    stats, page = await asyncio.wait_for(both, BOUND_SECONDS)
    assert stats.gauges.predicted_wait_seconds == 7.5
    assert 7.5 in {sample.value for family in page for sample in family.samples}


async def test_requests_survive_a_worker_restart(s: Serving) -> None:
    old, key = await s.start_call()
    s.engine.tokens(key, HELLO_IDS[:1])
    await old.read()
    s.engine.lose()
    await until(lambda: not s.server.health.is_serving("readiness"))
    new = s.generate()
    other = await s.engine.next_request(2)
    s.engine.join(replace(HELLO, epoch=8))
    await until(lambda: s.server.health.is_serving("readiness"))
    s.engine.tokens(key, HELLO_IDS[1:])
    s.engine.finish_by(key, FinishReason.LENGTH)
    s.engine.start(other)
    s.engine.finish_by(other, FinishReason.LENGTH)
    rest = []
    while (response := await old.read()) is not grpc.aio.EOF:
        rest.append(response)
    assert tokens_of(rest)[-len(HELLO_IDS) + 1 :] == HELLO_IDS[1:]
    await read_all(new)
