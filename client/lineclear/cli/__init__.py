"""The `lineclear` command. This file decides only whether it can run: its packages are the extra `cli`."""

from __future__ import annotations

import os
import sys

from lineclear.exit_codes import ExitCode
from lineclear.extras import install_command


def main() -> None:
    """Run the command line in sys.argv and exit with its code (see `exit_codes`)."""
    # Else gRPC, once imported, notes on standard error that a server has left, and the like.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    _open_what_is_closed()
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        print(f"the lineclear command needs the package {error.name}; run: {install_command('cli')}", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
    try:
        from .app import app

        for stream in (sys.stdout, sys.stderr):
            if stream.encoding.lower() != "utf-8" and hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # an answer the terminal cannot show is no reason to fail
        app(prog_name="lineclear")
    except KeyboardInterrupt:  # before a command was there to take it
        sys.exit(ExitCode.INTERRUPTED)


def _open_what_is_closed() -> None:
    """Read nothing and report nowhere where standard input and error are closed. Exit where standard output is."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for the rest of the process
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        print("standard output is closed; give it somewhere to go, as in > /dev/null", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
