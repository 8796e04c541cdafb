"""How the calls of both clients end: left, cancelled, late, failed, cut off, closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from client.conftest import hold, network
from support.time_limits import PATIENCE_SECONDS

from lineclear import errors
from lineclear.client import AsyncClient, Client
from lineclear.errors import LineclearError, QueueFull, Unreachable, Violation, tree
from lineclear.v1 import inference_pb2 as pb


def test_leaving_the_block_cancels_the_call(server: Any, client: Any) -> None:
    server.script = hold
    reached: list[bool] = []
    client.after_block = lambda: reached.append(server.ended.wait(PATIENCE_SECONDS))
    deltas, _ = client.read("x", take=2)
    assert (len(deltas), reached) == (2, [True])


def test_an_error_in_the_block_cancels_the_call(server: Any) -> None:
    server.script = hold
    with Client(server.target) as client:
        with contextlib.suppress(KeyError), client.stream("x") as stream:
            next(stream)
            raise KeyError
        assert server.ended.wait(PATIENCE_SECONDS)


def test_cancelling_from_another_thread_ends_the_loop(server: Any) -> None:
    server.script = hold
    with Client(server.target) as client, client.stream("x") as stream:
        assert [next(stream).text, next(stream).text] == ["", "a"]
        thread = threading.Thread(target=stream.cancel)
        thread.start()
        with pytest.raises(errors.Cancelled):
            next(stream)
        thread.join()
        with pytest.raises(StopIteration):
            next(stream)
        assert server.ended.wait(PATIENCE_SECONDS)


def test_cancelling_from_another_task_ends_the_loop(server: Any) -> None:
    server.script = hold

    async def run() -> None:
        async with AsyncClient(server.target) as client, client.stream("x") as stream:
            assert [(await anext(stream)).text, (await anext(stream)).text] == ["", "a"]
            asyncio.get_running_loop().call_soon(stream.cancel)
            with pytest.raises(errors.Cancelled):
                await anext(stream)

    asyncio.run(run())
    assert server.ended.wait(PATIENCE_SECONDS)


def test_cancelled_task_cancels_its_call(server: Any) -> None:
    server.script = hold

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            begun = asyncio.Event()

            async def read() -> None:
                async with client.stream("x") as stream:
                    await anext(stream)
                    begun.set()
                    async for _ in stream:
                        pass

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.ended.wait, PATIENCE_SECONDS)

    asyncio.run(run())


def test_cancelling_during_a_pause_between_attempts_ends_the_pause(server: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=3600.0)]
    with Client(server.target, timeout_seconds=None) as client, client.stream("x") as stream:
        timer = threading.Timer(0.05, stream.cancel)
        timer.start()
        with pytest.raises(errors.Cancelled):
            next(stream)
        timer.join()

    async def run() -> None:
        server.failures = [QueueFull("full", retry_after_seconds=3600.0)]
        async with AsyncClient(server.target, timeout_seconds=None) as client, client.stream("x") as stream:
            asyncio.get_running_loop().call_later(0.05, stream.cancel)
            with pytest.raises(errors.Cancelled):
                await anext(stream)

    asyncio.run(run())
    assert len(server.requests) == 2  # neither was asked again


def test_deadline_during_the_answer(server: Any, client: Any) -> None:
    server.script = hold
    with pytest.raises(errors.DeadlineExceeded, match="before the answer was complete"):
        client.generate("x", timeout_seconds=0.3)


KINDS = [kind for kind in tree() if kind not in (LineclearError, errors.UnknownStatus)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_keeps_its_class_and_fields(server: Any, client: Any, kind: type[LineclearError]) -> None:
    sent = kind(
        "what happened",
        retry_after_seconds=1.5,
        metadata={"limit": "512"},
        violations=[Violation("sampling.top_p", "is above 1")],
    )
    server.failures = [sent]
    with pytest.raises(LineclearError) as caught:
        client.generate("x")
    got = caught.value
    assert type(got) is kind
    assert str(got) == "what happened"
    assert (got.code, got.reason, got.retry_after_seconds, got.metadata, got.violations) == (
        sent.code, sent.reason, sent.retry_after_seconds, sent.metadata, sent.violations,
    )  # fmt: skip


def test_no_two_errors_share_a_reason() -> None:
    assert len({kind.reason for kind in KINDS}) == len(KINDS)


def test_an_error_after_some_tokens_is_raised_after_them(server: Any, client: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.tokens(0, 1, text="a")
        server.fail(context, errors.NonFiniteLogits("gone"))

    server.script = script
    with pytest.raises(errors.NonFiniteLogits, match="gone"):
        client.with_settings(max_attempts=5).generate("x")
    assert len(server.requests) == 1  # half an answer is never asked for again


def test_unknown_status_keeps_its_code(server: Any, client: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "no token")
        yield server.started()

    server.script = script
    with pytest.raises(errors.UnknownStatus, match="no token") as caught:
        client.generate("x")
    assert caught.value.code == "PERMISSION_DENIED"


def test_no_server_is_unreachable(tmp_path: Path, client: Any) -> None:
    client.target = f"unix:{tmp_path}/nobody"
    for call in (client.generate, client.tokenize, client.health):
        with pytest.raises(Unreachable, match="no answer from unix:"):
            call("x")


def test_server_that_accepts_late_is_reached(server: Any, client: Any) -> None:
    with network(server.target, accepts_after_seconds=2.0) as (client.target, _):
        assert client.generate("one two").text == "one two"


def test_server_crash_during_an_answer_is_unreachable(server: Any, client: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.started()
        threading.Thread(target=server.stop).start()
        server.wait_for_end(context)

    server.script = script
    with pytest.raises(Unreachable):
        client.generate("x")


@pytest.mark.parametrize("how", ["status", "connection"])
@pytest.mark.parametrize("call", ["generate", "attach"])
def test_answer_is_complete_without_its_status(server: Any, client: Any, how: str, call: str) -> None:
    """Between the last message and the trailers."""

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        calls.append(len(request.resume.token_ids))
        yield server.started()
        yield server.tokens(0, 1, 2, text="all of it")
        yield server.finished(2)
        if how == "status":
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        threading.Thread(target=server.stop).start()
        server.wait_for_end(context)

    calls: list[int] = []
    server.script = script
    client = client.with_settings(max_attempts=4)
    if call == "generate":
        answer = client.generate("x")
    else:
        server.submitted["kept"] = pb.GenerateRequest(text="x")
        answer = attached(client, "kept")
    assert (answer.text, answer.finish_reason, answer.resumes) == ("all of it", "length", 0)
    assert calls == [0]


def attached(client: Any, request_id: str) -> Any:
    """The result of a submitted request, by either client."""
    if client.kind == "sync":
        with Client(client.target) as threaded:
            return threaded.submitted(request_id).result()

    async def run() -> Any:
        async with AsyncClient(client.target) as own:
            return await own.submitted(request_id).result()

    return asyncio.run(run())


def test_call_cancelled_by_the_server_is_retried(server: Any, client: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if len(server.requests) == 1:
            context.abort(grpc.StatusCode.CANCELLED, "stopping")  # as a server does that is being stopped
        yield server.finished(0)

    server.script = script
    with pytest.raises(Unreachable, match="it ended the call"):
        client.generate("x")
    server.requests.clear()
    client.with_settings(max_attempts=2).generate("x")
    assert len(server.requests) == 2


def test_close_cancels_running_calls(server: Any) -> None:
    server.script = hold
    client = Client(server.target)
    with client.stream("x") as stream:
        next(stream)
        next(stream)
        threading.Thread(target=client.close).start()
        with pytest.raises(errors.Cancelled):
            next(stream)
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.generate("x")

    async def run() -> None:
        async with AsyncClient(server.target) as client, client.stream("x") as stream:
            await anext(stream)
            await anext(stream)
            closing = asyncio.create_task(client.close())
            with pytest.raises(errors.Cancelled):
                await anext(stream)
            await closing
            with pytest.raises(RuntimeError, match="the client is closed"):
                await client.generate("x")

    asyncio.run(run())


def test_async_client_belongs_to_one_event_loop(server: Any) -> None:
    client = AsyncClient(server.target)
    assert asyncio.run(client.generate("a b")).text == "a b"
    with pytest.raises(RuntimeError, match="event loop of its first call"):
        asyncio.run(client.generate("a b"))
