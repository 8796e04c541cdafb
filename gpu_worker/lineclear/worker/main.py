"""Entry point of `lineclear-worker`. Ties the process to its scheduler before slow imports, and exits fast.

Imports little: a worker must exit with its scheduler even while torch is still being imported. app.py runs the worker.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from lineclear.exit_codes import ExitCode
from lineclear.extras import missing_package
from lineclear.process import core_dumps, parent_death
from lineclear.process.standard_error import open_closed_streams, write_stderr
from lineclear.process.standby import Standby


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it is stopped; return the exit code (see `exit_codes`)."""
    open_closed_streams()
    supervised = parent_death.die_with_parent()
    core_dumps.disable()
    standby = Standby.claim()
    try:
        if standby is not None:
            standby.run_in_background(_import_app)
        from .app import serve
    except ModuleNotFoundError as error:
        write_stderr(f"lineclear-worker: {missing_package(error, 'worker')}")
        return ExitCode.CONFIGURATION

    return serve(sys.argv[1:] if argv is None else argv, supervised, standby)


def _import_app() -> None:
    pass


def run() -> NoReturn:
    """Run `main` and exit without cleanup.

    All messages are sent and logged by then. Library cleanup at interpreter exit (joining thread pools, freeing
    gigabytes) would only delay the next worker's use of the device.
    """
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a closed pipe must not change the exit code
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
