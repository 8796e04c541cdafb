"""Clients that read slowly or not at all: limits of unread output, and the error when a limit is exceeded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from support.serving import error_of, serving, text_request, until
from support.session_driver import Caller, command, submit
from support.sockets import gate

from lineclear.scheduler.core.events import FinishReason
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Logprobs


@pytest.mark.parametrize("way", ["call", "session"])
async def test_too_many_bytes_of_unread_log_probabilities(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token with 20 log probabilities takes more than 2 KiB, so the limit is far below max_unread_tokens."""
    top = Logprobs(-1.5, tuple((token, -2.5) for token in range(20)))
    request = text_request(output={"logprobs": True, "top_logprobs": 20})

    monkeypatch.setattr("lineclear.scheduler.requests.output_stream.MAX_UNREAD_BYTES", 64 * 1024)
    async with serving(tmp_path) as s:
        if way == "session":
            caller = Caller(s)
            await caller.send(submit(1, request))
        else:
            call = s.generate(request)
        key = await s.engine.next_request()
        s.engine.start(key)
        for _ in range(4):  # output that was read does not count
            s.engine.tokens(key, [40] * 20, [top] * 20)
            if way == "session":
                read = len(caller.tokens[1])
                await caller.until(lambda: len(caller.tokens[1]) >= read + 20)  # noqa: B023
            else:
                while not (await call.read()).token_ids:
                    pass
        s.engine.tokens(key, [40] * 100, [top] * 100)
        if way == "session":
            await caller.until(lambda: caller.failed)
            assert caller.failed[1].reason == "SLOW_CONSUMER"
            figures = dict(caller.failed[1].metadata)
        else:
            error = await error_of(call)
            assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "SLOW_CONSUMER")
            figures = error.metadata
        assert figures["limit"] == str(64 * 1024)
        assert 64 * 1024 < int(figures["unread_bytes"]) < 68 * 1024
        await s.idle()
        assert key in s.engine.cancelled


@pytest.mark.parametrize("way", ["call", "session"])
async def test_stalled_reader_gets_slow_consumer(tmp_path: Path, way: str) -> None:
    """The transport's windows fill up and a write blocks: the requests do not keep their slots forever."""
    async with serving(tmp_path, stall_timeout_seconds=0.2, max_unread_tokens=10**6) as s:
        before = len(asyncio.all_tasks())
        if way == "session":
            call = Caller(s).call
            await call.write(pb.SessionRequest(submits=[command(1), command(2)]))
            await s.engine.next_request(2)
        else:
            call = s.generate(text_request(output={"token_timings": True}))
            await s.engine.next_request()
        keys = [request.request_id for request in s.engine.submitted]
        for key in keys:
            s.engine.start(key)
        await call.read()
        while s.engine.requests:  # until a write blocks
            for key in s.engine.requests:
                s.engine.tokens(key, [40] * 5000)
            await asyncio.sleep(0.001)
        await s.idle()
        assert sorted(s.engine.cancelled) == sorted(keys)
        error = await error_of(call)  # reads the sent messages, then the status
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "SLOW_CONSUMER")
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_unread_tokens_of_a_session_request_are_limited(tmp_path: Path) -> None:
    """Only that request fails."""
    async with serving(tmp_path, max_unread_tokens=16) as s:
        caller = Caller(s)
        await caller.send(submit(1), submit(2))
        first, second = await s.engine.next_request(1), await s.engine.next_request(2)
        for key in (first, second):
            s.engine.start(key)
        s.engine.step({first: [40] * 17, second: [40] * 16})
        await caller.until(lambda: 1 in caller.failed and len(caller.tokens[2]) == 16)
        failure = caller.failed[1]
        assert failure.reason == "SLOW_CONSUMER"
        assert dict(failure.metadata) == {"unread_tokens": "17", "limit": "16"}
        s.engine.finish_by(second, FinishReason.LENGTH)
        await caller.until(lambda: 2 in caller.finished)
        assert {*s.engine.cancelled} == {first}


async def test_status_follows_a_stalled_first_message(tmp_path: Path) -> None:
    """The headers travel with the first message: a status sent before the message would never arrive."""
    async with (
        serving(tmp_path, stall_timeout_seconds=0.2, max_unread_tokens=10**6) as s,
        gate(tmp_path) as (address, is_open),
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = s.stub_of(channel).Generate(text_request(output={"token_timings": True}))
        key = await s.engine.next_request()
        is_open.clear()
        s.engine.start(key)
        s.engine.tokens(key, [40] * 350_000)  # too many for the buffers on the way, in one message
        await s.idle()
        assert key in s.engine.cancelled
        is_open.set()
        error = await error_of(call)
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "SLOW_CONSUMER")
