"""The commands that return scores and vectors of prompts."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from . import output
from .command_runner import command
from .options import Connection, Json


class PoolingOption(StrEnum):
    """Which hidden states make up a vector."""

    LAST_TOKEN = "last_token"
    MEAN = "mean"


@command(epilog="Example: lineclear score 'The capital of France is' ' Paris' ' Rome'")
def score(
    connection: Connection,
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    continuations: Annotated[
        list[str],
        typer.Argument(help="Texts that may follow, with the space in front that separates them from the prompt."),
    ],
    json_lines: Json = False,
) -> None:  # fmt: skip
    """Show the log-probability of each continuation of a prompt, in the order of the arguments."""
    with connection.client() as client:
        found = client.score(prompt, continuations)
    for text, entry in zip(continuations, found.scores, strict=True):
        if json_lines:
            tokens = [[i, x.logprob] for i, x in zip(entry.token_ids, entry.logprobs, strict=True)]
            output.show_json({"continuation": text, "total_logprob": entry.total_logprob, "tokens": tokens})
        else:
            output.show(f"{entry.total_logprob:.4f}\t{text}\n")


@command(epilog="Example: lineclear embed --pooling mean 'first text' 'second text'")
def embed(
    connection: Connection,
    inputs: Annotated[
        list[str] | None, typer.Argument(help="Texts. Without any, each line of standard input.", show_default=False)
    ] = None,
    pooling: Annotated[
        PoolingOption, typer.Option(help="Which hidden states make up a vector.")
    ] = PoolingOption.LAST_TOKEN,
    dimensions: Annotated[
        int | None, typer.Option(help="Keep this many leading dimensions.", min=1, show_default=False)
    ] = None,
    normalize: Annotated[bool, typer.Option(help="Scale vectors to length 1.")] = True,
) -> None:  # fmt: skip
    """Write a line of JSON for each text: its vector."""
    texts = inputs or [line for line in sys.stdin.read().splitlines() if line]
    with connection.client() as client:
        found = client.embed(texts, pooling=pooling.value, normalize=normalize, dimensions=dimensions)
    for index, vector in enumerate(found.vectors):
        output.show_json({"index": index, "embedding": list(vector)})
