"""Exit codes of the command and the processes match the table."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest
from client.command import spawn
from google.rpc.code_pb2 import Code
from support.time_limits import PATIENCE_SECONDS

from lineclear.exit_codes import COMMAND, TABLE, ExitCode, of_grpc

LINECLEAR = [sys.executable, "-m", "lineclear.cli"]
SCHEDULER = [sys.executable, "-m", "lineclear.scheduler.main"]
WORKER = [sys.executable, "-m", "lineclear.worker.main"]
OF_GRPC = {of_grpc(number) for code, number in Code.items() if code != "OK"}
OF_SHELLS = {*range(124, 166)}
"""timeout (124, 125, 137), docker run (125), not executable (126), not found (127), signals (128 + n)."""


def run(words: list[str], **settings: object) -> int:
    return subprocess.run(words, capture_output=True, timeout=PATIENCE_SECONDS, **settings).returncode  # type: ignore[call-overload, no-any-return]


def test_table_lists_each_code_once() -> None:
    codes = [row.code for row in TABLE]
    assert sorted(codes) == sorted({*ExitCode} - {ExitCode.FIRST_OF_GRPC})


def test_exit_code_ranges_do_not_overlap() -> None:
    others = {int(row.code) for row in TABLE}
    assert len(OF_GRPC) == 16
    assert not OF_GRPC & (others | OF_SHELLS)
    assert not {code for code in others if code != ExitCode.INTERRUPTED} & OF_SHELLS
    of_command = {int(row.code) for row in TABLE if row.program == COMMAND}
    assert not of_command & {*range(64, 80)}  # sysexits.h and 79 are of processes


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([*LINECLEAR, "--version"], ExitCode.OK),
        ([*LINECLEAR, "generate", "x", "--no-such-flag"], ExitCode.USAGE),
        ([*LINECLEAR, "generate", "--file", "/absent"], ExitCode.USAGE),
        ([*LINECLEAR, "generate", "x", "--target=unix:/absent", "--max-attempts=1"], of_grpc(Code.UNAVAILABLE)),
        ([*LINECLEAR, "serve", "--model", "/absent"], ExitCode.CONFIGURATION),
        ([*SCHEDULER, "replay", "/absent"], ExitCode.USAGE),
        ([*WORKER, "--version"], ExitCode.OK),
        ([*WORKER, "--no-such-flag"], ExitCode.CONFIGURATION),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else None,
)
def test_programs_exit_with_codes_of_the_table(words: list[str], code: int) -> None:
    assert run(words) == code


def test_ctrl_c_exits_with_130() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        waiting = spawn("generate", "x", "--target", target, stdout=subprocess.DEVNULL)
        try:
            connection, _ = silent.accept()
            waiting.send_signal(signal.SIGINT)
            assert waiting.wait(PATIENCE_SECONDS) == ExitCode.INTERRUPTED
            connection.close()
        finally:
            waiting.kill()
            waiting.wait()
