"""The commands: what each is called, which flags it takes, and the few lines of what it does."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Collection
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.live import Live
from typer.core import TyperCommand

from lineclear.client import methods
from lineclear.client.operator import LogLevel, Operator
from lineclear.client.requests import Request
from lineclear.client.results import HealthStatus
from lineclear.errors import LineclearError

from . import batch, chat, exits, screen, serve
from .flags import Connection, RequestFlags, SamplingFlags, expanded, numbers
from .prompts import Entry, PromptFile

app = typer.Typer(
    name="lineclear",
    epilog=exits.table(),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        screen.show(f"lineclear {version('lineclear')}\n")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Ask a lineclear server, watch it, or start one."""


Json = Annotated[bool, typer.Option("--json", help="One JSON object per line.", rich_help_panel="Output")]


def command(**settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose errors become a sentence and an exit code."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        inner = expanded(function)

        def guarded(**given: Any) -> None:
            try:
                inner(**given)
            except LineclearError as error:
                if given.get("json_lines"):
                    screen.show_json({"error": exits.as_dict(error)})
                screen.show_error(error)
                raise typer.Exit(exits.exit_code(error)) from None
            except KeyboardInterrupt:
                screen.note("interrupted")
                raise typer.Exit(exits.INTERRUPTED) from None
            except BrokenPipeError:
                raise  # whoever read our output left: typer ends quietly
            except OSError as error:
                screen.note(f"error: {screen.refused(error)}", "bold red")
                raise typer.Exit(exits.USAGE) from None

        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        guarded.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        guarded.__name__ = function.__name__
        guarded.__signature__ = inner.__signature__  # type: ignore[attr-defined]
        guarded.__annotations__ = inner.__annotations__
        app.command(**settings)(guarded)
        return function

    return register


@command(epilog="Example: lineclear generate 'Once upon a time' -n 64 --temperature 0")
def generate(
    connection: Connection,
    sampling: SamplingFlags,
    request: RequestFlags,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="What to continue. None, or -: standard input.", show_default=False),
    ] = None,
    token_ids: Annotated[
        str | None, typer.Option(metavar="ID,ID,...", help="Token ids as the prompt.", show_default=False)
    ] = None,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, through the chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="With --chat (implied): the system message.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help='Prompts, one a line, or a JSON object a line: {"prompt": ..., "max_tokens": ...}. -: standard input.',
            dir_okay=False, show_default=False, rich_help_panel="Many prompts",
        ),
    ] = None,
    file_format: Annotated[
        batch.Format, typer.Option("--format", help="Of --file.", rich_help_panel="Many prompts")
    ] = batch.Format.AUTO,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write results here, one JSON object per line, in the order of the prompts.",
            dir_okay=False, show_default=False, rich_help_panel="Many prompts",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on after the results --out has.", rich_help_panel="Many prompts"),
    ] = False,
    concurrency: Annotated[
        int, typer.Option(help="Requests at once.", min=1, max=4096, rich_help_panel="Many prompts")
    ] = 32,
    json_lines: Json = False,
    deltas: Annotated[
        bool,
        typer.Option("--deltas", help="With --json: each piece as it comes, too.", rich_help_panel="Output"),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress and no summary.", rich_help_panel="Output")
    ] = False,
) -> None:  # fmt: skip
    """Continue a prompt, and show the answer as it is made.

    With several prompts, or with --file, each result is a JSON object on a line, in the order of the prompts; one that
    failed has `error` in it. A server that is gone ends the run.
    """
    chosen = sampling.sampling()

    def make(prompt: Any) -> Request:
        if isinstance(prompt, str) and (as_chat or system is not None):
            prompt = chat.conversation(system, prompt)
        return request.request(prompt, chosen)

    ids = numbers(token_ids, "--token-ids")
    if sum((bool(prompts), ids is not None, file is not None)) > 1:
        raise typer.BadParameter("give one of PROMPT, --token-ids and --file")
    if resume and out is None:
        raise typer.BadParameter("needs --out", param_hint="--resume")
    if file is not None:
        source = sys.stdin.buffer if str(file) == "-" else file
        entries: Collection[Entry] = PromptFile(source, file_format, make)
    elif prompts and len(prompts) > 1:
        entries = [Entry(make(prompt), {"prompt": prompt}) for prompt in prompts]
    else:
        one = ids if ids is not None else _text(prompts[0] if prompts else None, "a PROMPT")
        if out is None:
            with connection.client() as client:
                batch.single(client, make(one), json_lines, deltas, quiet)
            return
        entries = [Entry(make(one), {"prompt": one})]
    with connection.client() as client:
        failed = batch.several(client, entries, out, resume, concurrency, not quiet)
    if failed:
        raise typer.Exit(exits.SOME_FAILED)


@command(epilog="Example: lineclear result \"$(lineclear submit 'Once upon a time' -n 64)\"")
def submit(
    connection: Connection,
    sampling: SamplingFlags,
    request: RequestFlags,
    prompt: Annotated[
        str | None, typer.Argument(help="What to continue. None, or -: standard input.", show_default=False)
    ] = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="As a user's message, through the chat template.")] = False,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Begin an answer and leave it to the server; shows the id to fetch it by.

    The server keeps the answer for a while after its end, as long as it runs itself.
    """
    text = _text(prompt, "a PROMPT")
    asked = request.request(chat.conversation(None, text) if as_chat else text, sampling.sampling())
    with connection.client() as client:
        submitted = client.submit(asked)
    if json_lines:
        screen.show_json({"request_id": submitted.request_id})
    else:
        screen.show(f"{submitted.request_id}\n")


@command()
def attach(
    connection: Connection,
    request_id: Annotated[str, typer.Argument(help="What `submit` showed.")],
    from_index: Annotated[int, typer.Option(help="The first token wanted.", min=0)] = 0,
    json_lines: Json = False,
    deltas: Annotated[
        bool,
        typer.Option("--deltas", help="With --json: each piece as it comes, too.", rich_help_panel="Output"),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No summary.", rich_help_panel="Output")
    ] = False,
) -> None:  # fmt: skip
    """Show a submitted answer: what there is of it, and then the rest as it is made. Leaving does not end it."""
    with connection.client() as client:
        batch.show(client.submitted(request_id).attach(from_index), json_lines, deltas, quiet)


@command()
def result(
    connection: Connection,
    request_id: Annotated[str, typer.Argument(help="What `submit` showed.")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="For the end; or show what there is now.")] = True,
    cancel: Annotated[bool, typer.Option("--cancel", help="End it, or have its answer forgotten, instead.")] = False,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Show a submitted answer once it is complete, or with --no-wait what there is of it now."""
    with connection.client() as client:
        submitted = client.submitted(request_id)
        if cancel:
            if not submitted.cancel():
                raise typer.Exit(exits.SOME_FAILED)
            return
        if wait:
            found = submitted.result()
            screen.show_json(found.to_dict()) if json_lines else screen.show(f"{found.text}\n")
            return
        snapshot = submitted.poll()
    if json_lines:
        error = None if snapshot.error is None else exits.as_dict(snapshot.error)
        values = {"state": snapshot.state, "text": snapshot.text, "token_ids": list(snapshot.token_ids)}
        screen.show_json(values | ({} if error is None else {"error": error}))
    else:
        screen.show(f"{snapshot.text}\n")


@command(name="chat", epilog="Example: lineclear chat --system 'Answer in one sentence.'")
def converse(
    connection: Connection,
    sampling: SamplingFlags,
    system: Annotated[str | None, typer.Option(help="The system message.", show_default=False)] = None,
    history: Annotated[
        Path | None,
        typer.Option(help="Keep what you type here, for the arrow keys. Default: not kept.", dir_okay=False,
                     show_default=False),
    ] = None,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Hold a conversation.

    On a terminal: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves. Otherwise each line of standard
    input is a message, and the first error ends the run.
    """
    with connection.client() as client:
        talk = chat.Conversation(client, sampling.sampling(), system, json_lines)
        if sys.stdin.isatty() and not json_lines:
            chat.interactive(talk, history)
        else:
            for line in sys.stdin:
                if line.strip():
                    talk.say(line.rstrip("\n"))


class _Verbatim(TyperCommand):
    """A command that takes every word as it stands, `--` and --help too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return []


@command(name="serve", cls=_Verbatim)
def start(context: typer.Context) -> None:
    """Start a server here: scheduler and worker. All flags are the scheduler's; `serve --help` shows them."""
    serve.run(context.args)


@command()
def health(
    connection: Connection,
    service: Annotated[
        str, typer.Option(help="Which service; '' is the process as a whole.")
    ] = methods.SERVICE,
    wait_seconds: Annotated[
        float, typer.Option("--wait-seconds", "--wait", help="Ask again until it serves, for so long.", min=0)
    ] = 0.0,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Ask whether the server is serving: exit code 0 if it is, 1 if it answers that it is not."""
    until = time.monotonic() + wait_seconds
    with connection.client() as client:
        while True:
            left = until - time.monotonic()
            try:
                found = client.health(service, timeout_seconds=max(left, connection.timeout_seconds or 5.0))
            except LineclearError:
                if left <= 0:
                    raise
            else:
                if found is HealthStatus.SERVING or left <= 0:
                    break
            time.sleep(min(0.25, max(left, 0.0)))
    if json_lines:
        screen.show_json({"status": found, "service": service})
    else:
        screen.show(f"{found}\n")
    if found is not HealthStatus.SERVING:
        raise typer.Exit(exits.SOME_FAILED)


@command()
def stats(
    connection: Connection,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until interrupted.")] = False,
    interval_seconds: Annotated[
        float, typer.Option("--interval-seconds", "--interval", help="With --watch: how often.", min=0.05)
    ] = 1.0,
    count: Annotated[
        int | None, typer.Option(help="With --watch: stop after so many.", min=1, show_default=False)
    ] = None,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Show what the server is doing and how it has been doing."""
    rounds = count if watch else 1
    with connection.client() as client:
        if json_lines:
            for values in batch.repeated(client.stats, interval_seconds, rounds):
                screen.show_json(screen.plain(values))
            return
        console = Console()
        if not watch:
            console.print(screen.stats_view(client.stats()))
            return
        with Live(console=console, auto_refresh=False, screen=console.is_terminal and count is None) as live:
            for values in batch.repeated(client.stats, interval_seconds, rounds):
                live.update(screen.stats_view(values), refresh=True)


@command()
def model(connection: Connection, json_lines: Json = False) -> None:
    """Show which model is served, and the limits in force."""
    with connection.client() as client:
        found = client.model()
    if json_lines:
        screen.show_json(screen.plain(found))
    else:
        Console().print(screen.model_view(found))


class Order(StrEnum):
    """What an operator can ask."""

    DRAIN = "drain"
    DUMP = "dump"
    FLUSH = "flush"
    LOG_LEVEL = "log-level"


@command(name="admin", epilog="Example: lineclear admin drain --target unix:/run/lineclear/admin.sock")
def operate(
    connection: Connection,
    order: Annotated[
        Order,
        typer.Argument(
            help="drain: leave as after SIGTERM. dump: write the flight recorder. flush: forget cached prefixes. "
            "log-level: log from LEVEL upwards.",
        ),
    ],
    level: Annotated[
        str | None, typer.Argument(help="debug, info, warning or error.", show_default=False)
    ] = None,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Give the server an order, at its admin address."""
    if (level is not None) != (order is Order.LOG_LEVEL) or level not in (None, *get_args(LogLevel)):
        raise typer.BadParameter("log-level takes debug, info, warning or error; the others take nothing")
    with connection.client() as client:
        operator = Operator(client)
        if order is Order.DRAIN:
            left = operator.drain()
            sentence = f"{left.requests_in_progress} requests in progress, ended in {left.seconds:.1f} s at the latest"
            values = left._asdict()
        elif order is Order.DUMP:
            sentence = operator.dump_recording()
            values = {"path": sentence}
        elif order is Order.FLUSH:
            operator.flush_prefix_cache()
            sentence, values = "", {}
        else:
            previous = operator.set_log_level(cast("LogLevel", level))
            sentence, values = f"{level}, before {previous}", {"level": level, "previous": previous}
    if json_lines:
        screen.show_json(values)
    elif sentence:
        screen.show(f"{sentence}\n")


@command()
def tokenize(
    connection: Connection,
    text: Annotated[
        str | None, typer.Argument(help="The text. None, or -: standard input.", show_default=False)
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", "-d", help="The other way: TEXT is token ids, the output is their text.")
    ] = False,
    count: Annotated[bool, typer.Option("--count", "-c", help="Show only how many tokens.")] = False,
    as_chat: Annotated[bool, typer.Option("--chat", help="As a user's message, through the chat template.")] = False,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Show the token ids of a text, or with --decode the text of token ids."""
    given = _text(text, "a TEXT")
    with connection.client() as client:
        if decode:
            ids = numbers(given, "TEXT") or []
            found = client.detokenize(ids)
            screen.show_json({"text": found, "token_ids": ids}) if json_lines else screen.show(f"{found}\n")
            return
        ids = client.tokenize(chat.conversation(None, given) if as_chat else given)
    if json_lines:
        screen.show_json({"token_ids": ids, "count": len(ids)})
    else:
        screen.show(f"{len(ids)}\n" if count else f"{','.join(map(str, ids))}\n")


def _text(argument: str | None, wanted: str) -> str:
    """The argument, or standard input as it is but for one newline at its end."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter(f"give {wanted}, or pipe one in")
    return sys.stdin.read().removesuffix("\n")
