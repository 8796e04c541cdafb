"""One table of exit codes: no code has two meanings, and the command and its processes end as the table says."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

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


def test_every_code_is_in_the_table_once() -> None:
    codes = [row.code for row in TABLE]
    assert sorted(codes) == sorted({*ExitCode} - {ExitCode.FIRST_OF_GRPC})


def test_errors_of_calls_are_apart_from_processes_and_shells() -> None:
    others = {int(row.code) for row in TABLE}
    assert len(OF_GRPC) == 16
    assert not OF_GRPC & (others | OF_SHELLS)
    assert not {code for code in others if code != ExitCode.INTERRUPTED} & OF_SHELLS
    of_command = {int(row.code) for row in TABLE if row.of == COMMAND}
    assert not of_command & {*range(64, 80)}  # sysexits.h and 79 are of processes


def test_a_server_that_is_not_there_is_not_a_wrong_configuration(tmp_path: Path) -> None:
    nobody = f"unix:{tmp_path}/nobody"
    asked = run([*LINECLEAR, "generate", "x", "--target", nobody, "--max-attempts", "1"])
    served = run([*LINECLEAR, "serve", "--model", "/absent"])
    assert asked == of_grpc(Code.UNAVAILABLE)
    assert served == ExitCode.CONFIGURATION
    assert asked != served


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([*LINECLEAR, "--version"], ExitCode.OK),
        ([*LINECLEAR, "generate", "x", "--no-such-flag"], ExitCode.USAGE),
        ([*LINECLEAR, "generate", "--file", "/absent"], ExitCode.USAGE),
        ([*SCHEDULER, "--version"], ExitCode.OK),
        ([*SCHEDULER, "--no-such-flag"], ExitCode.CONFIGURATION),
        ([*SCHEDULER, "replay", "/absent"], ExitCode.USAGE),
        ([*WORKER, "--version"], ExitCode.OK),
        ([*WORKER, "--no-such-flag"], ExitCode.CONFIGURATION),
    ],
    ids=lambda value: " ".join(value[2:]) if isinstance(value, list) else None,
)
def test_programs_end_with_the_codes_of_the_table(words: list[str], code: ExitCode) -> None:
    assert run(words) == code


def test_ctrl_c_ends_the_command_with_130() -> None:
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
