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
def test_what_the_parent_used_says_so_in_the_child(server: Any, what: str) -> None:
    assert "used before this process was forked" in said(server, what)


@pytest.mark.parametrize("what", [function.__name__ for function in ANSWERS])
def test_a_client_that_was_only_made_works_and_closing_one_does_not_wait(server: Any, what: str) -> None:
    assert said(server, what) == "answered\n"
