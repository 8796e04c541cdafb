"""The progress bar of a batch is shown on terminals only."""

from __future__ import annotations

import io
import sys

import pytest

from lineclear.client import Client
from lineclear.client.testing import FakeTransport


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_terminal_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Client(transport=FakeTransport("ok")) as client:
        client.generate_batch(["a", "b"], progress=True)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize("has_rich", [True, False])
def test_bar_on_a_terminal_needs_rich(monkeypatch: pytest.MonkeyPatch, has_rich: bool) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    with Client(transport=FakeTransport("ok then")) as client:
        assert len(client.generate_batch(["a", "b", "c"], progress=True)) == 3
    assert ("3/3" in terminal.getvalue()) is has_rich
    assert ("━" in terminal.getvalue()) is has_rich


def test_bar_is_closed_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Client(transport=FakeTransport({"a": "ok"})) as client, pytest.raises(Exception, match="no reply"):
        client.generate_batch(["a", "b"], progress=True)
    assert terminal.getvalue().endswith(("\n", "\x1b[?25h"))  # the cursor is shown again
