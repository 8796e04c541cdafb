"""The lineclear command as a process: its output, Ctrl-C and closed pipes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from client.command import COMMAND, QUICK, lines, process, spawn
from client.conftest import hold
from support.time_limits import PATIENCE_SECONDS

from lineclear import errors
from lineclear.v1 import inference_pb2 as pb


def test_process_output_and_exit_codes(server: Any, tmp_path: Path) -> None:
    done = process(server, "generate", "--json", input="one two")
    assert (done.returncode, lines(done.stdout)[0]["text"], done.stderr) == (0, "one two", "")
    server.failures = [errors.InvalidRequest("no", violations=[errors.Violation("sampling.top_p", "is above 1")])]
    done = process(server, "generate", "x", *QUICK)
    assert (done.returncode, done.stdout) == (100 + 3, "")
    assert "sampling.top_p: is above 1" in done.stderr
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n", "utf-8")
    done = process(server, "generate", "--file", str(prompts))
    assert [line["text"] for line in lines(done.stdout)] == ["a", "b"]


def test_text_is_shown_before_the_answer_ends(server: Any) -> None:
    server.script = hold
    run = spawn("generate", "x", "--target", server.target)
    assert run.stdout is not None
    assert run.stdout.read(1) == b"a"
    run.send_signal(signal.SIGINT)  # and Ctrl-C now cancels the call
    _, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 130
    assert b"Traceback" not in err
    assert server.ended.wait(PATIENCE_SECONDS)


def test_grpc_logs_are_not_shown(server: Any) -> None:
    """gRPC logs a lost connection; the command reports it already."""
    server.script = hold
    run = spawn("generate", "x", "--target", server.target, *QUICK)
    assert run.stdout is not None
    assert run.stdout.read(1) == b"a"
    server.stop()
    _, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 100 + 14
    assert b"CONNECTION_LOST" in err
    assert len(err.splitlines()) == 2


def test_closed_pipe_ends_the_call_quietly(server: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        for index in range(1_000_000):
            if not context.is_active():
                return
            yield server.tokens(index, 1, text="many words ")

    server.script = script
    run = spawn("generate", "x", "--target", server.target)
    assert run.stdout is not None
    assert run.stdout.read(4) == b"many"
    run.stdout.close()
    assert run.stderr is not None
    err = run.stderr.read()
    run.stderr.close()
    assert run.wait(PATIENCE_SECONDS) == 1
    assert err == b""
    assert server.ended.wait(PATIENCE_SECONDS)


def test_ctrl_c_in_a_file_run_cancels_and_keeps_results(server: Any, tmp_path: Path) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "a":
            yield server.finished(0)
        else:
            server.wait_for_end(context)

    server.script = script
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nc\nd\n", "utf-8")
    run = spawn("generate", "--file", str(prompts), "--target", server.target)
    assert run.stdout is not None
    assert json.loads(run.stdout.readline())["prompt"] == "a"
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=PATIENCE_SECONDS)
    assert run.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("redirection", "code", "output"),
    [("<&-", 0, "one"), (">&-", 2, ""), ("2>&-", 0, "one"), ("<&- 2>&-", 0, "one"), (">&- 2>&-", 2, "")],
)
def test_closed_descriptors_end_with_no_traceback(server: Any, redirection: str, code: int, output: str) -> None:
    shell = f"exec {shlex.join(COMMAND)} generate one --max-attempts 1 {redirection}"
    environment = {**os.environ, "LINECLEAR_TARGET": server.target, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, env=environment
    )
    assert (done.returncode, done.stdout.strip()) == (code, output)
    assert "Traceback" not in done.stderr
    assert ("standard output is closed" in done.stderr) == (code == 2 and "2>&-" not in redirection)
