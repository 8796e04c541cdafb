"""The entry point of the `lineclear` command. It checks that the packages of the extra `cli` are installed."""

from __future__ import annotations

import os
import sys

from lineclear.exit_codes import ExitCode
from lineclear.extras import install_command


def main() -> None:
    """Run the command line in sys.argv and exit with its code (see `exit_codes`)."""
    # gRPC would log lost connections to standard error.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    _open_closed_streams()
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
                stream.reconfigure(errors="replace")  # show what the terminal can show
        app(prog_name="lineclear")
    except KeyboardInterrupt:  # before a command runs
        sys.exit(ExitCode.INTERRUPTED)


def _open_closed_streams() -> None:
    """Open the null device for a closed standard input or error. Exit if standard output is closed."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # for the rest of the process
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        print("standard output is closed; redirect it, for instance with > /dev/null", file=sys.stderr)
        sys.exit(ExitCode.USAGE)
