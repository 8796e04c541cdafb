"""A process that is forked from one that used a client: a sentence instead of a wait for threads that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from client.forked import ANSWERS, ERRORS
from support.time_limits import PATIENCE_SECONDS


def said(server: Any, what: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "client.forked", server.target, what],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("what", [function.__name__ for function in ERRORS])
def test_used_client_raises_in_the_child(server: Any, what: str) -> None:
    assert "used before this process was forked" in said(server, what)


@pytest.mark.parametrize("what", [function.__name__ for function in ANSWERS])
def test_unused_client_works_in_the_child(server: Any, what: str) -> None:
    assert said(server, what) == "answered\n"
