"""Ctrl-C while an answer is read: it is cancelled by another thread, and what runs is not cut off."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from support.patience import PATIENCE_SECONDS

from lineclear.client import Client
from lineclear.client.cli.interrupts import cancelling
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
        with cancelling(cancel):
            signal.raise_signal(signal.SIGINT)
            assert done.wait(PATIENCE_SECONDS)
            steps.append("went on")

    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        block()
    assert steps == ["went on"]
    assert cancelled_by
    assert cancelled_by[0] is not threading.current_thread()


def test_the_end_of_a_cancelled_answer_is_the_interrupt() -> None:
    def block() -> None:
        with cancelling(lambda: None):
            signal.raise_signal(signal.SIGINT)
            raise Cancelled("the call was cancelled")

    with pytest.raises(KeyboardInterrupt):
        block()


def test_a_second_one_does_not_wait() -> None:
    def block() -> None:
        with cancelling(lambda: None):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            steps.append("went on")

    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        block()
    assert steps == []


def test_an_answer_that_somebody_else_cancels_says_so() -> None:
    with pytest.raises(Cancelled), cancelling(lambda: None):
        raise Cancelled("by its server")


def test_a_program_that_does_not_listen_is_left_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with cancelling(lambda: pytest.fail("nobody pressed anything")):
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
        with cancelling(answer.cancel), answer as stream:
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
