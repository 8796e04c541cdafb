"""The `lineclear` command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from . import generate_commands, output, prompt_commands, server_commands, watch_commands
from .command_runner import app

__all__ = [
    "app",
    "generate_commands",
    "prompt_commands",
    "server_commands",
    "watch_commands",
]  # importing these registers their commands


def _show_version(wanted: bool) -> None:
    if wanted:
        output.show(f"lineclear {version('lineclear')}\n")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Generate text with a lineclear server, watch it, or start one."""
