"""`lineclear-scheduler`: says what to install where the scheduler's packages are missing, and else runs `main`."""

from __future__ import annotations

import sys

from lineclear.exit_codes import ExitCode
from lineclear.extras import install_command


def main() -> int:
    """Run a scheduler with the flags in sys.argv; the exit code."""
    try:
        from lineclear.scheduler.main import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lineclear"):
            raise
        sentence = f"the package {error.name} is not installed; run: {install_command('scheduler')}"
        print(f"lineclear-scheduler: {sentence}", file=sys.stderr)
        return ExitCode.CONFIGURATION
    return run()
