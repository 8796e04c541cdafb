"""A server without room for a Session answers its requests all the same, each as a direct call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.sockets import free_ports
from support.time_limits import PATIENCE_SECONDS
from support.toy_service import answer, toy_service

from lineclear.client import AsyncClient, Client
from lineclear.client.session_messages import SessionRefused
from lineclear.errors import Cancelled, QueueFull
from lineclear.v1 import inference_pb2 as pb

PROMPTS = [[5, 6, 7 + n] for n in range(8)]
ASKED: dict[str, Any] = {"max_tokens": 10, "seed": 3, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 500, "seed": 3, "ignore_eos": True}
RIGHT = [answer(prompt, 10, seed=3) for prompt in PROMPTS]


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    """A server that takes one Session for each connection. All clients of a process share their connection to it."""
    target = f"127.0.0.1:{free_ports(1)[0]}"
    steps = {"min_step_seconds": 0.02, "max_step_seconds": 0.02}
    with toy_service(tmp_path, "--max-sessions-per-connection", "1", target=target, **steps):
        yield target


def test_clients_on_one_connection_all_get_answers(target: str) -> None:
    with Client(target) as first, Client(target) as second:
        first.generate_batch(PROMPTS, **ASKED)  # its Session stays open
        with second.stream([1, 2], **LONG):  # so every other request asks for a Session
            assert [list(found.token_ids) for found in second.generate_batch(PROMPTS, **ASKED)] == RIGHT


async def test_async_clients_on_one_connection_all_get_answers(target: str) -> None:
    async with AsyncClient(target) as first, AsyncClient(target) as second:
        await first.generate_batch(PROMPTS, **ASKED)
        async with second.stream([1, 2], **LONG):
            assert [list(found.token_ids) for found in await second.generate_batch(PROMPTS, **ASKED)] == RIGHT


def test_a_refused_session_uses_up_no_attempt(server: Any, client: Any) -> None:
    """`client` makes one attempt of each call."""
    gate = threading.Barrier(len(PROMPTS))
    opened = []

    def session(orders: Any, context: grpc.ServicerContext) -> Iterator[pb.SessionResponse]:
        opened.append(None)
        server.fail(context, QueueFull("too many sessions", retry_after_seconds=1.0))
        yield

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        gate.wait(PATIENCE_SECONDS)
        yield server.finished(0)

    server.session, server.script = session, script
    found = client.generate_batch(["x"] * len(PROMPTS))
    assert [one.finish_reason for one in found] == ["length"] * len(PROMPTS)
    assert len(opened) == 1


def test_a_session_that_failed_after_a_response_is_not_refused(server: Any) -> None:
    """The request may have run: only the retry policy sends it again."""
    was_read = threading.Event()

    def session(orders: Any, context: grpc.ServicerContext) -> Iterator[pb.SessionResponse]:
        context.send_initial_metadata(())
        handle = next(orders).submits[0].handle
        yield pb.SessionResponse(events=[pb.SessionEvent(handle=handle, response=server.started())])
        was_read.set()
        server.fail(context, QueueFull("no more"))

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.started()
        assert was_read.wait(PATIENCE_SECONDS)
        yield server.finished(0)

    server.session, server.script = session, script
    with Client(server.target) as client:
        first, second = client.generate_batch(["x", "x"], return_exceptions=True)
    assert {type(first).__name__, type(second).__name__} == {"Generation", "QueueFull"}


class RefusedThenDirect:
    """A transport whose first call ends with SessionRefused. The second starts while `cancel` is called."""

    target = "unix:fake"
    cancel = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.num_calls = 0

    def stream(self, *_: Any, **__: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == 2:
            self.cancel()
        call = FakeCall()
        call.is_refused = self.num_calls == 1
        return call

    stream_async = stream


class FakeCall:
    """A call that ends once it is cancelled."""

    is_refused = False
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def __next__(self) -> Any:
        if self.is_refused:
            raise SessionRefused
        assert self.is_cancelled, "it would never end"
        raise Cancelled("the call was cancelled")

    async def __anext__(self) -> Any:
        return next(self)


def test_a_cancellation_between_the_two_calls_is_kept() -> None:
    transport: Any = RefusedThenDirect()
    with Client(transport=transport).stream("x") as stream:
        transport.cancel = stream.cancel
        with pytest.raises(Cancelled):
            next(stream)


async def test_an_async_cancellation_between_the_two_calls_is_kept() -> None:
    transport: Any = RefusedThenDirect()
    async with AsyncClient(transport=transport).stream("x") as stream:
        transport.cancel = stream.cancel
        with pytest.raises(Cancelled):
            await anext(stream)
