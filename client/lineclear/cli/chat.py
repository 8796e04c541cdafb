"""`lineclear chat`: a conversation that is kept here and sent whole with every message, and its commands."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lineclear.client import Client, sigint
from lineclear.client.requests import SAMPLING_FIELDS, ChatMessage, Sampling
from lineclear.errors import LineclearError

from . import output


def conversation(system: str | None, text: str) -> list[ChatMessage]:
    """One message of the user's, after a system message if there is one."""
    opening = [] if system is None else [ChatMessage("system", system)]
    return [*opening, ChatMessage("user", text)]


class Conversation:
    """The turns so far, and how to take the next one. A turn that fails leaves no trace.

    One that is stopped by Ctrl-C stays, with what there was of its answer, unless there was nothing yet.
    """

    def __init__(self, client: Client, sampling: Sampling, system: str | None, json_lines: bool = False) -> None:
        self.sampling = sampling
        self.system = system
        self.turns: list[ChatMessage] = []
        self._client = client
        self._json_lines = json_lines

    @property
    def messages(self) -> list[ChatMessage]:
        """What the server is shown."""
        return self.turns if self.system is None else [ChatMessage("system", self.system), *self.turns]

    def say(self, text: str) -> str:
        """Send a message and show the answer as it comes. Returns a line about the answer."""
        question = ChatMessage("user", text)
        answer = self._client.stream([*self.messages, question], self.sampling)
        try:
            with sigint.cancel_on_sigint(answer.cancel), answer as stream:
                try:
                    if not self._json_lines:
                        output.show_answer(stream)
                    for _ in stream:
                        pass
                finally:
                    if not self._json_lines and stream.text:
                        output.show("\n")
        except KeyboardInterrupt:
            if answer.text:
                self.turns += [question, ChatMessage("assistant", answer.text)]
            raise
        result = stream.result
        self.turns += [question, ChatMessage("assistant", result.text)]
        if self._json_lines:
            output.show_json({"prompt": text, **result.to_dict()})
        return output.summary(result)

    def undo(self) -> str | None:
        """Forget the last message and its answer. Returns the message."""
        if not self.turns:
            return None
        text = self.turns[-2].content
        del self.turns[-2:]
        return text


def interactive(talk: Conversation, history: Path | None) -> None:
    """Read messages and commands from the terminal until its end."""
    readline = _readline(history)
    commands = Commands(talk)
    output.print_stderr("/help lists the commands; Ctrl-C stops an answer; Ctrl-D leaves.")
    try:
        while not commands.left:
            try:
                line = _read()
            except EOFError:
                output.print_stderr("")
                return
            except KeyboardInterrupt:
                output.print_stderr("\nCtrl-D leaves.")
                continue
            if line.strip():
                _answer(talk, commands, line)
    finally:
        if readline is not None and history is not None:
            readline.set_history_length(1000)
            # Before anything is in it: GNU's readline makes a file that is its owner's alone, others write into this.
            history.touch(mode=0o600)
            history.chmod(0o600)
            readline.write_history_file(str(history))


def _answer(talk: Conversation, commands: Commands, line: str) -> None:
    turns = len(talk.turns)
    try:
        if line.startswith("/"):
            commands.run(line)
        else:
            output.print_stderr(talk.say(line))
    except KeyboardInterrupt:
        kept = "kept as far as it came; /undo forgets it" if len(talk.turns) > turns else "not kept"
        output.print_stderr(f"stopped; the answer is {kept}")
    except LineclearError as error:
        output.show_error(error)


class Commands:
    """The lines that begin with a slash."""

    def __init__(self, talk: Conversation) -> None:
        self.left = False
        self._talk = talk
        self._table: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/help": ("", "this list", self._help),
            "/reset": ("", "begin a new conversation", self._reset),
            "/system": ("[TEXT]", "set the system message, or remove it", self._system),
            "/set": ("NAME [VALUE]", "set a sampling parameter, or remove it", self._set),
            "/params": ("", "the parameters in use", self._params),
            "/undo": ("", "forget the last message and its answer", self._undo),
            "/retry": ("", "ask the last message again", self._retry),
            "/show": ("", "the conversation so far", self._show),
            "/save": ("FILE", "write the conversation as JSON", self._save),
            "/exit": ("", "leave", self._exit),
        }

    def run(self, line: str) -> None:
        """Raises LineclearError as `Conversation.say` does."""
        name, _, argument = line.partition(" ")
        if name == "/quit":
            name = "/exit"
        if name not in self._table:
            output.print_stderr(f"there is no command {name}; /help lists them", "yellow")
            return
        self._table[name][2](argument.strip())

    def _help(self, _: str) -> None:
        for name, (argument, help_text, _run) in self._table.items():
            output.print_stderr(f"{f'{name} {argument}':<22}{help_text}", "")
        output.print_stderr('A message of several lines begins and ends with """.', "")

    def _reset(self, _: str) -> None:
        self._talk.turns.clear()
        output.print_stderr("a new conversation")

    def _system(self, text: str) -> None:
        self._talk.system = text or None
        output.print_stderr("system message set" if text else "no system message")

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if name not in SAMPLING_FIELDS:
            output.print_stderr(f"the parameters are {', '.join(sorted(SAMPLING_FIELDS))}", "yellow")
            return
        value: Any = None
        if text.strip():
            try:
                value = json.loads(text)
            except ValueError:
                value = text.strip()
        if name == "logit_bias" and isinstance(value, dict):
            value = {int(token): bias for token, bias in value.items() if token.lstrip("-").isdigit()}
        self._talk.sampling = self._talk.sampling.replace(**{name: value})
        self._params("")

    def _params(self, _: str) -> None:
        given = {name: value for name, value in dataclasses.asdict(self._talk.sampling).items() if value is not None}
        output.print_stderr(
            " ".join(f"{name}={value}" for name, value in given.items()) or "all as the server has them"
        )

    def _undo(self, _: str) -> None:
        output.print_stderr("nothing to forget" if self._talk.undo() is None else "forgotten")

    def _retry(self, _: str) -> None:
        kept = list(self._talk.turns)
        text = self._talk.undo()
        if text is None:
            output.print_stderr("nothing to ask again")
            return
        try:
            output.print_stderr(self._talk.say(text))
        except BaseException:
            if len(self._talk.turns) < len(kept):  # nothing came in place of the earlier answer
                self._talk.turns = kept
            raise

    def _show(self, _: str) -> None:
        for message in self._talk.messages:
            output.show(f"{message.role}: {message.content}\n")

    def _save(self, name: str) -> None:
        if not name:
            output.print_stderr("/save FILE", "yellow")
            return
        messages = [dataclasses.asdict(message) for message in self._talk.messages]
        try:
            Path(name).expanduser().write_text(json.dumps(messages, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except OSError as error:
            output.print_stderr(f"not saved: {output.os_error_text(error)}", "red")
        else:
            output.print_stderr(f"saved {len(messages)} messages")

    def _exit(self, _: str) -> None:
        self.left = True


def _read() -> str:
    line = input("> ")
    if not line.lstrip().startswith('"""'):
        return line
    lines = [line.lstrip().removeprefix('"""')]
    while not lines[-1].rstrip().endswith('"""') or (len(lines) == 1 and not lines[0].strip()):
        lines.append(input("... "))
    lines[-1] = lines[-1].rstrip().removesuffix('"""')
    return "\n".join(lines).strip("\n")


def _readline(history: Path | None) -> Any:
    """Line editing where Python has it, with what was typed before."""
    try:
        import readline
    except ImportError:
        return None
    if history is not None and history.exists():
        readline.read_history_file(str(history))
    return readline if sys.stdin.isatty() else None
