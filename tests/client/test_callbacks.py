"""`on_delta` and `on_token`: what they get, in which order, and what an exception in one does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from support.time_limits import PATIENCE_SECONDS

from lineclear.client import AsyncClient, Client, Delta, Request
from lineclear.client.testing import Answer, FakeTransport
from lineclear.errors import ConnectionLost
from lineclear.v1 import inference_pb2 as pb


class Broken(Exception):
    """Raised by a callback."""


def test_callbacks_get_every_delta_and_token(client: Any) -> None:
    deltas: list[Delta] = []
    token_ids: list[int] = []
    answer = client.generate("one two three", on_delta=deltas.append, on_token=token_ids.append)
    assert "".join(delta.text for delta in deltas) == answer.text
    assert (deltas[0].started, deltas[-1].finish_reason) == (answer.started, answer.finish_reason)
    assert tuple(token_ids) == answer.token_ids


def test_callback_runs_before_the_loop_has_the_delta(client: Any) -> None:
    called: list[Delta] = []
    deltas, _ = client.read("one two", on_delta=called.append)
    assert called == deltas


def test_callbacks_run_on_the_thread_of_the_reader(server: Any) -> None:
    threads = set[threading.Thread]()
    with Client(server.target) as client:
        client.generate("one", on_token=lambda _: threads.add(threading.current_thread()))
    assert threads == {threading.current_thread()}


def test_resumed_answer_calls_back_once_for_each_token() -> None:
    token_ids: list[int] = []
    fake = FakeTransport(Answer(pieces=("a", "b", "c"), error=ConnectionLost("cut")))
    answer = Client(transport=fake).generate("x", on_token=token_ids.append)
    assert (bytes(token_ids), answer.resumes) == (b"abc", 1)


def endless(server: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.started()
        yield server.tokens(0, 1, 2, text="one two")
        server.wait_for_end(context)

    server.script = script


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
@pytest.mark.parametrize("name", ["on_delta", "on_token"])
def test_exception_cancels_the_request_and_reaches_the_caller(kind: str, name: str) -> None:
    def callback(value: Any) -> None:
        if not isinstance(value, Delta) or value.token_ids:
            raise Broken

    def run() -> None:
        if kind == "sync":
            Client(transport=fake).generate("x", **{name: callback})
        else:
            asyncio.run(AsyncClient(transport=fake).generate("x", **{name: callback}))

    fake = FakeTransport("one two")
    with pytest.raises(Broken):
        run()
    assert fake.cancelled == 1


def test_stream_keeps_its_tokens_after_an_exception(server: Any) -> None:
    def callback(token_id: int) -> None:
        raise Broken

    endless(server)
    with Client(server.target) as client, client.stream("x", on_token=callback) as stream:
        with pytest.raises(Broken):
            list(stream)
        assert (stream.text, stream.token_ids) == ("one two", (1, 2))
        assert list(stream) == []


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_exception_ends_a_batch(kind: str) -> None:
    def callback(delta: Delta) -> None:
        raise Broken

    prompts = ["a", Request(prompt="b", on_delta=callback), *"cdefgh"]
    fake = FakeTransport("ok")

    def run() -> None:
        if kind == "sync":
            Client(transport=fake).generate_batch(prompts, concurrency=2, return_exceptions=True)
        else:
            client = AsyncClient(transport=fake)
            asyncio.run(client.generate_batch(prompts, concurrency=2, return_exceptions=True))

    with pytest.raises(Broken):
        run()


async def test_coroutine_functions_are_awaited() -> None:
    seen: list[int] = []

    async def callback(token_id: int) -> None:
        await asyncio.sleep(0)
        seen.append(token_id)

    await AsyncClient(transport=FakeTransport("hello")).generate("x", on_token=callback)
    assert bytes(seen) == b"hello"
    fake = FakeTransport("hello")
    with pytest.raises(TypeError, match="plain function"):
        await asyncio.to_thread(Client(transport=fake).generate, "x", on_token=callback)
    assert fake.cancelled == 1


def test_submitted_answer_calls_back_in_the_background(server: Any) -> None:
    token_ids: list[int] = []
    with Client(server.target) as client:
        submitted = client.submit("one two", on_token=token_ids.append)
        assert submitted.future().result(PATIENCE_SECONDS).text == "one two"
        assert token_ids == [100, 101]
        ended = threading.Event()
        client.submitted(submitted.request_id).future().add_done_callback(lambda _: ended.set())
        assert ended.wait(PATIENCE_SECONDS)


async def test_submitted_answer_calls_back_in_a_task(server: Any) -> None:
    def callback(token_id: int) -> None:
        raise Broken

    async with AsyncClient(server.target) as client:
        submitted = await client.submit("one two", on_token=callback)
        with pytest.raises(Broken):
            await submitted.future()
        assert (await submitted.result()).text == "one two"  # the request goes on
