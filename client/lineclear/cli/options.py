"""The flags that several commands share, as bundles: a dataclass each, whose fields are the flags.

A command takes a bundle as one argument; `expanded` shows typer its fields instead. A field of `Sampling` is a flag
here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import grpc
import typer

from lineclear.client import Client
from lineclear.client.channel import DEFAULT_TARGET
from lineclear.client.requests import Params, Request, Sampling, pairs
from lineclear.errors import InvalidRequest

from .wait_notice import WaitNotice

CONNECTION = "Connection"
SAMPLING = "Sampling"
STOPPING = "Stopping"
OUTPUT = "Output"


def _option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False, **settings)


Json = Annotated[bool, _option(OUTPUT, "One JSON object per line.", "--json")]
AsChat = Annotated[bool, typer.Option("--chat", help="Send the text as a user's message, through the chat template.")]


def numbers(text: str | None, flag: str) -> list[int] | None:
    """Comma or space separated whole numbers."""
    if text is None:
        return None
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter("token ids are whole numbers separated by commas", param_hint=flag) from None


class ModelChange(StrEnum):
    """Of --on-model-change."""

    ERROR = "error"
    RESTART = "restart"


@dataclass(frozen=True)
class Connection:
    """Where the server is and how patient to be."""

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
        _option(CONNECTION, "Deadline of a call in seconds. Default 600; of calls that compute nothing 30.",
                "--timeout-seconds", "--timeout", min=0.001),
    ] = None  # fmt: skip
    max_attempts: Annotated[
        int, _option(CONNECTION, "Attempts where there is no room, or nobody yet; 1 never retries. Default 4.", min=1)
    ] = 4
    on_model_change: Annotated[
        ModelChange,
        _option(CONNECTION, "Where another model takes over in the middle of an answer: fail, or begin it again."),
    ] = ModelChange.ERROR
    tls: Annotated[bool, _option(CONNECTION, "Encrypt, trusting the usual authorities.", "--tls")] = False
    tls_ca: Annotated[
        Path | None,
        _option(CONNECTION, "Encrypt, trusting the authority in this PEM file.", exists=True, dir_okay=False),
    ] = None
    tls_cert: Annotated[
        Path | None,
        _option(CONNECTION, "Present the certificate in this PEM file; needs --tls-key.", exists=True, dir_okay=False),
    ] = None
    tls_key: Annotated[
        Path | None, _option(CONNECTION, "The key of --tls-cert, in a PEM file.", exists=True, dir_okay=False)
    ] = None
    token_file: Annotated[
        Path | None,
        # Not the token itself: every user of the machine can read a command line.
        # And not LINECLEAR_TOKEN_FILE: that is the server's, with a name beside each token.
        _option(
            CONNECTION,
            "Show the token in this file.",
            envvar="LINECLEAR_CLIENT_TOKEN_FILE",
            exists=True,
            dir_okay=False,
        ),
    ] = None
    header: Annotated[
        list[str] | None, _option(CONNECTION, "Metadata to send, as key=value. May be repeated.", metavar="KEY=VALUE")
    ] = None

    def client(self) -> Client:
        """Raises typer.BadParameter for what cannot be a server."""
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
                on_model_change=self.on_model_change.value,
                **settings,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--target") from None
        client._config = dataclasses.replace(client._config, on_wait=WaitNotice(client.target))
        return client


@dataclass(frozen=True)
class SamplingFlags:
    """Every field of `Sampling`. A flag that is not given leaves the server's default."""

    max_tokens: Annotated[int | None, _option(STOPPING, "The most output tokens.", "--max-tokens", "-n")] = None
    temperature: Annotated[
        float | None, _option(SAMPLING, "0 is greedy; higher is more varied. [0, 10]", "--temperature", "-T")
    ] = None
    top_k: Annotated[int | None, _option(SAMPLING, "Keep the k most likely tokens; 0 keeps all.")] = None
    top_p: Annotated[float | None, _option(SAMPLING, "Keep the smallest set that reaches this probability. (0, 1]")] = (
        None
    )
    min_p: Annotated[
        float | None, _option(SAMPLING, "Drop what is less likely than this share of the most likely. [0, 1]")
    ] = None
    repetition_penalty: Annotated[
        float | None, _option(SAMPLING, "Divides the logits of tokens seen before. [0.01, 10]")
    ] = None
    presence_penalty: Annotated[
        float | None, _option(SAMPLING, "Subtracted from tokens already in the output. [-2, 2]")
    ] = None
    frequency_penalty: Annotated[
        float | None, _option(SAMPLING, "Subtracted once per occurrence in the output. [-2, 2]")
    ] = None
    logit_bias: Annotated[
        list[str] | None, _option(SAMPLING, "Add to a token's logit. May be repeated.", metavar="ID=BIAS")
    ] = None
    allowed_token_ids: Annotated[str | None, _option(SAMPLING, "Sample only these tokens.", metavar="ID,ID,...")] = None
    banned_token_ids: Annotated[str | None, _option(SAMPLING, "Never sample these tokens.", metavar="ID,ID,...")] = None
    seed: Annotated[int | None, _option(SAMPLING, "The same seed gives the same answer. [0, 2**64)")] = None
    min_tokens: Annotated[int | None, _option(STOPPING, "Do not stop before this many output tokens.")] = None
    ignore_eos: Annotated[
        bool | None, _option(STOPPING, "Sample on through end-of-sequence.", "--ignore-eos/--no-ignore-eos")
    ] = None
    stop: Annotated[
        list[str] | None, _option(STOPPING, "End before this text. May be repeated.", "--stop", "-s", metavar="TEXT")
    ] = None
    stop_token_ids: Annotated[str | None, _option(STOPPING, "End at one of these tokens.", metavar="ID,ID,...")] = None
    include_stop_string: Annotated[
        bool | None,
        _option(STOPPING, "Keep the stop text in the answer.", "--include-stop-string/--no-include-stop-string"),
    ] = None

    def sampling(self) -> Sampling:
        """Raises typer.BadParameter for lists that are none."""
        bias: dict[int, float] = {}
        for entry in self.logit_bias or ():
            token, _, value = entry.partition("=")
            try:
                bias[int(token)] = float(value)
            except ValueError:
                raise typer.BadParameter("is ID=BIAS, for instance 42=-1.5", param_hint="--logit-bias") from None
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given |= {
            "logit_bias": bias or None,
            "stop": self.stop or None,
            "allowed_token_ids": numbers(self.allowed_token_ids, "--allowed-token-ids"),
            "banned_token_ids": numbers(self.banned_token_ids, "--banned-token-ids"),
            "stop_token_ids": numbers(self.stop_token_ids, "--stop-token-ids"),
        }
        return Sampling(**given)


@dataclass(frozen=True)
class RequestFlags:
    """What a request says besides prompt and sampling."""

    priority: Annotated[int | None, _option(SAMPLING, "0 (most urgent) to 255. Default 128.")] = None
    logprobs: Annotated[bool, _option(OUTPUT, "With --json: log probability of each token.", "--logprobs")] = False
    top_logprobs: Annotated[
        int | None, _option(OUTPUT, "With --json: and of this many most likely tokens. [0, 20]")
    ] = None
    token_timings: Annotated[bool, _option(OUTPUT, "With --json: when each token was made.", "--token-timings")] = False
    keep_special_tokens: Annotated[
        bool, _option(OUTPUT, "Keep the text of special tokens.", "--keep-special-tokens")
    ] = False
    omit_text: Annotated[bool, _option(OUTPUT, "With --json: token ids only, no text.", "--omit-text")] = False

    def params(self) -> Params:
        given = {field.name: getattr(self, field.name) or None for field in dataclasses.fields(self)}
        given["priority"] = self.priority  # where 0 is not "not given"
        return cast("Params", given)

    def request(self, prompt: Any, sampling: Sampling) -> Request:
        return Request.of(prompt, sampling, **self.params())


@dataclass(frozen=True)
class Shown:
    """How an answer is shown."""

    json_lines: Json = False
    deltas: Annotated[bool, _option(OUTPUT, "With --json: each piece as it comes, too.", "--deltas")] = False
    quiet: Annotated[bool, _option(OUTPUT, "No progress and no summary.", "--quiet", "-q")] = False


BUNDLES: tuple[type[Any], ...] = (Connection, SamplingFlags, RequestFlags, Shown)


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """The function with the fields of each bundle among its parameters in place of the bundle."""
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
        types = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
            )
            for field in dataclasses.fields(kind)
        ]

    @functools.wraps(function)
    def wrapper(**given: Any) -> None:
        for name, kind in bundles.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        function(**given)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper
