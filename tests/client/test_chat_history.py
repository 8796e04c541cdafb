"""What was typed into a chat is kept where nobody else reads it, whichever library edits the lines."""

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
    """Files are everybody's unless somebody says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("generous_umask")
@pytest.mark.parametrize("was_there", [True, False])
def test_the_history_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_there: bool) -> None:
    """GNU's readline sees to it by itself; libedit, which some Pythons have instead, writes into what is there."""
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
