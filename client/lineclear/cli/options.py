"""The options that several commands share, in bundles.

A command takes a bundle as one argument; `expanded` shows typer its options instead. A bundle is a dataclass whose
fields are options, or has the flags of a table of parameters (`client/parameters.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast, get_args, get_origin, get_type_hints

import grpc
import typer

from lineclear.client import Client
from lineclear.client.call_params import Params
from lineclear.client.grpc_channel import DEFAULT_TARGET
from lineclear.client.parameters import (
    EarlyStopping,
    JsonWhitespace,
    Parameters,
    Repetition,
    RepetitionDetection,
    Sampling,
)
from lineclear.client.requests import Request, pairs
from lineclear.client.results import Queued
from lineclear.errors import InvalidRequest

from . import output
from .tool_calls import choice_of, read_tools
from .wait_notice import WaitNotice

CONNECTION = "Connection"
SAMPLING = "Sampling"
STOPPING = "Stopping"
OUTPUT = "Output"
FORM = "Form of the answer"
TOOLS = "Tools"


def _option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **settings)


Json = Annotated[bool, _option(OUTPUT, "One JSON object per line.", "--json")]
AsChat = Annotated[bool, typer.Option("--chat", help="Send the text as a user's message, through the chat template.")]


def numbers(text: str | None, flag: str) -> list[int] | None:
    """Parse whole numbers separated by commas or spaces. Raises typer.BadParameter."""
    if text is None:
        return None
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter("token ids are whole numbers separated by commas", param_hint=flag) from None


def _repetition(text: str) -> RepetitionDetection:
    flag = "--repetition-detection"
    found = numbers(text, flag) or []
    if len(found) not in (2, 3):
        raise typer.BadParameter("is SIZE,COUNT or SIZE,COUNT,LEAST_SIZE, for instance 20,4", param_hint=flag)
    return RepetitionDetection(*found)


def _content(file: Path, flag: str) -> str:
    """Return the text of a file. Raises typer.BadParameter."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise typer.BadParameter("is a readable text file", param_hint=flag) from None


class Whitespace(StrEnum):
    """The values of --json-whitespace."""

    COMPACT = "compact"
    ANY = "any"


class ModelChange(StrEnum):
    """The values of --on-model-change."""

    ERROR = "error"
    RESTART = "restart"


class StopBeams(StrEnum):
    """The values of --early-stopping."""

    TRUE = "true"
    FALSE = "false"
    NEVER = "never"


OnModelChange = Annotated[
    ModelChange, _option(CONNECTION, "If the model is replaced during an answer: fail, or start the answer over.")
]
_STOP_BEAMS: dict[StopBeams, Any] = {StopBeams.TRUE: True, StopBeams.FALSE: False, StopBeams.NEVER: "never"}


@dataclass(frozen=True)
class Connection:
    """The server, its credentials and the retries."""

    target: Annotated[
        str,
        typer.Option(
            "--target",
            "-t",
            envvar="LINECLEAR_TARGET",
            metavar="ADDRESS",
            help="Server: host:port or unix:/path.",
            rich_help_panel=CONNECTION,
        ),
    ] = DEFAULT_TARGET
    timeout_seconds: Annotated[
        float | None,
        _option(CONNECTION, "Deadline of a call in seconds. Default 600; 30 for calls that generate nothing.",
                "--timeout-seconds", "--timeout", min=0.001),
    ] = None  # fmt: skip
    max_attempts: Annotated[
        int,
        _option(
            CONNECTION,
            "Attempts if the queue is full or the server is not reachable yet; 1: no retries. Default 4.",
            min=1,
        ),
    ] = 4
    tls: Annotated[bool, _option(CONNECTION, "Use TLS with the default certificate authorities.", "--tls")] = False
    tls_ca: Annotated[
        Path | None,
        _option(CONNECTION, "Use TLS with the certificate authority in this PEM file.", exists=True, dir_okay=False),
    ] = None
    tls_cert: Annotated[
        Path | None,
        _option(CONNECTION, "Client certificate, a PEM file; needs --tls-key.", exists=True, dir_okay=False),
    ] = None
    tls_key: Annotated[
        Path | None, _option(CONNECTION, "Key of --tls-cert, a PEM file.", exists=True, dir_okay=False)
    ] = None
    token_file: Annotated[
        Path | None,
        # A file, because every user of the machine can read a command line. LINECLEAR_TOKEN_FILE is the server's file,
        # which has a name beside each token.
        _option(
            CONNECTION,
            "File with the token to send.",
            envvar="LINECLEAR_CLIENT_TOKEN_FILE",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    header: Annotated[
        list[str] | None, _option(CONNECTION, "Metadata to send, as key=value. May be repeated.", metavar="KEY=VALUE")
    ] = None

    def client(self) -> Client:
        """Return the client. Raises typer.BadParameter for an invalid option."""
        if bool(self.tls_cert) != bool(self.tls_key):
            raise typer.BadParameter("go together", param_hint="--tls-cert, --tls-key")
        credentials = None
        if self.tls or self.tls_ca or self.tls_cert:
            files = (self.tls_ca, self.tls_key, self.tls_cert)
            credentials = grpc.ssl_channel_credentials(*(file.read_bytes() if file else None for file in files))
        entries = [entry.partition("=") for entry in self.header or ()]
        if not all(key and equals for key, equals, _ in entries):
            raise typer.BadParameter("is key=value", param_hint="--header")
        headers = [(key, value) for key, _, value in entries]
        settings: dict[str, Any] = {} if self.timeout_seconds is None else {"timeout_seconds": self.timeout_seconds}
        try:
            pairs(headers)
        except InvalidRequest as error:
            raise typer.BadParameter(str(error), param_hint="--header") from None
        try:
            client = Client(
                self.target,
                credentials=credentials,
                token=self.token_file.read_text().strip() if self.token_file else None,
                metadata=headers,
                max_attempts=self.max_attempts,
                **settings,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--target") from None
        client._config = dataclasses.replace(client._config, on_wait=WaitNotice(client.target))
        return client


_PANELS = {
    STOPPING: "max_tokens exponential_decay_start exponential_decay_factor min_tokens ignore_eos stop stop_regex "
    "stop_token_ids eos_token_ids include_stop_string repetition_detection",
    FORM: "json_schema json_object regex choice grammar json_whitespace constraint_start",
    OUTPUT: "logprobs top_logprobs logprob_token_ids prompt_logprobs echo token_timings keep_special_tokens omit_text",
}
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names.split()}
_SHORT = {"max_tokens": "-n", "temperature": "-T", "stop": "-s"}
_SEEN_IN_JSON = "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "token_timings", "omit_text"
_IN_FILE = "json_schema", "grammar"
_SWITCHES = "ignore_eos", "include_stop_string"
"""Flags with a --no- form."""
_TEXTS = list[str] | None
_KINDS: dict[Any, tuple[Any, str | None]] = {
    Mapping[int, float] | None: (_TEXTS, "ID=BIAS"),
    Sequence[int] | None: (str | None, "ID,ID,..."),
    Sequence[str] | None: (_TEXTS, "TEXT"),
    str | Sequence[str] | None: (_TEXTS, "TEXT"),
    Repetition | None: (str | None, "SIZE,COUNT"),
    JsonWhitespace | None: (Whitespace | None, None),
    EarlyStopping | None: (StopBeams | None, None),
    "choice": (str | None, "TEXT,TEXT,..."),
    "bad_words": (_TEXTS, "WORD"),
    "constraint_start": (str | None, "TEXT"),
    "forced_first_token_id": (int | None, "ID"),
}
"""Type and metavar of a flag, by its name, else by the type of the parameter, else that type itself."""


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parameter_flag(name: str, kind: Any, text: str) -> inspect.Parameter:
    """Return the flag of a parameter of the client as a parameter of a command."""
    kind, metavar = _KINDS.get(name) or _KINDS.get(kind) or (kind, None)
    text = re.sub("`([a-z_]+)`", lambda match: _flag_of(match[1]), text)
    names = [_flag_of(name)]
    settings: dict[str, Any] = {"metavar": metavar} if metavar else {}
    if kind == _TEXTS:
        text += " May be repeated."
    if name in _SEEN_IN_JSON:
        text = f"With --json: {text[0].lower()}{text[1:]}"
    if name in _IN_FILE:
        kind, settings, text = Path | None, {"exists": True, "dir_okay": False}, text.rstrip(".") + ", in a file."
    if name in _SWITCHES:
        names = [f"{names[0]}/--no-{names[0][2:]}"]
    if name in _SHORT:
        names.append(_SHORT[name])
    annotation = Annotated[kind, _option(_PANEL_OF.get(name, SAMPLING), text, *names, **settings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _parameter_flags(table: type[Any]) -> list[inspect.Parameter]:
    """Return a flag for each parameter with a help text."""
    hints = get_type_hints(table, include_extras=True)
    return [
        _parameter_flag(name, get_args(hint)[0], hint.__metadata__[0])
        for name, hint in hints.items()
        if get_origin(hint) is Annotated
    ]


def _bias(entries: list[str]) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, _, value in (entry.partition("=") for entry in entries)}
    except ValueError:
        raise typer.BadParameter("is ID=BIAS, for instance 42=-1.5", param_hint="--logit-bias") from None


_VALUES: dict[str, Callable[[Any], Any]] = {
    "logit_bias": _bias,
    "early_stopping": _STOP_BEAMS.__getitem__,
    "repetition_detection": _repetition,
    "choice": lambda text: text.split(","),
    "json_whitespace": lambda choice: choice.value,
}
"""How the value of a flag becomes that of the parameter, where it is not the same."""


class _ParameterFlags:
    """Flags from a table of parameters. Without a flag the server's default applies."""

    options: ClassVar[list[inspect.Parameter]]

    def __init__(self, **given: Any) -> None:
        self._given = given

    def _values(self) -> dict[str, Any]:
        """Return the parameters. Raises typer.BadParameter."""
        values: dict[str, Any] = {}
        for name, given in self._given.items():
            if given is None or given == []:
                continue
            if name in _IN_FILE:
                values[name] = _content(given, _flag_of(name))
            elif name.endswith("token_ids"):
                values[name] = numbers(given, _flag_of(name))
            else:
                values[name] = _VALUES[name](given) if name in _VALUES else given
        return values


class SamplingFlags(_ParameterFlags):
    """The fields of `Sampling`."""

    options = _parameter_flags(Sampling)

    def sampling(self) -> Sampling:
        """Return the sampling parameters. Raises typer.BadParameter."""
        return Sampling(**self._values())


class RequestFlags(_ParameterFlags):
    """The fields of `Request` that have a help text."""

    options = _parameter_flags(Parameters)

    def check_text(self) -> None:
        """Raise typer.BadParameter for an option that is seen in JSON only."""
        for name in _SEEN_IN_JSON:
            if self._given[name] not in (None, False):
                raise typer.BadParameter("needs --json", param_hint=_flag_of(name))

    def request(self, prompt: Any, sampling: Sampling) -> Request:
        """Return the request for a prompt. Raises typer.BadParameter."""
        given = {name: value for name, value in self._values().items() if value != ""}
        return Request.of(prompt, sampling, **cast("Params", given))


@dataclass(frozen=True)
class ToolFlags:
    """The tools of a conversation."""

    tools: Annotated[
        Path | None,
        _option(TOOLS, "Tools that the model may call, a JSON file; the prompt is a user's message.", dir_okay=False),
    ] = None
    tool_choice: Annotated[
        str | None, _option(TOOLS, "auto, none, required, or the name of the tool to call.", metavar="CHOICE")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None,
        _option(TOOLS, "Several calls in an answer, or one.", "--parallel-tool-calls/--no-parallel-tool-calls"),
    ] = None

    def params(self) -> Params:
        """Return the fields of `Request`. Raises typer.BadParameter."""
        if self.tools is None:
            if self.tool_choice is not None or self.parallel_tool_calls is not None:
                raise typer.BadParameter("is missing", param_hint="--tools")
            return {}
        choice = None if self.tool_choice is None else choice_of(self.tool_choice)
        return {
            "tools": read_tools(self.tools),
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }


@dataclass(frozen=True)
class Shown:
    """The format of the output."""

    json_lines: Json = False
    deltas: Annotated[bool, _option(OUTPUT, "With --json: also each piece of the answer.", "--deltas")] = False
    quiet: Annotated[bool, _option(OUTPUT, "No progress and no summary.", "--quiet", "-q")] = False

    def __post_init__(self) -> None:
        if self.deltas and not self.json_lines:
            raise typer.BadParameter("needs --json", param_hint="--deltas")

    @property
    def on_queued(self) -> Callable[[Queued], None] | None:
        """Called with the place of a request that waits; None for no output of it."""
        return None if self.quiet else output.queue_notice()


BUNDLES: tuple[type[Any], ...] = (Connection, SamplingFlags, RequestFlags, ToolFlags, Shown)


def options_of(kind: type[Any]) -> list[inspect.Parameter]:
    """Return the options of a bundle as parameters of a command."""
    if issubclass(kind, _ParameterFlags):
        return kind.options
    types = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
        )
        for field in dataclasses.fields(kind)
    ]


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with the options of each bundle as parameters instead of the bundle."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    bundles: dict[str, type[Any]] = {}
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if kind not in BUNDLES:
            only = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=only, annotation=kind))
            continue
        bundles[parameter.name] = kind
        parameters += options_of(kind)

    @functools.wraps(function)
    def wrapper(**given: Any) -> None:
        for name, kind in bundles.items():
            given[name] = kind(**{option.name: given.pop(option.name) for option in options_of(kind)})
        function(**given)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper
