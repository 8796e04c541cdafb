"""The history file of a chat is private with every line-editing library."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lineclear.cli import chat
from lineclear.client import Client
from lineclear.client.requests import Sampling
from lineclear.client.testing import FakeTransport


@pytest.fixture
def generous_umask() -> Iterator[None]:
    """New files are readable by every user."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous_umask")
@pytest.mark.parametrize("was_there", [True, False])
def test_history_file_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_there: bool) -> None:
    """GNU readline makes the file private; libedit writes into an existing file."""
    history = tmp_path / "history"
    if was_there:
        history.write_text("asked before\n")
        history.chmod(0o644)
    modes = []

    def write(path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            modes.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
            file.write("asked\n")

    def read() -> str:
        raise EOFError

    libedit = SimpleNamespace(
        read_history_file=lambda path: None, set_history_length=lambda length: None, write_history_file=write
    )
    monkeypatch.setitem(sys.modules, "readline", libedit)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(chat, "_read", read)
    with Client(transport=FakeTransport("never asked")) as client:
        chat.interactive(chat.Conversation(client, Sampling(), None), history)
    assert modes == [0o600]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert history.read_text() == "asked\n"
