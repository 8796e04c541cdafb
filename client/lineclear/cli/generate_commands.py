"""The commands that generate text and count tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lineclear.client.call_params import Params
from lineclear.client.requests import Request
from lineclear.exit_codes import ExitCode

from . import batch_run, chat, exit_status, output
from .command_runner import command
from .options import (
    AsChat,
    Connection,
    Json,
    OnModelChange,
    RequestFlags,
    SamplingFlags,
    Shown,
    ToolFlags,
    argument,
    numbers,
    option,
)
from .prompt_file import Entry

RequestId = Annotated[str, typer.Argument(help="The id that `submit` showed.")]


@dataclass(frozen=True)
class Prompts:
    """The prompts of the command line, and their form."""

    prompts: Annotated[list[str] | None, argument("The prompt. Default, or -: standard input.", metavar="PROMPT")] = (
        None
    )
    token_ids: Annotated[str | None, option("Token ids as the prompt.", metavar="ID,ID,...")] = None
    as_chat: AsChat = False
    system: Annotated[str | None, option("With --chat (implied): the system message.")] = None  # fmt: skip

    def entries(self, many: batch_run.ManyPrompts, make: Callable[[Any], Request], is_chat: bool) -> batch_run.Entries:
        """Return the prompts as requests by `make`. Raises typer.BadParameter."""
        ids, texts = numbers(self.token_ids, "--token-ids"), self.prompts or []
        if sum((bool(texts), ids is not None, many.file is not None)) > 1:
            raise typer.BadParameter("give one of PROMPT, --token-ids and --file")
        if ids is not None and is_chat:
            raise typer.BadParameter("is a prompt without a conversation", param_hint="--token-ids")
        is_one = many.file is None and len(texts) < 2
        many.check(is_one)
        if not is_one:
            return many.entries(texts, make)
        one = ids if ids is not None else _text(texts[0] if texts else None, "a PROMPT")
        return [Entry(make(one), {"prompt": one})]

    def is_streamed(self, many: batch_run.ManyPrompts) -> bool:
        """Whether the command has one prompt, whose answer is written while it streams."""
        return many.file is None and many.out is None and len(self.prompts or ()) < 2


@command(epilog="Example: lineclear generate 'Once upon a time' -n 64 --temperature 0")
def generate(
    connection: Connection,
    sampling: SamplingFlags,
    request: RequestFlags,
    tools: ToolFlags,
    shown: Shown,
    many: batch_run.ManyPrompts,
    given: Prompts,
    on_model_change: OnModelChange = "error",
) -> None:
    """Generate the continuation of a prompt and stream it.

    With several prompts, or with --file, each result is one line of JSON, in the order of the prompts. A failed one has
    `error`. The run ends if the server is unavailable.
    """
    chosen, calls, is_streamed = sampling.sampling(), tools.params(), given.is_streamed(many)
    extra: Params = {**calls, "on_model_change": on_model_change}
    is_chat = bool(given.as_chat or calls or given.system is not None)
    if shown.deltas and not is_streamed:
        raise typer.BadParameter("needs one prompt, without --out", param_hint="--deltas")
    if is_streamed and not shown.json_lines:
        request.check_text()

    def make(prompt: Any) -> Request:
        if isinstance(prompt, str) and is_chat:
            prompt = chat.conversation(given.system, prompt)
        return Request.of(request.request(prompt, chosen), **extra)

    entries = given.entries(many, make, is_chat)
    with connection.client() as client:
        if is_streamed:
            batch_run.show(client.stream(next(iter(entries)).request, on_queued=shown.on_queued), shown)
        elif batch_run.several(client, entries, many, progress=not shown.quiet):
            raise typer.Exit(ExitCode.NEGATIVE)


@command(epilog="Example: lineclear result \"$(lineclear submit 'Once upon a time' -n 64)\"")
def submit(
    connection: Connection,
    sampling: SamplingFlags,
    request: RequestFlags,
    tools: ToolFlags,
    prompt: Annotated[str | None, argument("The prompt. Default, or -: standard input.")] = None,
    as_chat: AsChat = False,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Submit a prompt and show its request id. The server generates the answer in the background.

    The server keeps the answer for a while, until it restarts.
    """
    text = _text(prompt, "a PROMPT")
    calls = tools.params()
    prompted = chat.conversation(None, text) if as_chat or calls else text
    asked = Request.of(request.request(prompted, sampling.sampling()), **calls)
    with connection.client() as client:
        submitted = client.submit(asked, queue_position=sys.stderr.isatty() or None)
    if submitted.queued is not None and (notice := output.queue_notice()) is not None:
        notice(submitted.queued)
    if json_lines:
        output.show_json({"request_id": submitted.request_id})
    else:
        output.show(f"{submitted.request_id}\n")


@command()
def attach(
    connection: Connection,
    shown: Shown,
    request_id: RequestId,
    from_index: Annotated[int, typer.Option(help="Index of the first token.", min=0)] = 0,
) -> None:
    """Stream a submitted answer from its start. Ctrl-C does not cancel the request."""
    with connection.client() as client:
        batch_run.show(client.submitted(request_id).attach(from_index, on_queued=shown.on_queued), shown)


@command()
def result(
    connection: Connection,
    request_id: RequestId,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for the complete answer, or show the answer so far.")
    ] = True,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Show a submitted answer once it is complete, or with --no-wait the answer so far."""
    with connection.client() as client:
        submitted = client.submitted(request_id)
        if wait:
            found = submitted.result()
            if json_lines:
                output.show_json(found.to_dict())
            else:
                text = output.joined([entry.text for entry in found.outputs])
                output.show(f"{text}\n" if text or not found.tool_calls else "")
                output.show_calls(found.tool_calls)
            return
        snapshot = submitted.poll()
    if json_lines:
        error = None if snapshot.error is None else exit_status.as_dict(snapshot.error)
        values = {"state": snapshot.state, "text": snapshot.text, "token_ids": list(snapshot.token_ids)}
        values |= {"texts": list(snapshot.texts)} if len(snapshot.texts) > 1 else {}
        output.show_json(values | ({} if error is None else {"error": error}))
    else:
        output.show(f"{output.joined(snapshot.texts)}\n")


@command(epilog="Example: lineclear cancel ID || echo 'no such request'")
def cancel(
    connection: Connection,
    request_id: Annotated[str, typer.Argument(help="The id that `submit` showed, or that of any running request.")],
    json_lines: Json = False,
) -> None:
    """Cancel a request, or drop its kept answer: exit code 1 if the server does not have it."""
    with connection.client() as client:
        found = client.cancel(request_id)
    if json_lines:
        output.show_json({"request_id": request_id, "found": found})
    if not found:
        raise typer.Exit(ExitCode.NEGATIVE)


@command(name="chat", epilog="Example: lineclear chat --system 'Answer in one sentence.'")
def converse(
    connection: Connection,
    sampling: SamplingFlags,
    tools: ToolFlags,
    system: Annotated[str | None, option("The system message.")] = None,
    history: Annotated[
        Path | None, option("Save your messages in this file, for the arrow keys. Default: not saved.", dir_okay=False)
    ] = None,
    on_model_change: OnModelChange = "error",
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Chat with the model.

    On a terminal: /help lists the commands, Ctrl-C stops an answer, Ctrl-D exits. Otherwise each line of standard
    input is a message, and the first error ends the run. After calls of tools, a message is the result of a call.
    """
    with connection.client() as client:
        given: Params = {**tools.params(), "on_model_change": on_model_change}
        talk = chat.Conversation(client, sampling.sampling(), system, json_lines, given)
        if sys.stdin.isatty() and not json_lines:
            chat.interactive(talk, history)
        else:
            for line in sys.stdin:
                if line.strip():
                    talk.say(line.rstrip("\n"))


@command()
def tokenize(
    connection: Connection,
    text: Annotated[str | None, argument("The text. Default, or -: standard input.")] = None,
    decode: Annotated[bool, option("Show the text of token ids.", "--decode", "-d")] = False,
    count: Annotated[bool, option("Show only the number of tokens.", "--count", "-c")] = False,
    as_chat: AsChat = False,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Show the token ids of a text, or with --decode the text of token ids."""
    if decode and (count or as_chat):
        raise typer.BadParameter("takes neither --count nor --chat", param_hint="--decode")
    given = _text(text, "a TEXT")
    with connection.client() as client:
        if decode:
            ids = numbers(given, "TEXT") or []
            found = client.detokenize(ids)
            output.show_json({"text": found, "token_ids": ids}) if json_lines else output.show(f"{found}\n")
            return
        ids = client.tokenize(chat.conversation(None, given) if as_chat else given)
    if json_lines:
        output.show_json({"token_ids": ids, "count": len(ids)})
    else:
        output.show(f"{len(ids)}\n" if count else f"{','.join(map(str, ids))}\n")


def _text(argument: str | None, wanted: str) -> str:
    """Return the argument, or standard input without its last newline."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter(f"give {wanted}, or pipe one in")
    return sys.stdin.read().removesuffix("\n")
