"""A server that refuses a Session before it has answered anything on it still answers the requests, each as a call."""

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
from lineclear.errors import LineclearError, QueueFull, UnknownStatus, Unsupported
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


def test_clients_that_share_a_connection_all_get_their_answers(target: str) -> None:
    with Client(target) as first, Client(target) as second:
        first.generate_many(PROMPTS, **ASKED)  # its Session stays open
        with second.stream([1, 2], **LONG):  # so that every other request goes through a Session
            assert [list(found.token_ids) for found in second.generate_many(PROMPTS, **ASKED)] == RIGHT


async def test_so_do_those_of_an_event_loop(target: str) -> None:
    async with AsyncClient(target) as first, AsyncClient(target) as second:
        await first.generate_many(PROMPTS, **ASKED)
        async with second.stream([1, 2], **LONG):
            assert [list(found.token_ids) for found in await second.generate_many(PROMPTS, **ASKED)] == RIGHT


REFUSALS = [
    QueueFull("too many sessions", retry_after_seconds=1.0),
    Unsupported("no such method"),
    UnknownStatus("a proxy allows Generate alone"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: error.reason)
def test_no_attempt_is_used_up_by_the_refusal(server: Any, client: Any, refusal: LineclearError) -> None:
    """`client` makes one attempt of each call."""
    gate = threading.Barrier(len(PROMPTS))
    opened = []

    def session(orders: Any, context: grpc.ServicerContext) -> Iterator[pb.SessionResponse]:
        opened.append(None)
        if isinstance(refusal, UnknownStatus):
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(refusal))
        server.fail(context, refusal)
        yield

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        gate.wait(PATIENCE_SECONDS)
        yield server.finished(0)

    server.session, server.script = session, script
    found = client.generate_many(["x"] * len(PROMPTS))
    assert [one.finish_reason for one in found] == ["length"] * len(PROMPTS)
    assert len(opened) == 1


def test_a_session_that_answered_and_then_failed_is_not_a_refusal(server: Any) -> None:
    """The request may have run: only the policy of retries asks for it again."""
    heard = threading.Event()

    def session(orders: Any, context: grpc.ServicerContext) -> Iterator[pb.SessionResponse]:
        handle = next(orders).submits[0].handle
        yield pb.SessionResponse(events=[pb.SessionEvent(handle=handle, response=server.started())])
        heard.set()
        server.fail(context, QueueFull("no more"))

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.started()
        assert heard.wait(PATIENCE_SECONDS)
        yield server.finished(0)

    server.session, server.script = session, script
    with Client(server.target) as client:
        first, second = client.generate_many(["x", "x"], return_exceptions=True)
    assert {type(first).__name__, type(second).__name__} == {"Generation", "QueueFull"}
