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
from client.conftest import Clock
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


def test_first_pause_past_two_seconds_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    notice = WaitNotice("here")
    for waited, pause in ((0.0, 0.1), (0.5, 0.8), (1.1, 0.8)):
        notice(wait(pause, waited))
    assert said(capsys) == []
    notice(wait(1.6, 1.2, left=58.2))
    assert said(capsys) == ["waiting for here, for up to 58 s: no answer from here: Socket closed"]


def test_wait_is_reported_once_for_all_calls(capsys: pytest.CaptureFixture[str]) -> None:
    notice = WaitNotice("here")
    threads = [threading.Thread(target=notice, args=(wait(5.0, 5.0),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    notice(wait(5.0, 30.0, left=30.0))
    assert len(said(capsys)) == 1


def test_wait_is_reported_again_after_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    notice = WaitNotice("here")
    notice(wait(5.0, 5.0, left=0.0))
    notice(wait(5.0, 10.0, left=600.0))
    assert [line.partition(":")[0] for line in said(capsys)] == [
        "waiting for here, for up to 0 s", "waiting for here, for up to 600 s",
    ]  # fmt: skip


def test_report_names_the_attempts_left(capsys: pytest.CaptureFixture[str]) -> None:
    WaitNotice("here")(wait(12.0, 0.0, left=None, attempts=3))
    WaitNotice("here")(wait(12.0, 0.0, left=None, attempts=1))
    assert [line.partition(":")[0] for line in said(capsys)] == [
        "retrying here, up to 3 times, in 12 s", "retrying here, once, in 12 s",
    ]  # fmt: skip


def test_report_is_one_line_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    WaitNotice("here")(RetryWait(ConnectionLost("a\nb\x1b[2Jc"), 9.0, 0.0, 60.0, None))
    (line,) = said(capsys)
    assert line.endswith("a b\ufffd[2Jc")


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


def test_command_reports_an_unavailable_server_and_waits(server: Any, tmp_path: Path) -> None:
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
    # gRPC may write lines too. The command fails after a minute.
    line = next((line.decode() for line in run.stderr if line.startswith(b"waiting")), "")
    assert re.match(f"waiting for {address}, for up to [1-5]?[0-9] s: .*{address}", line)
    second = type(server)(address)
    second.script = rest
    out, err = run.communicate(timeout=PATIENCE_SECONDS)
    second.stop()
    assert (run.returncode, out) == (0, b"one two\n")
    assert b"waiting" not in err


def test_command_reports_the_pause_a_server_asks_for(server: Any) -> None:
    server.failures = [QueueFull("the queue is full", retry_after_seconds=2.0)]
    run = spawn("generate", "x", "--target", server.target)
    out, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert (run.returncode, out) == (0, b"x\n")
    assert f"retrying {server.target}, up to 3 times, in 2 s: the queue is full" in err.decode().splitlines()
