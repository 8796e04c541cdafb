"""The options that several commands share: dataclasses whose fields are options.

A command takes such a dataclass as one argument; `expanded` shows typer its fields instead.
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
from lineclear.client.requests import Params, RepetitionDetection, Request, Sampling, pairs
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


def _repetition(text: str | None) -> RepetitionDetection | None:
    flag = "--repetition-detection"
    found = numbers(text, flag)
    if found is not None and len(found) not in (2, 3):
        raise typer.BadParameter("is SIZE,COUNT or SIZE,COUNT,LEAST_SIZE, for instance 20,4", param_hint=flag)
    return None if found is None else RepetitionDetection(*found)


def _content(file: Path | None, flag: str) -> str | None:
    """Return the text of a file. Raises typer.BadParameter."""
    try:
        return None if file is None else file.read_text(encoding="utf-8")
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


@dataclass(frozen=True)
class SamplingFlags:
    """The fields of `Sampling`. Without an option the server's default applies."""

    max_tokens: Annotated[int | None, _option(STOPPING, "Max output tokens.", "--max-tokens", "-n")] = None
    temperature: Annotated[
        float | None, _option(SAMPLING, "0 is greedy; higher is more varied. [0, 10]", "--temperature", "-T")
    ] = None
    top_k: Annotated[int | None, _option(SAMPLING, "Keep the k most likely tokens; 0 keeps all.")] = None
    top_p: Annotated[float | None, _option(SAMPLING, "Keep the smallest set that reaches this probability. (0, 1]")] = (
        None
    )
    min_p: Annotated[
        float | None, _option(SAMPLING, "Drop tokens less likely than this share of the most likely one. [0, 1]")
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
    bad_words: Annotated[
        list[str] | None, _option(SAMPLING, "Never write this word. May be repeated.", metavar="WORD")
    ] = None
    begin_banned_token_ids: Annotated[
        str | None, _option(SAMPLING, "Never begin with these tokens.", metavar="ID,ID,...")
    ] = None
    forced_first_token_id: Annotated[int | None, _option(SAMPLING, "Begin with this token.", metavar="ID")] = None
    no_repeat_ngram_size: Annotated[
        int | None, _option(SAMPLING, "Write no sequence of this many tokens twice; 0 allows all. [0, 100]")
    ] = None
    exponential_decay_start: Annotated[
        int | None, _option(STOPPING, "Output tokens from which --exponential-decay-factor acts. [0, 100000]")
    ] = None
    exponential_decay_factor: Annotated[
        float | None, _option(STOPPING, "Makes the end more likely with each token. [1, 10]")
    ] = None
    n: Annotated[
        int | None, _option(SAMPLING, "Number of outputs, each with a seed of its own: --seed + index.", "--n")
    ] = None
    typical_p: Annotated[
        float | None, _option(SAMPLING, "Keep tokens next to the entropy up to this probability. (0, 1]")
    ] = None
    top_n_sigma: Annotated[
        float | None, _option(SAMPLING, "Drop logits this many deviations below the highest; 0 keeps all.")
    ] = None
    xtc_probability: Annotated[
        float | None, _option(SAMPLING, "Probability that the most likely tokens are excluded. [0, 1]")
    ] = None
    xtc_threshold: Annotated[
        float | None, _option(SAMPLING, "Probability from which XTC excludes tokens. Default 0.1. (0, 0.5]")
    ] = None
    dynatemp_range: Annotated[
        float | None, _option(SAMPLING, "Let the temperature follow the entropy within this range. [0, 10]")
    ] = None
    dynatemp_exponent: Annotated[
        float | None, _option(SAMPLING, "Power of the entropy for --dynatemp-range. [0, 10]")
    ] = None
    dry_multiplier: Annotated[
        float | None, _option(SAMPLING, "DRY: penalize what continues a repetition; 0 is off. [0, 100]")
    ] = None
    dry_base: Annotated[float | None, _option(SAMPLING, "Growth of the DRY penalty. Default 1.75. [1, 10]")] = None
    dry_allowed_length: Annotated[
        int | None, _option(SAMPLING, "Shortest repetition that DRY penalizes. Default 2.")
    ] = None
    dry_penalty_last_n: Annotated[
        int | None, _option(SAMPLING, "Tokens in which DRY looks for repetitions; -1: all, the default.")
    ] = None
    dry_sequence_breakers: Annotated[
        list[str] | None, _option(SAMPLING, "A repetition ends at this text. May be repeated.", metavar="TEXT")
    ] = None
    best_of: Annotated[
        int | None, _option(SAMPLING, "Generate this many outputs and show the --n most likely ones.")
    ] = None
    num_beams: Annotated[int | None, _option(SAMPLING, "Beam search with this many beams. [1, 32]")] = None
    length_penalty: Annotated[
        float | None, _option(SAMPLING, "With --num-beams: above 0 prefers long outputs. Default 1. [-10, 10]")
    ] = None
    early_stopping: Annotated[
        StopBeams | None, _option(SAMPLING, "With --num-beams: when to stop, as in transformers.")
    ] = None
    seed: Annotated[int | None, _option(SAMPLING, "The same seed gives the same answer. [0, 2**64)")] = None
    min_tokens: Annotated[int | None, _option(STOPPING, "Do not stop before this many output tokens.")] = None
    ignore_eos: Annotated[
        bool | None, _option(STOPPING, "Continue after end-of-sequence.", "--ignore-eos/--no-ignore-eos")
    ] = None
    stop: Annotated[
        list[str] | None, _option(STOPPING, "End before this text. May be repeated.", "--stop", "-s", metavar="TEXT")
    ] = None
    stop_regex: Annotated[str | None, _option(STOPPING, "End before text that this regular expression matches.")] = None
    stop_token_ids: Annotated[str | None, _option(STOPPING, "End at one of these tokens.", metavar="ID,ID,...")] = None
    eos_token_ids: Annotated[
        str | None, _option(STOPPING, "End-of-sequence tokens in place of the model's.", metavar="ID,ID,...")
    ] = None
    include_stop_string: Annotated[
        bool | None,
        _option(STOPPING, "Keep the stop text in the answer.", "--include-stop-string/--no-include-stop-string"),
    ] = None
    json_schema: Annotated[
        Path | None, _option(FORM, "Answer with JSON of the schema in this file.", exists=True, dir_okay=False)
    ] = None
    json_object: Annotated[bool | None, _option(FORM, "Answer with a JSON object.", "--json-object")] = None
    regex: Annotated[str | None, _option(FORM, "Answer with a text that this regular expression matches.")] = None
    choice: Annotated[str | None, _option(FORM, "Answer with one of these texts.", metavar="TEXT,TEXT,...")] = None
    grammar: Annotated[
        Path | None, _option(FORM, "Answer with a text of the Lark grammar in this file.", exists=True, dir_okay=False)
    ] = None
    json_whitespace: Annotated[
        Whitespace | None, _option(FORM, "Whitespace in JSON: none, or any. Default compact.")
    ] = None
    constraint_start: Annotated[
        str | None, _option(FORM, "The form begins behind this text, such as </think>.", metavar="TEXT")
    ] = None

    repetition_detection: Annotated[
        str | None,
        _option(STOPPING, "End where a pattern of at most SIZE tokens appears COUNT times.", metavar="SIZE,COUNT"),
    ] = None

    def sampling(self) -> Sampling:
        """Return the sampling parameters. Raises typer.BadParameter."""
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
            "early_stopping": None if self.early_stopping is None else _STOP_BEAMS[self.early_stopping],
            "stop": self.stop or None,
            "repetition_detection": _repetition(self.repetition_detection),
            "bad_words": self.bad_words or None,
            "dry_sequence_breakers": self.dry_sequence_breakers or None,
            "begin_banned_token_ids": numbers(self.begin_banned_token_ids, "--begin-banned-token-ids"),
            "allowed_token_ids": numbers(self.allowed_token_ids, "--allowed-token-ids"),
            "banned_token_ids": numbers(self.banned_token_ids, "--banned-token-ids"),
            "stop_token_ids": numbers(self.stop_token_ids, "--stop-token-ids"),
            "eos_token_ids": numbers(self.eos_token_ids, "--eos-token-ids"),
            "json_schema": _content(self.json_schema, "--json-schema"),
            "choice": None if self.choice is None else self.choice.split(","),
            "grammar": _content(self.grammar, "--grammar"),
            "json_whitespace": None if self.json_whitespace is None else self.json_whitespace.value,
        }
        return Sampling(**given)


@dataclass(frozen=True)
class RequestFlags:
    """The fields of `Request` other than prompt and sampling."""

    request_id: Annotated[str | None, _option(SAMPLING, "Name of the request. By default the server makes one.")] = None
    tenant: Annotated[str | None, _option(SAMPLING, "Tenant whose share of the server it takes.")] = None
    model: Annotated[str | None, _option(SAMPLING, "Name of the model that must answer.")] = None
    model_fingerprint: Annotated[str | None, _option(SAMPLING, "Fingerprint of the model that must answer.")] = None
    priority: Annotated[int | None, _option(SAMPLING, "0 (most urgent) to 255. Default 128.")] = None
    expected_tokens: Annotated[int | None, _option(SAMPLING, "Output tokens to expect. Orders waiting requests.")] = (
        None
    )
    num_speculative_tokens: Annotated[
        int | None, _option(SAMPLING, "Most draft tokens that a step verifies; 0: none. By default the server's.")
    ] = None
    cache_salt: Annotated[str | None, _option(SAMPLING, "Share cached prefixes only with requests of this salt.")] = (
        None
    )
    adapter: Annotated[str | None, _option(SAMPLING, "Name of a loaded LoRA adapter.")] = None
    truncate_prompt_tokens: Annotated[int | None, _option(SAMPLING, "Keep at most this many last prompt tokens.")] = (
        None
    )
    logprobs: Annotated[bool, _option(OUTPUT, "With --json: log probability of each token.", "--logprobs")] = False
    top_logprobs: Annotated[
        int | None, _option(OUTPUT, "With --json: and of this many of the most likely tokens. [0, 20]")
    ] = None
    logprob_token_ids: Annotated[
        str | None, _option(OUTPUT, "With --json: and of these token ids, separated by commas.", metavar="IDS")
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        _option(OUTPUT, "With --json: log probability of each prompt token and of this many most likely. [0, 20]"),
    ] = None
    echo: Annotated[bool, _option(OUTPUT, "Show the prompt before the answer.", "--echo")] = False
    token_timings: Annotated[bool, _option(OUTPUT, "With --json: when each token was made.", "--token-timings")] = False
    keep_special_tokens: Annotated[
        bool, _option(OUTPUT, "Keep the text of special tokens.", "--keep-special-tokens")
    ] = False
    omit_text: Annotated[bool, _option(OUTPUT, "With --json: token ids only, no text.", "--omit-text")] = False

    def params(self) -> Params:
        given = {field.name: getattr(self, field.name) or None for field in dataclasses.fields(self)}
        for name in (
            "priority",
            "truncate_prompt_tokens",
            "prompt_logprobs",
            "num_speculative_tokens",
            "expected_tokens",
        ):  # 0 has a meaning, or is rejected
            given[name] = getattr(self, name)
        given["logprob_token_ids"] = numbers(self.logprob_token_ids, "--logprob-token-ids")
        return cast("Params", given)

    def check_text(self) -> None:
        """Raise typer.BadParameter for an option that is seen in JSON only."""
        for name in _SEEN_IN_JSON:
            if getattr(self, name) not in (None, False):
                raise typer.BadParameter("needs --json", param_hint=f"--{name.replace('_', '-')}")

    def request(self, prompt: Any, sampling: Sampling) -> Request:
        return Request.of(prompt, sampling, **self.params())


_SEEN_IN_JSON = "logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "token_timings", "omit_text"


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


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with the fields of each dataclass as parameters instead of the dataclass."""
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
