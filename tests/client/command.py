"""Run the lineclear command as a process and parse its output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from support.time_limits import PATIENCE_SECONDS

COMMAND = [sys.executable, "-m", "lineclear.cli"]
QUICK = ["--max-attempts", "1"]


def run(words: list[str], *, input: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with the import path of this process and with environment variables."""
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        words, input=input, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, env=environment
    )


def process(server: Any, *arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    return run([*COMMAND, *arguments], input=input, LINECLEAR_TARGET=server.target)


def spawn(*arguments: str, stdin: int | None = None, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """The command, listening to SIGINT also where the tests were started in the background and ignore it."""
    environment = {**os.environ, "TERM": "dumb", "PYTHONPATH": os.pathsep.join(sys.path)}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a handler is not inherited, SIG_IGN is
    try:
        return subprocess.Popen(
            [*COMMAND, *arguments], stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, env=environment
        )
    finally:
        signal.signal(signal.SIGINT, before)


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]
