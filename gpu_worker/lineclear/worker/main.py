"""`lineclear-worker`: ties the process to its scheduler before anything else, and ends it without a farewell tour.

What a worker does is in `serving`. This file imports next to nothing, because a scheduler that dies while its worker is
still importing must take it along.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lineclear.exit_codes import ExitCode
from lineclear.extras import install_command
from lineclear.process import core_dumps, parent_death
from lineclear.process.standby import Standby


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it is told to stop; the exit code (see `exit_codes`)."""
    supervised = parent_death.die_with_parent()
    core_dumps.disable()
    standby = Standby.claim()
    try:
        if standby is not None:
            standby.run_in_background(_import_app)
        from .app import serve
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lineclear"):
            raise
        sentence = f"the package {error.name} is not installed; run: {install_command('worker')}"
        print(f"lineclear-worker: {sentence}", file=sys.stderr)
        return ExitCode.CONFIGURATION

    return serve(sys.argv[1:] if argv is None else argv, supervised, standby)


def _import_app() -> None:
    from . import app  # noqa: F401


def run() -> NoReturn:
    """The process, which ends when `main` does.

    All is said and logged by then. What libraries do at the interpreter's end (ending thread pools, freeing gigabytes
    one by one) would only keep the next worker from the device.
    """
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it; the exit code must tell what it means all the same
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
