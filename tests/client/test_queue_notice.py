"""A request that waits in the queue: `on_queued` is called at once, and a command on a terminal shows the place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from client.command import spawn
from client.terminal import Terminal
from google.protobuf.duration_pb2 import Duration
from support.time_limits import PATIENCE_SECONDS

from lineclear.client import AsyncClient, Client, Queued
from lineclear.errors import InvalidRequest
from lineclear.v1 import inference_pb2 as pb

NOTICE = "waiting in the queue, 3 ahead, about 1.5 s"
PLACE = pb.Queued(requests_ahead=3, predicted_wait=Duration(seconds=1, nanos=500_000_000))


class Queue:
    """A server whose requests wait until `open` is set, and get a place if they ask for it."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.open = threading.Event()
        server.script = self.script

    def script(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.output.queue_position:
            yield pb.GenerateResponse(queued=PLACE)
        assert self.open.wait(PATIENCE_SECONDS)
        yield self.server.started()
        yield self.server.tokens(0, 1, text="one")
        yield self.server.finished(1)


@pytest.fixture
def queue(server: Any) -> Iterator[Queue]:
    queue = Queue(server)
    yield queue
    queue.open.set()


@pytest.mark.parametrize(
    "ask",
    [
        lambda client, note: client.generate("x", on_queued=note),
        lambda client, note: client.submit("x", queue_position=True).attach(on_queued=note).read_all(),
    ],
)
def test_callback_gets_the_place_while_the_request_waits(server: Any, queue: Queue, ask: Any) -> None:
    places: list[Queued] = []

    def note(queued: Queued) -> None:
        places.append(queued)
        queue.open.set()  # nothing else opens the queue

    with Client(server.target) as client:
        assert ask(client, note).text == "one"
    assert places == [Queued(3, 1.5)]


def test_coroutine_function_gets_the_place(server: Any, queue: Queue) -> None:
    places: list[Queued] = []

    async def note(queued: Queued) -> None:
        await asyncio.sleep(0)
        places.append(queued)
        queue.open.set()

    async def main() -> str:
        async with AsyncClient(server.target) as client:
            return (await client.generate("x", on_queued=note)).text

    assert asyncio.run(main()) == "one"
    assert places == [Queued(3, 1.5)]


def test_exception_of_the_callback_cancels_the_request(server: Any, queue: Queue) -> None:
    def fail(queued: Queued) -> None:
        raise ZeroDivisionError

    with Client(server.target) as client, pytest.raises(ZeroDivisionError):
        client.generate("x", on_queued=fail)


def test_client_for_threads_takes_no_coroutine_function(server: Any, queue: Queue) -> None:
    async def note(queued: Queued) -> None:
        pass

    with Client(server.target) as client, pytest.raises(TypeError, match="plain function"):
        client.generate("x", on_queued=note)


def test_submit_takes_no_callback(server: Any) -> None:
    with Client(server.target) as client, pytest.raises(InvalidRequest, match="give it to attach"):
        client.submit("x", on_queued=print)


@pytest.mark.parametrize("command", [("generate",), ("chat",)])
def test_command_on_a_terminal_shows_the_place(server: Any, queue: Queue, command: tuple[str, ...]) -> None:
    with Terminal(*command, *(("x",) if command == ("generate",) else ()), "--target", server.target) as terminal:
        if command == ("chat",):
            terminal.read_until(lambda _: "exits" in terminal.text)
            terminal.type("x\n")
        terminal.read_until(lambda _: NOTICE in terminal.text)
        queue.open.set()
        terminal.read_until(lambda _: "one" in terminal.text.partition(NOTICE)[2])


def test_command_asks_for_no_place_in_a_pipe(server: Any, queue: Queue) -> None:
    queue.open.set()
    run = spawn("generate", "x", "--target", server.target)
    out, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert (run.returncode, out, err) == (0, b"one\n", b"")
    assert not server.requests[0].output.queue_position


def test_quiet_command_shows_no_place(server: Any, queue: Queue) -> None:
    queue.open.set()
    with Terminal("generate", "x", "--quiet", "--target", server.target) as terminal:
        terminal.read_until(lambda _: "one" in terminal.text)
        assert "waiting" not in terminal.text
    assert not server.requests[0].output.queue_position
