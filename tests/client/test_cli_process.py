"""The lineclear command as a process: its output, Ctrl-C and closed pipes."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from client.command import COMMAND, QUICK, run, spawn
from client.conftest import tokens
from support.time_limits import PATIENCE_SECONDS

from lineclear.v1 import inference_pb2 as pb


def test_text_is_shown_before_the_answer_ends(server: Any) -> None:
    server.hold()
    command = spawn("generate", "x", "--target", server.target)
    assert command.stdout is not None
    assert command.stdout.read(1) == b"a"
    command.send_signal(signal.SIGINT)  # and Ctrl-C now cancels the call
    _, err = command.communicate(timeout=PATIENCE_SECONDS)
    assert command.returncode == 130
    assert b"Traceback" not in err
    assert server.ended.wait(PATIENCE_SECONDS)


def test_grpc_logs_are_not_shown(server: Any) -> None:
    """gRPC logs a lost connection; the command reports it already."""
    server.hold()
    command = spawn("generate", "x", "--target", server.target, *QUICK)
    assert command.stdout is not None
    assert command.stdout.read(1) == b"a"
    server.stop()
    _, err = command.communicate(timeout=PATIENCE_SECONDS)
    assert command.returncode == 100 + 14
    assert b"CONNECTION_LOST" in err
    assert len(err.splitlines()) == 2


def test_closed_pipe_ends_the_call_quietly(server: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        for index in range(1_000_000):
            if not context.is_active():
                return
            yield tokens(index, 1, text="many words ")

    server.script = script
    command = spawn("generate", "x", "--target", server.target)
    assert command.stdout is not None
    assert command.stdout.read(4) == b"many"
    command.stdout.close()
    assert command.stderr is not None
    err = command.stderr.read()
    command.stderr.close()
    assert command.wait(PATIENCE_SECONDS) == 1
    assert err == b""
    assert server.ended.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("redirection", "code", "output"),
    [(">&-", 2, ""), ("<&- 2>&-", 0, "one"), (">&- 2>&-", 2, "")],
)
def test_closed_descriptors_end_with_no_traceback(server: Any, redirection: str, code: int, output: str) -> None:
    shell = f"exec {shlex.join(COMMAND)} generate one --max-attempts 1 {redirection}"
    done = run(["sh", "-c", shell], LINECLEAR_TARGET=server.target)
    assert (done.returncode, done.stdout.strip()) == (code, output)
    assert "Traceback" not in done.stderr
    assert ("standard output is closed" in done.stderr) == (code == 2 and "2>&-" not in redirection)
