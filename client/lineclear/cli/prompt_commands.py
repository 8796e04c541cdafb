"""The commands that return scores and vectors of prompts."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lineclear.client.prompt_calls import ContinuationScore, EmbedParams, PoolingName
from lineclear.client.requests import Request

from . import output
from .command_runner import command
from .options import Connection, Json, argument, option
from .prompt_file import PromptFile

_PER_CALL = 128
"""The most inputs or continuations that the server takes in one call."""


@dataclass(frozen=True)
class CallFlags:
    """The parameters that both calls have."""

    adapter: Annotated[str | None, option("Name of a loaded LoRA adapter.")] = None
    priority: Annotated[int | None, option("0 (most urgent) to 255. Default 128.", min=0, max=255)] = None

    def params(self) -> EmbedParams:
        """Return the parameters of a call."""
        return {"adapter": self.adapter, "priority": self.priority}


@command(epilog="Example: lineclear score 'The capital of France is' ' Paris' ' Rome'")
def score(
    connection: Connection,
    prompt: Annotated[str, typer.Argument(help="The prompt. -: standard input.")],
    *,
    continuations: Annotated[
        list[str] | None,
        argument("Texts that may follow, with the space in front that separates them from the prompt."),
    ] = None,
    file: Annotated[
        Path | None, option("Continuations, one per line. -: standard input.", dir_okay=False)
    ] = None,
    top_logprobs: Annotated[
        int | None, option("With --json: this many most likely tokens in the place of each. [0, 20]")
    ] = None,
    flags: CallFlags,
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Show the log-probability of each continuation of a prompt, in the order of the arguments."""
    if prompt == "-" and str(file) == "-":
        raise typer.BadParameter("standard input is the prompt or the continuations, not both", param_hint="--file")
    if bool(continuations) == (file is not None):
        raise typer.BadParameter("give one of CONTINUATIONS and --file")
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    with connection.client() as client:
        for some in _groups(continuations, file):
            found = client.score(text, some, top_logprobs=top_logprobs, **flags.params())
            for continuation, entry in zip(some, found.scores, strict=True):
                if json_lines:
                    output.show_json({"continuation": continuation, **_as_json(entry, top_logprobs)})
                else:
                    output.show(f"{entry.total_logprob:.4f}\t{continuation}\n")


@command(epilog="Example: lineclear embed --pooling mean --file texts.txt > vectors.jsonl")
def embed(
    connection: Connection,
    inputs: Annotated[list[str] | None, argument("Texts. Default: the lines of standard input.")] = None,
    *,
    file: Annotated[Path | None, option("Texts, one per line. -: standard input.", dir_okay=False)] = None,
    pooling: Annotated[PoolingName, typer.Option(help="Which hidden states make up a vector.")] = "last_token",
    dimensions: Annotated[int | None, option("Keep this many leading dimensions.", min=1)] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to length 1.")] = True,
    flags: CallFlags,
    json_lines: Annotated[bool, option("Without effect: vectors are always JSON.", "--json")] = False,
) -> None:  # fmt: skip
    """Write a line of JSON for each text: its vector. Empty lines of a file are skipped."""
    if inputs and file is not None:
        raise typer.BadParameter("give one of INPUTS and --file")
    if not inputs and file is None and sys.stdin.isatty():
        raise typer.BadParameter("give INPUTS, or pipe lines in")
    index = 0
    with connection.client() as client:
        for some in _groups(inputs, file or Path("-")):
            found = client.embed(some, pooling=pooling, normalize=normalize, dimensions=dimensions, **flags.params())
            for vector in found.vectors:
                output.show_json({"index": index, "embedding": list(vector)})
                index += 1


def _groups(texts: Sequence[str] | None, file: Path | None) -> Iterator[list[str]]:
    """Yield the texts, or the lines of the file, as many at a time as a call takes. Raises typer.BadParameter."""
    entries: Iterator[str] = iter(texts or ())
    if not texts:
        assert file is not None
        source = sys.stdin.buffer if str(file) == "-" else file
        lines = PromptFile(source, "text", lambda text: Request(prompt=text))
        if not len(lines):
            raise typer.BadParameter("there is no text", param_hint="--file")
        entries = (entry.shown["prompt"] for entry in lines)
    while group := list(itertools.islice(entries, _PER_CALL)):
        yield group


def _as_json(entry: ContinuationScore, top_logprobs: int | None) -> dict[str, Any]:
    tokens = [[i, x.logprob] for i, x in zip(entry.token_ids, entry.logprobs, strict=True)]
    shown: dict[str, Any] = {"total_logprob": entry.total_logprob, "tokens": tokens}
    if top_logprobs:
        shown["top_logprobs"] = [[[x.token_id, x.logprob] for x in at.top_logprobs] for at in entry.logprobs]
    return shown
