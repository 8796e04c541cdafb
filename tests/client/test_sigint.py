"""Ctrl-C during a call: another thread cancels the call, and the client stays usable."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from client.command import run
from client.conftest import started, tokens
from support.time_limits import PATIENCE_SECONDS, SOON_SECONDS

from lineclear.cli import batch_run
from lineclear.cli.batch_run import ManyPrompts
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


def test_another_thread_cancels_and_the_block_continues() -> None:
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


def test_signal_just_before_a_wait_cancels_too() -> None:
    """Python runs signal handlers between instructions: a signal on the way into a wait is handled after the wait."""
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


def test_program_with_wakeup_fd_is_not_guarded() -> None:
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


def test_keyboard_interrupt_replaces_cancelled() -> None:
    def block() -> None:
        with cancel_on_sigint(lambda: None):
            signal.raise_signal(signal.SIGINT)
            raise Cancelled("the call was cancelled")

    with pytest.raises(KeyboardInterrupt):
        block()


def test_second_ctrl_c_interrupts_at_once() -> None:
    def block() -> None:
        with cancel_on_sigint(lambda: None):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")

    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        block()
    assert steps == []


def test_cancelled_without_ctrl_c_stays_cancelled() -> None:
    with pytest.raises(Cancelled), cancel_on_sigint(lambda: None):
        raise Cancelled("by its server")


def test_ignored_sigint_is_not_guarded() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with cancel_on_sigint(lambda: pytest.fail("nobody pressed anything")):
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def endless(server: Any) -> None:
    """Have the server answer "endless" with words and "silent" with nothing, without end, and repeat other prompts."""
    echo = server.script

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "silent":
            yield started()
            server.wait_for_end(context)
        elif request.text == "endless":
            index = 0
            while context.is_active():
                yield tokens(index, 1, text="word ")
                index += 1
        else:
            yield from echo(request, context)

    server.script = script


def test_ctrl_c_ends_a_batch_after_the_current_callback(server: Any) -> None:
    steps: list[str] = []

    def press(done: int, total: int | None) -> None:
        if done == 1:
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")

    endless(server)
    with Client(server.target) as client:
        with pytest.raises(KeyboardInterrupt):
            client.generate_batch(["one", *["silent"] * 3], concurrency=4, progress=press)
        assert steps == ["went on"]
        assert client.generate("one two", timeout_seconds=PATIENCE_SECONDS).text == "one two"


def test_ctrl_c_in_a_file_run_keeps_complete_lines(server: Any, tmp_path: Path) -> None:
    class Pressing(UserDict[str, Any]):
        """Raises SIGINT when the first result is written."""

        def keys(self) -> Any:
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")
            return super().keys()

    steps: list[str] = []
    endless(server)
    entries = [Entry(Request.of(text), cast("dict[str, Any]", Pressing(prompt=text))) for text in ("one", "silent")]
    with Client(server.target) as client:
        with pytest.raises(KeyboardInterrupt):
            batch_run.several(client, entries, ManyPrompts(out=tmp_path / "out", concurrency=2), progress=False)
        assert steps == ["went on"]
        assert client.generate("one two", timeout_seconds=PATIENCE_SECONDS).text == "one two"
    (line,) = (tmp_path / "out").read_text().splitlines()
    assert json.loads(line)["text"] == "one"


def test_ctrl_c_cancels_generate_and_result() -> None:
    class Pressed:
        """A call that gets SIGINT and ends when it is cancelled."""

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


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_ctrl_c_ends_a_batch_that_waits_for_a_prompt(server: Any, kind: str) -> None:
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


def test_repeated_ctrl_c_leaves_the_client_usable(server: Any) -> None:
    """The program has plain loops and does not handle signals."""
    endless(server)
    done = run([sys.executable, "-m", "client.interrupted", server.target, "30", "1"])
    assert done.returncode == 0, done.stderr
