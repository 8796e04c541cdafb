"""The `lineclear` command."""

from __future__ import annotations

from typing import Annotated

import typer

from lineclear.extras import installed_version

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
        output.show(f"lineclear {installed_version()}\n")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Generate text with a lineclear server, watch it, or start one."""
