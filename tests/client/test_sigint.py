"""Ctrl-C while an answer is read: it is cancelled by another thread, and what runs is not cut off."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from client.interrupted import OPERATIONS
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS

from lineclear.cli import batch_run
from lineclear.cli.prompt_file import Entry
from lineclear.client import AsyncClient, Client
from lineclear.client.requests import Request
from lineclear.client.sigint import cancel_on_sigint
from lineclear.client.testing import FakeTransport
from lineclear.errors import Cancelled
from lineclear.v1 import inference_pb2 as pb


@pytest.fixture(autouse=True)
def listening() -> Iterator[None]:
    """The handler of an interactive program, whatever this one was started with."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_another_thread_cancels_and_the_block_goes_on_to_its_end() -> None:
    cancelled_by: list[threading.Thread] = []
    done = threading.Event()

    def cancel() -> None:
        cancelled_by.append(threading.current_thread())
        done.set()

    def block() -> None:
        with cancel_on_sigint(cancel):
            signal.raise_signal(signal.SIGINT)
            assert done.wait(PATIENCE_SECONDS)
            steps.append("went on")

    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        block()
    assert steps == ["went on"]
    assert cancelled_by
    assert cancelled_by[0] is not threading.current_thread()


def test_a_reader_who_waits_and_does_not_hear_of_it_is_cancelled_all_the_same() -> None:
    """Python looks for signals between its steps. One that comes on the way into a wait is found after the wait."""
    reader, taken = threading.get_ident(), threading.Lock()
    taken.acquire()

    def wait() -> bool:
        return taken.acquire(timeout=SOON_SECONDS)

    def press() -> None:
        while sys._current_frames()[reader].f_code is not wait.__code__:
            time.sleep(0.001)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # it is handled here: the reader is not woken

    presser = threading.Thread(target=press, daemon=True)
    presser.start()
    was_cancelled = []
    with pytest.raises(KeyboardInterrupt), cancel_on_sigint(taken.release):
        was_cancelled.append(wait())
    assert was_cancelled == [True]


def test_one_who_watches_signals_himself_is_left_alone() -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        assert signal.set_wakeup_fd(writer.fileno()) == -1
        try:
            with pytest.raises(KeyboardInterrupt), cancel_on_sigint(lambda: pytest.fail("it is his to decide")):
                signal.raise_signal(signal.SIGINT)
        finally:
            assert signal.set_wakeup_fd(-1) == writer.fileno()
        assert reader.recv(1) == bytes([signal.SIGINT])


def test_the_end_of_a_cancelled_answer_is_the_interrupt() -> None:
    def block() -> None:
        with cancel_on_sigint(lambda: None):
            signal.raise_signal(signal.SIGINT)
            raise Cancelled("the call was cancelled")

    with pytest.raises(KeyboardInterrupt):
        block()


def test_a_second_one_does_not_wait() -> None:
    def block() -> None:
        with cancel_on_sigint(lambda: None):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")

    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        block()
    assert steps == []


def test_an_answer_that_somebody_else_cancels_says_so() -> None:
    with pytest.raises(Cancelled), cancel_on_sigint(lambda: None):
        raise Cancelled("by its server")


def test_a_program_that_does_not_listen_is_left_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with cancel_on_sigint(lambda: pytest.fail("nobody pressed anything")):
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_whenever_it_is_pressed_the_next_answer_comes(server: Any) -> None:
    """Without this, gRPC kept a lock every so often and the next call waited for ever."""
    echo, chance = server.script, random.Random(1)

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text != "endless":
            yield from echo(request, context)
            return
        index = 0
        while context.is_active():
            yield server.tokens(index, 1, text="word ")
            index += 1

    server.script = script

    def read(client: Client) -> None:
        answer = client.stream("endless")
        with cancel_on_sigint(answer.cancel), answer as stream:
            next(stream)
            presser = threading.Timer(chance.random() * 0.01, os.kill, (os.getpid(), signal.SIGINT))
            presser.start()
            for _ in stream:
                pass

    with Client(server.target) as client:
        for _ in range(50):
            with pytest.raises(KeyboardInterrupt):
                read(client)
            assert client.generate("one two", timeout_seconds=PATIENCE_SECONDS).text == "one two"


def endless(server: Any) -> None:
    """Have the server answer "endless" without end, and anything else as ever."""
    echo = server.script

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text != "endless":
            yield from echo(request, context)
            return
        yield server.started()
        server.wait_for_end(context)

    server.script = script


def test_many_answers_end_where_they_are_and_their_reader_is_not_cut_off(server: Any) -> None:
    steps: list[str] = []

    def press(done: int, total: int | None) -> None:
        if done == 1:
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")

    endless(server)
    with Client(server.target) as client:
        with pytest.raises(KeyboardInterrupt):
            client.generate_batch(["one", *["endless"] * 3], concurrency=4, progress=press)
        assert steps == ["went on"]
        assert client.generate("one two", timeout_seconds=PATIENCE_SECONDS).text == "one two"


def test_so_do_those_of_a_file_and_what_is_complete_is_written(server: Any, tmp_path: Path) -> None:
    class Pressing(UserDict[str, Any]):
        """Presses when the reader, who has the first answer, writes it beside its prompt."""

        def keys(self) -> Any:
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")
            return super().keys()

    steps: list[str] = []
    endless(server)
    entries = [Entry(Request.of(text), cast("dict[str, Any]", Pressing(prompt=text))) for text in ("one", "endless")]
    with Client(server.target) as client:
        with pytest.raises(KeyboardInterrupt):
            batch_run.several(client, entries, tmp_path / "out", resume=False, concurrency=2, progress=False)
        assert steps == ["went on"]
        assert client.generate("one two", timeout_seconds=PATIENCE_SECONDS).text == "one two"
    (line,) = (tmp_path / "out").read_text().splitlines()
    assert json.loads(line)["text"] == "one"


def test_a_whole_answer_is_cancelled_by_another_thread_too() -> None:
    class Pressed:
        """A call under which somebody presses: it ends when it is cancelled, and not before."""

        def __init__(self) -> None:
            self.is_cancelled = threading.Event()

        def cancel(self) -> None:
            self.is_cancelled.set()

        def __next__(self) -> pb.GenerateResponse:
            signal.raise_signal(signal.SIGINT)
            assert self.is_cancelled.wait(PATIENCE_SECONDS)
            steps.append("went on")
            raise Cancelled("the call was cancelled")

    class Pressing(FakeTransport):
        def stream(self, *_: Any, **__: Any) -> Any:
            return Pressed()

    steps: list[str] = []
    client = Client(transport=Pressing())
    with pytest.raises(KeyboardInterrupt):
        client.generate("x")
    with pytest.raises(KeyboardInterrupt):
        client.submitted("x").result()
    assert steps == ["went on", "went on"]


def test_others_are_cancelled_from_any_thread(server: Any) -> None:
    endless(server)
    with Client(server.target) as client:
        outcomes = client.iter_batch(["one", "endless"])
        next(outcomes)
        threading.Thread(target=outcomes.cancel).start()
        with pytest.raises(Cancelled):
            next(outcomes)
        with pytest.raises(StopIteration):
            next(outcomes)


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_batch_is_interrupted_while_it_waits_for_a_prompt(server: Any, kind: str) -> None:
    is_over = threading.Event()

    def prompts() -> Iterator[str]:
        yield "one"
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert is_over.wait(SOON_SECONDS)

    async def scenario() -> None:
        async with AsyncClient(server.target) as client:
            await client.generate_batch(prompts(), concurrency=4)

    try:
        with pytest.raises(KeyboardInterrupt), Client(server.target) as client:
            asyncio.run(scenario()) if kind == "asyncio" else client.generate_batch(prompts(), concurrency=4)
        assert not is_over.is_set()
    finally:
        is_over.set()


@pytest.mark.parametrize("what", OPERATIONS)
def test_a_program_that_is_interrupted_again_and_again_gets_its_next_answer(server: Any, what: str) -> None:
    """Plain loops, in a process of its own, without any word about signals."""
    echo = server.script

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "silent":
            yield server.started()
            server.wait_for_end(context)
        elif request.text == "endless":
            index = 0
            while context.is_active():
                yield server.tokens(index, 1, text="word ")
                index += 1
        else:
            yield from echo(request, context)

    server.script = script
    command = [sys.executable, "-m", "client.interrupted", server.target, what, "60", "1"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
