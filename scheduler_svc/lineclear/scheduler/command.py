"""`lineclear-scheduler`: runs `main`, or names the packages to install if they are missing."""

from __future__ import annotations

import sys

from lineclear.exit_codes import ExitCode
from lineclear.extras import missing_package
from lineclear.process.standard_error import write_stderr


def main() -> int:
    """Run a scheduler with the flags in sys.argv. Returns the exit code."""
    try:
        from lineclear.scheduler.main import main as run
    except ModuleNotFoundError as error:
        write_stderr(f"lineclear-scheduler: {missing_package(error, 'scheduler')}")
        return ExitCode.CONFIGURATION
    return run()


if __name__ == "__main__":
    sys.exit(main())
