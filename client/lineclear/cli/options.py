"""The options that several commands share, in bundles.

A command takes a bundle as one argument; `expanded` shows typer its options instead. A bundle is a dataclass whose
fields are options, or has the flags of a table of parameters (`client/parameters.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, get_args, get_origin, get_type_hints

import grpc
import typer

from lineclear.client import Client, parameters
from lineclear.client.call_params import Params
from lineclear.client.call_settings import DEFAULT_TIMEOUT_SECONDS
from lineclear.client.parameters import (
    EarlyStopping,
    Parameters,
    Repetition,
    RepetitionDetection,
    Sampling,
)
from lineclear.client.requests import Request, pairs
from lineclear.client.results import Queued
from lineclear.client.target import DEFAULT_TARGET
from lineclear.errors import InvalidRequest

from . import output
from .wait_notice import WaitNotice

CONNECTION = "Connection"
SAMPLING = "Sampling"
STOPPING = "Stopping"
OUTPUT = "Output"
FORM = "Form of the answer"
TOOLS = "Tools"


def option(help: str, *names: str, panel: str | None = None, **settings: Any) -> Any:
    """Return the declaration of an option. The help does not show its default."""
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **settings)


def argument(help: str, **settings: Any) -> Any:
    """Return the declaration of an argument. The help does not show its default."""
    return typer.Argument(help=help, show_default=False, **settings)


Json = Annotated[bool, option("One JSON object per line.", "--json", panel=OUTPUT)]
AsChat = Annotated[bool, option("Send the text as a user's message, through the chat template.", "--chat")]
OnModelChange = Annotated[
    parameters.OnModelChange,
    option("If the model is replaced during an answer: fail, or start the answer over.", panel=CONNECTION),
]


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


def _pem(help: str) -> Any:
    return option(help, panel=CONNECTION, exists=True, dir_okay=False)


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
        option(
            "Deadline of a call in seconds. Default 600; 30 for calls that generate nothing.",
            "--timeout-seconds",
            "--timeout",
            panel=CONNECTION,
            min=0.001,
        ),
    ] = None
    max_attempts: Annotated[
        int,
        option(
            "Attempts if the queue is full or the server is not reachable yet; 1: no retries. Default 4.",
            panel=CONNECTION,
            min=1,
        ),
    ] = 4
    tls: Annotated[bool, option("Use TLS with the default certificate authorities.", "--tls", panel=CONNECTION)] = False
    tls_ca: Annotated[Path | None, _pem("Use TLS with the certificate authority in this PEM file.")] = None
    tls_cert: Annotated[Path | None, _pem("Client certificate, a PEM file; needs --tls-key.")] = None
    tls_key: Annotated[Path | None, _pem("Key of --tls-cert, a PEM file.")] = None
    # A file, because every user of the machine can read a command line. LINECLEAR_TOKEN_FILE is the server's file,
    # which has a name beside each token.
    token_file: Annotated[
        Path | None,
        option(
            "File with the token to send.",
            panel=CONNECTION,
            envvar="LINECLEAR_CLIENT_TOKEN_FILE",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    header: Annotated[
        list[str] | None,
        option("Metadata to send, as key=value. May be repeated.", panel=CONNECTION, metavar="KEY=VALUE"),
    ] = None  # fmt: skip

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
        timeout_seconds = DEFAULT_TIMEOUT_SECONDS if self.timeout_seconds is None else self.timeout_seconds
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
                timeout_seconds=timeout_seconds,
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
    EarlyStopping | None: (Literal["true", "false", "never"] | None, None),
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
    annotation = Annotated[kind, option(text, *names, panel=_PANEL_OF.get(name, SAMPLING), **settings)]
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
    "early_stopping": {"true": True, "false": False, "never": "never"}.__getitem__,
    "repetition_detection": _repetition,
    "choice": lambda text: text.split(","),
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
        option(
            "Tools that the model may call, a JSON file; the prompt is a user's message.", panel=TOOLS, dir_okay=False
        ),
    ] = None
    tool_choice: Annotated[
        str | None, option("auto, none, required, or the name of the tool to call.", panel=TOOLS, metavar="CHOICE")
    ] = None
    parallel_tool_calls: Annotated[
        bool | None,
        option("Several calls in an answer, or one.", "--parallel-tool-calls/--no-parallel-tool-calls", panel=TOOLS),
    ] = None  # fmt: skip

    def params(self) -> Params:
        """Return the fields of `Request`. Raises typer.BadParameter."""
        if self.tools is None:
            if self.tool_choice is not None or self.parallel_tool_calls is not None:
                raise typer.BadParameter("is missing", param_hint="--tools")
            return {}
        choice: Any = self.tool_choice
        if choice not in (None, "auto", "none", "required"):
            choice = {"function": {"name": choice}}
        return {
            "tools": _read_tools(self.tools),
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }


def _read_tools(file: Path) -> list[Any]:
    """Return the tools in a file: a JSON list, or one tool. Raises typer.BadParameter."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(output.os_error_text(error), param_hint="--tools") from None
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{file} is no JSON: {error}", param_hint="--tools") from None
    tools = found if isinstance(found, list) else [found]
    if not all(isinstance(tool, dict) for tool in tools):
        raise typer.BadParameter(f"{file} must have a JSON object for each tool", param_hint="--tools")
    return tools


@dataclass(frozen=True)
class Shown:
    """The format of the output."""

    json_lines: Json = False
    deltas: Annotated[bool, option("With --json: also each piece of the answer.", "--deltas", panel=OUTPUT)] = False
    quiet: Annotated[bool, option("No progress and no summary.", "--quiet", "-q", panel=OUTPUT)] = False

    def __post_init__(self) -> None:
        if self.deltas and not self.json_lines:
            raise typer.BadParameter("needs --json", param_hint="--deltas")

    @property
    def on_queued(self) -> Callable[[Queued], None] | None:
        """Called with the place of a request that waits; None for no output of it."""
        return None if self.quiet else output.queue_notice()


def _is_bundle(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, _ParameterFlags))


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
        if not _is_bundle(kind):
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
