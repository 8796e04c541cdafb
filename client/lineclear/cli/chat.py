"""`lineclear chat`: the conversation, which is sent whole with every message, and its slash commands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lineclear.client import ChatMessage, Client, ToolCall
from lineclear.client.call_params import Params
from lineclear.client.parameters import Sampling
from lineclear.client.requests import SAMPLING_FIELDS
from lineclear.errors import LineclearError

from . import output


def conversation(system: str | None, text: str) -> list[ChatMessage]:
    """Return a user message, after a system message if given."""
    opening = [] if system is None else [ChatMessage("system", system)]
    return [*opening, ChatMessage("user", text)]


class Conversation:
    """The messages so far. A failed request adds none.

    A request stopped by Ctrl-C adds the partial answer, if it is not empty.
    """

    def __init__(
        self,
        client: Client,
        sampling: Sampling,
        system: str | None,
        json_lines: bool = False,
        tools: Params | None = None,
    ) -> None:
        self._tools: Params = tools or {}
        self._calls: list[ToolCall] = []  # of the last answer, without a result
        self._results: list[ChatMessage] = []
        self.sampling = sampling
        self.system = system
        self.chat_messages: list[ChatMessage] = []
        self._client = client
        self._json_lines = json_lines

    @property
    def messages(self) -> list[ChatMessage]:
        """The messages that are sent, with the system message."""
        return self.chat_messages if self.system is None else [ChatMessage("system", self.system), *self.chat_messages]

    def say(self, text: str) -> str:
        """Send a message and stream the answer. Returns a line with its figures.

        After an answer with calls, each message is the result of one; the last result is sent with the others.
        """
        said = [ChatMessage("user", text)]
        if self._calls:
            call, *calls = self._calls
            said = [*self._results, ChatMessage("tool", text, tool_call_id=call.id, name=call.name)]
            if calls:
                self._calls, self._results = calls, said
                return f"the result of {call.name}; next that of {calls[0].name}"
        params: Params = {**self._tools, "on_queued": output.queue_notice()}
        answer = self._client.stream([*self.messages, *said], self.sampling, **params)
        try:
            output.read_answer(answer, is_shown=not self._json_lines)
        except KeyboardInterrupt:
            if answer.text:
                self._add(said, ChatMessage("assistant", answer.text))
            raise
        result = answer.result
        self._add(said, result.message)
        self._calls = list(result.tool_calls)
        if self._json_lines:
            output.show_json({"prompt": text, **result.to_dict()})
        return output.summary(result)

    def undo(self) -> str | None:
        """Remove the last message of the user and its answers. Returns the message."""
        self._calls, self._results = [], []
        while self.chat_messages:
            message = self.chat_messages.pop()
            if message.role == "user":
                return message.content
        return None

    def reset(self) -> None:
        """Remove all messages."""
        self._calls, self._results = [], []
        self.chat_messages.clear()

    def _add(self, said: Sequence[ChatMessage], answer: ChatMessage) -> None:
        self.chat_messages += [*said, answer]
        self._calls, self._results = [], []


def interactive(talk: Conversation, history: Path | None) -> None:
    """Read messages and commands from the terminal."""
    readline = _readline(history)
    commands = Commands(talk)
    output.print_stderr("/help lists the commands; Ctrl-C stops an answer; Ctrl-D exits.")
    try:
        while not commands.is_done:
            try:
                line = _read()
            except EOFError:
                output.print_stderr("")
                return
            except KeyboardInterrupt:
                output.print_stderr("\nCtrl-D exits.")
                continue
            if line.strip():
                _answer(talk, commands, line)
    finally:
        if readline is not None and history is not None:
            readline.set_history_length(1000)
            # GNU readline creates a private file; other implementations do not.
            history.touch(mode=0o600)
            history.chmod(0o600)
            readline.write_history_file(str(history))


def _answer(talk: Conversation, commands: Commands, line: str) -> None:
    count = len(talk.chat_messages)
    try:
        if line.startswith("/"):
            commands.run(line)
        else:
            output.print_stderr(talk.say(line))
    except KeyboardInterrupt:
        kept = "kept; /undo removes it" if len(talk.chat_messages) > count else "not kept"
        output.print_stderr(f"stopped; the partial answer is {kept}")
    except LineclearError as error:
        output.show_error(error)


class Commands:
    """The slash commands."""

    def __init__(self, talk: Conversation) -> None:
        self.is_done = False
        self._talk = talk
        self._table: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "/help": ("", "this list", self._help),
            "/reset": ("", "start a new conversation", self._reset),
            "/system": ("[TEXT]", "set the system message, or remove it", self._system),
            "/set": ("NAME [VALUE]", "set a sampling parameter, or remove it", self._set),
            "/params": ("", "the parameters in use", self._params),
            "/undo": ("", "remove the last message and its answer", self._undo),
            "/retry": ("", "send the last message again", self._retry),
            "/show": ("", "the conversation so far", self._show),
            "/save": ("FILE", "write the conversation as JSON", self._save),
            "/exit": ("", "exit", self._exit),
        }

    def run(self, line: str) -> None:
        """Raises LineclearError as `Conversation.say` does."""
        name, _, argument = line.partition(" ")
        if name == "/quit":
            name = "/exit"
        if name not in self._table:
            output.print_stderr(f"unknown command {name}; /help lists the commands", "yellow")
            return
        self._table[name][2](argument.strip())

    def _help(self, _: str) -> None:
        for name, (argument, help_text, _run) in self._table.items():
            output.print_stderr(f"{f'{name} {argument}':<22}{help_text}", "")
        output.print_stderr('A message of several lines begins and ends with """.', "")

    def _reset(self, _: str) -> None:
        self._talk.reset()
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
            with contextlib.suppress(ValueError):  # the next message says what is wrong
                value = {int(token): bias for token, bias in value.items()}
        self._talk.sampling = self._talk.sampling.replace(**{name: value})
        self._params("")

    def _params(self, _: str) -> None:
        given = {name: value for name, value in dataclasses.asdict(self._talk.sampling).items() if value is not None}
        output.print_stderr(
            " ".join(f"{name}={value}" for name, value in given.items()) or "the defaults of the server"
        )

    def _undo(self, _: str) -> None:
        output.print_stderr("nothing to remove" if self._talk.undo() is None else "removed")

    def _retry(self, _: str) -> None:
        kept = list(self._talk.chat_messages)
        text = self._talk.undo()
        if text is None:
            output.print_stderr("nothing to send again")
            return
        try:
            output.print_stderr(self._talk.say(text))
        except BaseException:
            if len(self._talk.chat_messages) < len(kept):  # the new answer is empty
                self._talk.chat_messages = kept
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
        except (OSError, RuntimeError) as error:  # RuntimeError: no such user exists
            text = output.os_error_text(error) if isinstance(error, OSError) else str(error)
            output.print_stderr(f"not saved: {text}", "red")
        else:
            output.print_stderr(f"saved {len(messages)} messages")

    def _exit(self, _: str) -> None:
        self.is_done = True


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
    """Return the readline module with the saved history, None if Python has no readline."""
    try:
        import readline
    except ImportError:
        return None
    if history is not None and history.exists():
        readline.read_history_file(str(history))
    return readline if sys.stdin.isatty() else None
