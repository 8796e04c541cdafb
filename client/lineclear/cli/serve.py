"""`lineclear serve`: becomes the scheduler, which starts its worker. Decides only whether that can work."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from lineclear.client.local_server import command, missing
from lineclear.exit_codes import ExitCode
from lineclear.extras import install_command

from . import output


def run(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the scheduler. Exits with a sentence where its packages are not installed."""
    if absent := missing():
        output.print_stderr(
            f"error: a server needs more than the client: {', '.join(absent)} is not installed", "bold red"
        )
        output.print_stderr(f"this brings scheduler and worker: {install_command('all')}")
        raise typer.Exit(ExitCode.CONFIGURATION)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command(arguments))
