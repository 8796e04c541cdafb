"""Progress is shown on terminals only, as a bar of rich's or a plain one."""

from __future__ import annotations

import io
import sys

import pytest

from lineclear.client import Client, progress
from lineclear.client.testing import FakeTransport


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_plain_bar_says_how_far_how_fast_and_how_long() -> None:
    terminal, clock = Terminal(), Clock()
    bar = progress.PlainBar(terminal, clock, width=10)
    clock.now = 2.0
    bar.update(5, 1, 100, 20)
    assert terminal.getvalue() == "\r[##........] 5/20 50.0 tok/s 2 s, 1 failed, 6 s left\x1b[K"


def test_a_plain_bar_is_not_redrawn_more_than_ten_times_a_second_but_always_at_the_end() -> None:
    terminal, clock = Terminal(), Clock()
    bar = progress.PlainBar(terminal, clock)
    for done in range(1, 101):
        clock.now += 0.001
        bar.update(done, 0, done, 100)
    bar.close()
    drawn = terminal.getvalue().split("\r")[1:]
    assert len(drawn) == 3  # the first, the last, and the one that leaves the line
    assert "100/100" in drawn[-1]
    assert drawn[-1].endswith("\n")


def test_without_a_total_it_counts() -> None:
    terminal, clock = Terminal(), Clock()
    bar = progress.PlainBar(terminal, clock)
    clock.now = 4.0
    bar.update(5, 0, 100, None)
    assert "5 done 25.0 tok/s 4 s" in terminal.getvalue()


def test_no_terminal_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Client(transport=FakeTransport("ok")) as client:
        client.generate_batch(["a", "b"], progress=True)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize("with_rich", [True, False])
def test_a_terminal_gets_richs_bar_or_the_plain_one(monkeypatch: pytest.MonkeyPatch, with_rich: bool) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    with Client(transport=FakeTransport("ok then")) as client:
        client.generate_batch(["a", "b", "c"], progress=True)
    assert "3/3" in terminal.getvalue()
    assert ("━" in terminal.getvalue()) is with_rich


def test_a_bar_is_closed_when_the_batch_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with Client(transport=FakeTransport({"a": "ok"})) as client, pytest.raises(Exception, match="no reply"):
        client.generate_batch(["a", "b"], progress=True)
    assert terminal.getvalue().endswith("\n")
