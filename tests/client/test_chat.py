"""`lineclear chat`: a conversation, its commands, its history file, and how it looks on a terminal."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from client.command import QUICK
from client.terminal import Terminal
from support.time_limits import PATIENCE_SECONDS

from lineclear import errors
from lineclear.cli import chat
from lineclear.client import Client, Sampling
from lineclear.client.testing import FakeTransport


def test_whole_conversation_is_sent(cli: Any, server: Any) -> None:
    result = cli("chat", "--system", "be kind", "-n", "4", input="hello\n\nhow are you\n")
    assert (result.exit_code, result.stdout) == (0, "hello\nhow are you\n")
    turns = [[(turn.role, turn.content) for turn in request.chat.messages] for request in server.requests]
    assert turns[0] == [("system", "be kind"), ("user", "hello")]
    assert turns[1] == [*turns[0], ("assistant", "hello"), ("user", "how are you")]
    assert server.requests[1].sampling.max_tokens == 4


def test_error_ends_a_chat_from_a_pipe(cli: Any, server: Any) -> None:
    server.failures = [errors.NoChatTemplate("this model has no chat template")]
    result = cli("chat", *QUICK, input="hello\nagain\n")
    assert result.exit_code == 109
    assert len(server.requests) == 1


@pytest.fixture
def talk(server: Any) -> Iterator[chat.Conversation]:
    with Client(server.target, max_attempts=1) as client:
        yield chat.Conversation(client, Sampling(), None)


def test_slash_commands(
    talk: chat.Conversation, server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = chat.Commands(talk)
    talk.say("one")
    talk.say("two")
    commands.run("/undo")
    assert [message.content for message in talk.chat_messages] == ["one", "one"]
    commands.run("/system be kind")
    commands.run("/set temperature 0.5")
    commands.run('/set stop ["a", "b"]')
    commands.run("/retry")
    assert (server.requests[-1].chat.messages[0].content, len(talk.chat_messages)) == ("be kind", 2)
    assert (server.requests[-1].sampling.temperature, list(server.requests[-1].stop.strings)) == (0.5, ["a", "b"])
    commands.run("/set temperature")
    assert talk.sampling.temperature is None
    commands.run(f"/save {tmp_path}/talk.json")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [turn["role"] for turn in saved] == ["system", "user", "assistant"]
    for name in ("/nonexistent/place", "~no-such-user/place"):
        commands.run(f"/save {name}")
        assert "not saved" in capsys.readouterr().err
    commands.run("/reset")
    assert talk.chat_messages == []
    capsys.readouterr()
    for name in ("/nonsense", "/set nonsense 1", "/undo", "/retry", "/help"):
        commands.run(name)
    assert "unknown command /nonsense" in (text := capsys.readouterr().err)
    assert "/retry" in text
    commands.run("/quit")
    assert commands.is_done


def test_failed_message_is_not_kept(talk: chat.Conversation, server: Any) -> None:
    talk.say("one")
    kept = list(talk.chat_messages)
    server.failures = [errors.QueueFull("full")] * 2
    with pytest.raises(errors.QueueFull):
        talk.say("two")
    with pytest.raises(errors.QueueFull):
        chat.Commands(talk).run("/retry")
    assert talk.chat_messages == kept


@pytest.mark.parametrize("text", ["top_k many", 'logit_bias {"five": 1}', 'logit_bias {"²": 1}'])
def test_wrong_parameter_fails_the_next_message(talk: chat.Conversation, text: str) -> None:
    chat.Commands(talk).run(f"/set {text}")
    with pytest.raises(errors.InvalidRequest, match=rf"sampling\.{text.split()[0]}"):
        talk.say("one")


def test_chat_on_a_terminal(server: Any, tmp_path: Path) -> None:
    history = tmp_path / "history"
    history.write_text("asked before\n")
    history.chmod(0o644)
    with Terminal("chat", "--target", server.target, "--history", str(history), *QUICK) as terminal:
        terminal.type('hello there\n"""\nline one\nline two\n"""\n/params\n/exit\n')
        assert terminal.wait() == 0, terminal.text
    assert terminal.text.count("hello there") >= 2  # typed and answered
    assert server.requests[1].chat.messages[-1].content == "line one\nline two"
    assert "the defaults of the server" in terminal.text
    assert "hello there" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_ctrl_c_keeps_the_chat_open(server: Any) -> None:
    alive = server.script
    server.hold()
    with Terminal("chat", "--target", server.target) as terminal:
        terminal.type("first\n")
        terminal.read_until(lambda _: "\na" in terminal.text.replace("\r", ""))  # below the line that was typed
        terminal.process.send_signal(signal.SIGINT)
        assert server.ended.wait(PATIENCE_SECONDS)
        server.script = alive
        terminal.type("second one\n/exit\n")
        assert terminal.wait() == 0, terminal.text
    assert "stopped; the partial answer is kept" in terminal.text
    assert [turn.content for turn in server.requests[1].chat.messages] == ["first", "a", "second one"]


@pytest.mark.parametrize("was_there", [True, False])
def test_history_file_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_there: bool) -> None:
    """GNU readline makes the file private; libedit, which this test imitates, writes into an existing file."""
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
    before = os.umask(0)  # new files are readable by every user
    try:
        with Client(transport=FakeTransport("never asked")) as client:
            chat.interactive(chat.Conversation(client, Sampling(), None), history)
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert history.read_text() == "asked\n"
