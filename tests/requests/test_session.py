"""Sessions: many requests over one call get the same answers as by Generate, and do not affect each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import grpc.aio
import pytest
from support.answers import answered, invalid_fields
from support.serving import HELLO_IDS, Serving, error_of, serving, text_of, text_request, tokens_of, until
from support.session_driver import Caller, cancel, command, submit

from lineclear.errors import DeviceOutOfMemory
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.requests.admission import Admission
from lineclear.scheduler.requests.session import Session
from lineclear.scheduler.security.identity import ANONYMOUS
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Logprobs


async def test_one_message_has_the_tokens_of_a_step(s: Serving) -> None:
    caller = Caller(s)
    await caller.send(*(submit(n) for n in range(5)))
    await s.engine.next_request(5)
    keys = [r.request_id for r in s.engine.submitted]
    for key in keys:
        s.engine.start(key)
    await caller.until(lambda: len(caller.started) == 5)
    before = len(caller.messages)
    # Tokens that the engine publishes together are one step.
    s.engine.step({key: [HELLO_IDS[0]] for key in keys})
    await caller.read()
    assert len(caller.messages) == before + 1
    assert sorted(caller.messages[-1].handles) == [0, 1, 2, 3, 4]
    assert not caller.messages[-1].events
    for token in HELLO_IDS[1:]:
        s.engine.step({key: [token] for key in keys})
    for key in keys:
        s.engine.finish_by(key, FinishReason.LENGTH)
    await caller.call.done_writing()
    await caller.to_the_end()
    assert {n: caller.tokens[n] for n in range(5)} == dict.fromkeys(range(5), HELLO_IDS)
    assert set(caller.text.values()) == {"Hello, how are you?"}
    assert {f.usage.completion_tokens for f in caller.finished.values()} == {len(HELLO_IDS)}
    assert await caller.call.code() is grpc.StatusCode.OK
    await s.idle()


@pytest.mark.parametrize(
    "request_",
    [
        text_request(),
        text_request(output=pb.OutputOptions(omit_text=True)),
        text_request(output=pb.OutputOptions(token_timings=True)),
        text_request(stop={"strings": ["how"]}),
        text_request(stop={"strings": ["how"]}, output=pb.OutputOptions(omit_text=True)),
        text_request(sampling={"temperature": 0.0, "max_tokens": 40}),
    ],
    ids=["plain", "no text", "times", "stop", "stop without text", "greedy"],
)
async def test_answer_equals_generate(s: Serving, request_: pb.GenerateRequest) -> None:
    alone = await answered(s, HELLO_IDS, request_)
    s.engine.answer = None
    caller = Caller(s)
    await caller.send(submit(7, request_))
    key = await s.engine.next_request(2)
    s.engine.start(key)
    for count, token in enumerate(HELLO_IDS, 1):
        if key in s.engine.requests:  # or a stop string has ended it
            s.engine.tokens(key, [token])
            await caller.until(lambda: len(caller.tokens[7]) >= count)  # noqa: B023
    s.engine.finish_by(key, FinishReason.LENGTH)
    await caller.call.done_writing()
    await caller.to_the_end()
    assert (caller.tokens[7], caller.text[7]) == (tokens_of(alone), text_of(alone))
    for name in ("finish_reason", "matched_stop_string", "usage"):
        assert getattr(caller.finished[7], name) == getattr(alone[-1].finished, name)


async def test_logprobs_and_times_come_as_events(s: Serving) -> None:
    caller = Caller(s)
    await caller.send(submit(1, text_request(output={"token_timings": True})))
    await caller.send(submit(2, text_request(output={"logprobs": True})))
    keys = [await s.engine.next_request(number) for number in (1, 2)]
    for key in keys:
        s.engine.start(key)
    await caller.until(lambda: len(caller.started) == 2)
    s.engine.tokens(keys[0], HELLO_IDS[:1])
    s.engine.tokens(keys[1], HELLO_IDS[:1], [Logprobs(-0.5)])
    await caller.until(lambda: caller.tokens[1] and caller.tokens[2])
    found = [event.response for message in caller.messages for event in message.events]
    assert [len(response.token_times_us) for response in found if response.token_times_us] == [1]
    assert [entry.logprob for response in found for entry in response.logprobs] == [-0.5]


async def test_error_ends_one_request_only(s: Serving) -> None:
    caller = Caller(s)
    wrong = text_request(sampling={"top_p": 7.0})
    await caller.send(submit(1), submit(2, wrong), submit(3, text_request("x" * 600)))
    await s.engine.next_request(1)
    alone = await error_of(s.generate(wrong))
    await caller.until(lambda: {2, 3} <= caller.failed.keys())
    failure = caller.failed[2]
    assert (failure.code, failure.reason, str(failure)) == (alone.code, alone.reason, str(alone))
    assert [v.field for v in failure.violations] == ["sampling.top_p"]
    assert caller.failed[3].reason == "PROMPT_TOO_LONG"
    key = s.engine.submitted[0].request_id
    s.engine.start(key)
    s.engine.fail(key, DeviceOutOfMemory("too large"))
    await caller.until(lambda: 1 in caller.failed)
    assert (caller.failed[1].code, caller.failed[1].reason) == ("RESOURCE_EXHAUSTED", "DEVICE_OUT_OF_MEMORY")
    caller.failed.clear()
    caller.started.clear()
    await caller.send(submit(1))  # the handle is free again, and the session continues
    s.engine.start(await s.engine.next_request(2))
    await caller.until(lambda: 1 in caller.started)


async def test_requests_of_a_session_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineclear.scheduler.requests.session.MAX_REQUESTS", 3)
    async with serving(tmp_path) as s:
        caller = Caller(s)
        await caller.send(*(submit(n) for n in range(4)))
        await caller.until(lambda: caller.failed)
        assert caller.failed.keys() == {3}
        assert caller.failed[3].metadata == {"limit": "3"}


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_hang_up_cancels_all_requests(s: Serving, how: str) -> None:
    channel = grpc.aio.insecure_channel(s.server.address)
    call = channel.stream_stream("/lineclear.v1.InferenceService/Session", pb.SessionRequest.SerializeToString, None)()
    for handle in range(3):
        await call.write(submit(handle))
    await s.engine.next_request(3)
    s.engine.start(s.engine.submitted[0].request_id)
    await call.read()
    if how == "cancel":
        call.cancel()
    await channel.close()
    await s.idle()
    assert sorted(s.engine.cancelled) == sorted(r.request_id for r in s.engine.submitted)


async def test_request_deadline_is_within_the_calls(tmp_path: Path) -> None:
    async with serving(tmp_path, default_deadline_seconds=500.0) as s:
        caller, unbounded = Caller(s, timeout=100.0), Caller(s)
        before = monotonic()
        await caller.send(submit(0, text_request(request_id="short"), 20.0))
        await caller.send(submit(1, text_request(request_id="long"), 300.0))
        await unbounded.send(submit(0, text_request(request_id="default")))
        await until(lambda: len(s.engine.submitted) == 3)
        spent = monotonic() - before
        seconds = {r.request_id.partition("~")[0]: (r.deadline or 0.0) - before for r in s.engine.submitted}
        assert 20 <= seconds["short"] <= 20 + spent
        # gRPC rounds the timeout of a call.
        assert 90 < seconds["long"] < 110, "the call's own deadline bounds it"
        assert 500 <= seconds["default"] <= 500 + spent


async def test_drain_completes_answers_then_ends_the_session(s: Serving) -> None:
    caller, idler = Caller(s), Caller(s)
    await caller.send(submit(1), submit(2))
    await idler.send(cancel(1))
    await s.engine.next_request(2)
    await until(lambda: len(s.manager.sessions) == 2)
    keys = [r.request_id for r in s.engine.submitted]
    s.engine.start(keys[0])
    drain = asyncio.create_task(s.manager.drain(timeout_seconds=1.0))
    await until(lambda: s.engine.is_draining)
    assert (await error_of(idler.call)).reason == "SERVER_DRAINING"
    await caller.send(submit(3))
    await caller.until(lambda: caller.failed)
    assert caller.failed[3].reason == "SERVER_DRAINING"
    s.engine.tokens(keys[0], HELLO_IDS)
    s.engine.finish_by(keys[0], FinishReason.LENGTH)
    await caller.until(lambda: len(caller.failed) == 2)
    ended, cut = (1, 2) if 1 in caller.finished else (2, 1)
    assert caller.tokens[ended] == HELLO_IDS
    assert (caller.failed[cut].code, caller.failed[cut].reason) == ("UNAVAILABLE", "SHUTDOWN_INTERRUPTED")
    assert (await error_of(caller.call)).reason == "SERVER_DRAINING"
    await drain


async def test_slow_reader_gets_larger_messages(tmp_path: Path) -> None:
    async with serving(tmp_path, max_unread_tokens=200_000) as s:
        # Otherwise the data hidden in the transport would grow without bound.
        channel = grpc.aio.insecure_channel(s.server.address, options=[("grpc.http2.bdp_probe", 0)])
        slow, fast = Caller(s, channel), Caller(s)
        request = text_request(output=pb.OutputOptions(omit_text=True))
        await slow.send(submit(1, request))
        slow_key = await s.engine.next_request(1)
        await fast.send(submit(1, request))
        fast_key = await s.engine.next_request(2)
        for key in (slow_key, fast_key):
            s.engine.start(key)
        await fast.until(lambda: fast.started)

        # More than the transport buffers: from some point the writer blocks, and tokens accumulate.
        for count in range(100, 50_001, 100):
            s.engine.step({slow_key: [5] * 100, fast_key: [6] * 100})
            await fast.until(lambda: len(fast.tokens[1]) == count)  # noqa: B023
        for key in (slow_key, fast_key):
            s.engine.finish_by(key, FinishReason.LENGTH)
        await slow.until(lambda: slow.finished)
        assert slow.tokens[1] == [5] * 50_000
        assert len(slow.messages) < len(fast.messages)
        await channel.close()


def new_session(s: Serving) -> Session:
    """Return a session whose output is read by calling `next_response`."""
    return Session(s.manager.requests, ANONYMOUS, "", lambda: None, deadline=None)


async def test_message_without_commands_ends_the_session(s: Serving) -> None:
    for wrong in (pb.SessionRequest(), submit(1)):
        caller = Caller(s)
        await caller.send(submit(1), wrong)
        assert (await error_of(caller.call)).reason == "INVALID_REQUEST"
    raw = s.channel.stream_stream("/lineclear.v1.InferenceService/Session")()
    await raw.write(b"\xff\xff\xff")
    assert (await error_of(raw)).reason == "MALFORMED_MESSAGE"


async def test_commands_of_a_message_run_in_order(s: Serving) -> None:
    caller = Caller(s)
    together = pb.SessionRequest(
        submits=[command(n) for n in range(5)],
        cancels=[pb.CancelCommand(handle=3), pb.CancelCommand(handle=99)],
    )
    await caller.send(together)
    await caller.until(lambda: caller.failed)
    assert {handle: failure.reason for handle, failure in caller.failed.items()} == {3: "CANCELLED"}
    await until(lambda: len(s.engine.submitted) >= 4)
    keys = [r.request_id for r in s.engine.submitted if r.request_id not in s.engine.cancelled]
    assert len(keys) == 4
    for token, key in enumerate(keys, 5):
        s.engine.start(key)
        s.engine.tokens(key, [token])
        s.engine.finish_by(key, FinishReason.LENGTH)
    await caller.until(lambda: len(caller.finished) == 4)
    assert dict(caller.tokens) == {0: [5], 1: [6], 2: [7], 4: [8]}


@pytest.mark.parametrize(
    ("handles", "cancels", "field"),
    [(range(32), [1], "submits"), ([1, 2, 1], [], "submits[2].handle")],
    ids=["more than 32 commands", "a handle twice"],
)
async def test_wrong_message_ends_the_session(
    s: Serving, handles: Iterable[int], cancels: list[int], field: str
) -> None:
    caller = Caller(s)
    message = pb.SessionRequest(submits=map(command, handles))
    for handle in cancels:
        message.cancels.add(handle=handle)
    await caller.send(message)
    assert await invalid_fields(caller.call) == [field]
    await s.idle()
    if field == "submits":
        assert not s.engine.submitted, "the message is refused as a whole"


@pytest.mark.parametrize("per_message", [1, 25])
async def test_commands_wait_for_unread_rejections(tmp_path: Path, per_message: int) -> None:
    async with serving(tmp_path, max_queue_size=1) as s:
        num_read = 0

        async def commands() -> AsyncIterator[pb.SessionRequest]:
            nonlocal num_read
            for handle in range(0, 1000, per_message):
                num_read += per_message
                wrong = text_request(sampling={"top_p": 7.0})
                yield pb.SessionRequest(submits=[command(handle + n, wrong) for n in range(per_message)])

        session = new_session(s)
        listening = asyncio.ensure_future(session.run(commands()))
        await until(lambda: num_read >= 256)
        for _ in range(10):
            await asyncio.sleep(0)
        assert num_read <= 256 + per_message
        first = await session.next_response()
        assert first is not None
        failed = len(first.events)
        assert failed == 256
        while (message := await session.next_response()) is not None:
            failed += len(message.events)
        assert failed == 1000
        await listening


async def test_unread_cancellations_do_not_fill_the_queue(tmp_path: Path) -> None:
    """A cancelled request leaves the queue before its client reads of it, so that others are admitted."""
    async with serving(tmp_path, max_queue_size=4) as s:
        handles = range(4)

        async def commands() -> AsyncIterator[pb.SessionRequest]:
            cancels = [pb.CancelCommand(handle=handle) for handle in handles]
            yield pb.SessionRequest(submits=[command(handle) for handle in handles], cancels=cancels)

        session = new_session(s)
        await session.run(commands())
        other = s.generate(text_request())
        await until(lambda: bool(s.engine.submitted) or other.done())
        assert not other.done(), await other.code()
        failed = await session.next_response()
        assert failed is not None
        assert [event.handle for event in failed.events] == [*handles]
        other.cancel()


async def test_large_commands_leave_loop_time_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking thirty-two commands without a pause delayed every stream by a tenth of a second."""
    iterations, opened = 0, []
    real = Admission.admit

    def counted(self: Admission, *arguments: Any) -> Any:
        opened.append(iterations)
        return real(self, *arguments)

    monkeypatch.setattr(Admission, "admit", counted)

    async with serving(tmp_path) as s:
        callers = [Caller(s), Caller(s)]
        large = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 2000))
        for caller in callers:
            await caller.send(pb.SessionRequest(submits=[command(n, large) for n in range(14)]))
        calls = [s.generate(large) for _ in range(4)]
        while len(opened) < 32:
            await asyncio.sleep(0)
            iterations += 1
        assert len(set(opened)) == 32
        for call in (*calls, *(caller.call for caller in callers)):
            call.cancel()
        await s.idle()
