"""A command that waits for its server says so: one line, in time, that names the server and the patience."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from client.command import spawn
from support.time_limits import PATIENCE_SECONDS

from lineclear.cli.wait_notice import WaitNotice
from lineclear.client import RetryPolicy
from lineclear.client.retry import ResumeState, RetryState, RetryWait
from lineclear.errors import ConnectionLost, QueueFull, ServerStarting, ShutdownInterrupted
from lineclear.v1 import inference_pb2 as pb

LOST = ConnectionLost("no answer from here: Socket closed")


def wait(pause: float, waited: float, left: float | None = 60.0, attempts: int | None = None) -> RetryWait:
    return RetryWait(LOST, pause, waited, left, attempts)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_the_pause_that_takes_a_call_past_two_seconds_is_said_and_nothing_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    notice = WaitNotice("here")
    for waited, pause in ((0.0, 0.1), (0.5, 0.8), (1.1, 0.8)):
        notice(wait(pause, waited))
    assert said(capsys) == []
    notice(wait(1.6, 1.2, left=58.2))
    assert said(capsys) == ["waiting for here, for up to 58 s: no answer from here: Socket closed"]


def test_it_is_said_once_whoever_waits(capsys: pytest.CaptureFixture[str]) -> None:
    notice = WaitNotice("here")
    threads = [threading.Thread(target=notice, args=(wait(5.0, 5.0),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    notice(wait(5.0, 30.0, left=30.0))
    assert len(said(capsys)) == 1


def test_what_was_said_holds_no_longer_than_it_said(capsys: pytest.CaptureFixture[str]) -> None:
    notice = WaitNotice("here")
    notice(wait(5.0, 5.0, left=0.0))
    notice(wait(5.0, 10.0, left=600.0))
    assert [line.partition(":")[0] for line in said(capsys)] == [
        "waiting for here, for up to 0 s", "waiting for here, for up to 600 s",
    ]  # fmt: skip


def test_where_attempts_are_counted_they_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    WaitNotice("here")(wait(12.0, 0.0, left=None, attempts=3))
    WaitNotice("here")(wait(12.0, 0.0, left=None, attempts=1))
    assert [line.partition(":")[0] for line in said(capsys)] == [
        "retrying here, up to 3 times, in 12 s", "retrying here, once, in 12 s",
    ]  # fmt: skip


def test_a_terminal_is_not_steered_and_the_line_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    WaitNotice("here")(RetryWait(ConnectionLost("a\nb\x1b[2Jc"), 9.0, 0.0, 60.0, None))
    (line,) = said(capsys)
    assert line.endswith("a b\ufffd[2Jc")


# -- what there is to say


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


POLICY = RetryPolicy(first_pause_seconds=1.0, max_pause_seconds=4.0)


def test_attempts_tell_of_each_pause_how_long_it_has_been_and_may_be() -> None:
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
        RetryWait(starting, 4.0, 40.0, 50.0, None),  # of 600 s the deadline leaves so many
        RetryWait(full, 10.0, 40.0, None, 3),
    ]


def test_an_answer_that_stands_still_tells_it_too_and_begins_anew_with_each_piece() -> None:
    clock, waits = Clock(), list[RetryWait]()
    resumptions = ResumeState(POLICY, RetryState(POLICY, None, clock, on_wait=waits.append), clock, lambda: 1.0)
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


def test_a_pause_that_is_not_granted_is_not_told() -> None:
    waits: list[RetryWait] = []
    attempts = RetryState(POLICY, 0.5, Clock(), lambda: 1.0, on_wait=waits.append)
    with pytest.raises(ConnectionLost):
        attempts.pause_after(LOST)
    assert waits == []


# -- as it is seen


def test_a_server_that_goes_in_the_middle_is_announced_and_then_waited_for(server: Any, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/api"
    first = type(server)(address)

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.started()
        yield server.tokens(0, 1, text="one")
        threading.Thread(target=first.stop).start()
        server.wait_for_end(context)

    def rest(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.started()
        yield server.tokens(1, 2, text=" two")
        yield server.finished(2)

    first.script = script
    run = spawn("generate", "x", "--target", address)
    assert run.stderr is not None
    # gRPC may say something, too. There is such a line, or the end: the command gives up after a minute.
    line = next((line.decode() for line in run.stderr if line.startswith(b"waiting")), "")
    assert re.match(f"waiting for {address}, for up to [1-5]?[0-9] s: .*{address}", line)
    second = type(server)(address)
    second.script = rest
    out, err = run.communicate(timeout=PATIENCE_SECONDS)
    second.stop()
    assert (run.returncode, out) == (0, b"one two\n")
    assert b"waiting" not in err


def test_who_says_when_to_come_again_is_quoted_at_once(server: Any) -> None:
    server.failures = [QueueFull("the queue is full", retry_after_seconds=2.0)]
    run = spawn("generate", "x", "--target", server.target)
    out, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert (run.returncode, out) == (0, b"x\n")
    assert f"retrying {server.target}, up to 3 times, in 2 s: the queue is full" in err.decode().splitlines()
