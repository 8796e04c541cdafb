"""Session commands: single, batched, too many, invalid, and with a client that does not read the rejections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import (
    Serving,
    error_of,
    serving,
    text_request,
    until,
)
from support.session_driver import Caller, command, submit

from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.requests.admission import Admission
from lineclear.scheduler.requests.session import Session
from lineclear.scheduler.security.identity import ANONYMOUS
from lineclear.v1 import inference_pb2 as pb


def new_session(s: Serving) -> Session:
    """Return a session whose output is read by calling `next_response`."""
    return Session(s.manager.requests, ANONYMOUS, "", lambda: None, deadline=None)


async def test_message_without_commands_ends_the_session(s: Serving) -> None:
    for wrong in (pb.SessionRequest(), submit(1)):
        caller = Caller(s)
        await caller.send(submit(1), wrong)
        assert (await error_of(caller.call)).reason == "INVALID_REQUEST"
        await s.idle()
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


async def test_more_than_32_commands_in_a_message_are_rejected(s: Serving) -> None:
    caller = Caller(s)
    many = pb.SessionRequest(submits=[command(n) for n in range(32)])
    many.cancels.add(handle=1)
    await caller.send(many)
    error = await error_of(caller.call)
    assert (error.reason, [v.field for v in error.violations]) == ("INVALID_REQUEST", ["submits"])
    await s.idle()
    assert not s.engine.submitted


async def test_duplicate_handle_in_a_message_is_named(s: Serving) -> None:
    caller = Caller(s)
    await caller.send(pb.SessionRequest(submits=[command(1), command(2), command(1)]))
    error = await error_of(caller.call)
    assert [v.field for v in error.violations] == ["submits[2].handle"]
    await s.idle()


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
        assert len(session._failures) == 256
        failed = 0
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
