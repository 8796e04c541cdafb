"""A request that waits: `on_queued` is called with its place, and a command says what it waits for, once."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from client.conftest import Clock, finished, started, tokens
from client.terminal import Terminal
from google.protobuf.duration_pb2 import Duration
from support.time_limits import PATIENCE_SECONDS

from lineclear.cli import wait_notice
from lineclear.cli.wait_notice import WaitNotice
from lineclear.client import AsyncClient, Client, Queued, RetryPolicy
from lineclear.client.retry import ResumeState, RetryState, RetryWait
from lineclear.errors import ConnectionLost, InvalidRequest, QueueFull, ServerStarting, ShutdownInterrupted
from lineclear.v1 import inference_pb2 as pb

NOTICE = "waiting in the queue, 3 ahead, about 1.5 s"
PLACE = pb.Queued(requests_ahead=3, predicted_wait=Duration(seconds=1, nanos=500_000_000))


class Queue:
    """A server whose requests wait until `open` is set, and get a place if they ask for it."""

    def __init__(self, server: Any) -> None:
        self.open = threading.Event()
        server.script = self.script

    def script(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.output.queue_position:
            yield pb.GenerateResponse(queued=PLACE)
        assert self.open.wait(PATIENCE_SECONDS)
        yield started()
        yield tokens(0, 1, text="one")
        yield finished(1)


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


async def test_coroutine_function_gets_the_place(server: Any, queue: Queue) -> None:
    places: list[Queued] = []

    async def note(queued: Queued) -> None:
        await asyncio.sleep(0)
        places.append(queued)
        queue.open.set()

    async with AsyncClient(server.target) as client:
        assert (await client.generate("x", on_queued=note)).text == "one"
    assert places == [Queued(3, 1.5)]


@pytest.mark.usefixtures("queue")
def test_callback_may_not_fail_or_be_a_coroutine_function_or_of_submit(server: Any) -> None:
    def fail(queued: Queued) -> None:
        raise ZeroDivisionError

    async def note(queued: Queued) -> None:
        pass

    with Client(server.target) as client:
        with pytest.raises(ZeroDivisionError):
            client.generate("x", on_queued=fail)
        with pytest.raises(TypeError, match="plain function"):
            client.generate("x", on_queued=note)
        with pytest.raises(InvalidRequest, match="give it to attach"):
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


def test_command_asks_for_no_place_in_a_pipe(server: Any, queue: Queue, cli: Any) -> None:
    queue.open.set()
    assert cli("generate", "x").stdout == "one\n"
    assert not server.requests[0].output.queue_position


def test_quiet_command_shows_no_place(server: Any, queue: Queue) -> None:
    queue.open.set()
    with Terminal("generate", "x", "--quiet", "--target", server.target) as terminal:
        terminal.read_until(lambda _: "one" in terminal.text)
        assert "waiting" not in terminal.text
    assert not server.requests[0].output.queue_position


# --- the server is away or full ---


LOST = ConnectionLost("no answer from here: Socket closed")


def wait(pause: float, waited: float, left: float | None = 60.0, attempts: int | None = None) -> RetryWait:
    return RetryWait(LOST, pause, waited, left, attempts)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_first_pause_past_two_seconds_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    notice = WaitNotice("here")
    for waited, pause in ((0.0, 0.1), (0.5, 0.8), (1.1, 0.8)):
        notice(wait(pause, waited))
    assert said(capsys) == []
    notice(wait(1.6, 1.2, left=58.2))
    assert said(capsys) == ["waiting for here, for up to 58 s: no answer from here: Socket closed"]


def test_wait_is_reported_again_after_its_limit_and_once_for_all_calls(capsys: pytest.CaptureFixture[str]) -> None:
    notice = WaitNotice("here")
    notice(wait(5.0, 5.0, left=0.0))
    threads = [threading.Thread(target=notice, args=(wait(5.0, 10.0, left=600.0),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    notice(wait(5.0, 30.0, left=580.0))
    assert [line.partition(":")[0] for line in said(capsys)] == [
        "waiting for here, for up to 0 s", "waiting for here, for up to 600 s",
    ]  # fmt: skip


def test_report_names_the_attempts_left_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    WaitNotice("here")(wait(12.0, 0.0, left=None, attempts=3))
    WaitNotice("here")(wait(12.0, 0.0, left=None, attempts=1))
    WaitNotice("here")(RetryWait(ConnectionLost("a\nb\x1b[2Jc"), 9.0, 0.0, 60.0, None))
    several, once, odd = said(capsys)
    assert several.startswith("retrying here, up to 3 times, in 12 s: ")
    assert once.startswith("retrying here, once, in 12 s: ")
    assert odd.endswith("a b\ufffd[2Jc")


# -- the waits


POLICY = RetryPolicy(first_pause_seconds=1.0, max_pause_seconds=4.0)


def test_retry_wait_has_elapsed_and_remaining_seconds() -> None:
    clock, waits = Clock(), list[RetryWait]()
    attempts = RetryState(POLICY, 90.0, clock, lambda: 1.0, on_wait=waits.append)
    attempts.pause_after(LOST)
    clock.now += 40.0
    attempts.pause_after(LOST)
    starting = ServerStarting("loading", retry_after_seconds=1.0)
    attempts.pause_after(starting)
    full = QueueFull("full", retry_after_seconds=8.0)
    attempts.pause_after(full)
    assert waits == [
        RetryWait(LOST, 1.0, 0.0, 60.0, None),
        RetryWait(LOST, 2.0, 40.0, 20.0, None),
        RetryWait(starting, 4.0, 40.0, 50.0, None),  # the deadline is earlier than 600 s
        RetryWait(full, 10.0, 40.0, None, 3),
    ]


def test_resume_wait_restarts_with_each_delta() -> None:
    clock, waits = Clock(), list[RetryWait]()
    resumptions = ResumeState(RetryState(POLICY, None, clock, lambda: 1.0, on_wait=waits.append))
    cut = ShutdownInterrupted("left")
    for seconds in (10.0, 5.0):
        resumptions.pause_after(cut)
        clock.now += seconds
    resumptions.on_progress()
    resumptions.pause_after(cut)
    assert waits == [
        RetryWait(cut, 1.0, 0.0, 60.0, None),
        RetryWait(cut, 2.0, 10.0, 50.0, None),
        RetryWait(cut, 1.0, 0.0, 60.0, None),
    ]


def test_pause_beyond_the_deadline_is_not_reported() -> None:
    waits: list[RetryWait] = []
    attempts = RetryState(POLICY, 0.5, Clock(), lambda: 1.0, on_wait=waits.append)
    with pytest.raises(ConnectionLost):
        attempts.pause_after(LOST)
    assert waits == []


# -- the output of the command


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_notice, "SILENT_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient")
def test_command_reports_an_unavailable_server_and_waits(server: Any, cli: Any, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/api"
    servers = [type(server)(address)]

    def restart() -> None:
        servers[0].stop()
        time.sleep(0.5)
        servers.append(type(server)(address))
        servers[1].play([started(), tokens(1, 2, text=" two"), finished(2)])

    restarting = threading.Thread(target=restart)
    servers[0].play([started(), tokens(0, 1, text="one"), lambda _: restarting.start(), servers[0].wait_for_end])
    done = cli("generate", "x", "--target", address)
    servers[1].stop()
    assert (done.exit_code, done.stdout) == (0, "one two\n")
    (line,) = done.stderr.splitlines()
    assert re.match(f"waiting for {address}, for up to (60|[1-5][0-9]) s: .*{address}", line)


@pytest.mark.usefixtures("impatient")
def test_command_reports_the_pause_a_server_asks_for(server: Any, cli: Any) -> None:
    server.failures = [QueueFull("the queue is full", retry_after_seconds=0.6)]
    done = cli("generate", "x")
    assert (done.exit_code, done.stdout) == (0, "x\n")
    assert done.stderr == f"retrying {server.target}, up to 3 times, in 1 s: the queue is full\n"
