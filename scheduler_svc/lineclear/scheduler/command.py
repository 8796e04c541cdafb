"""`lineclear-scheduler`: says what to install where the scheduler's packages are missing, and else runs `main`."""

from __future__ import annotations

import sys

from lineclear.extras import install_command

_CONFIGURATION = 78  # see `leaving`, which cannot be imported yet


def main() -> int:
    """Run a scheduler with the flags in sys.argv; the exit code."""
    try:
        from lineclear.scheduler.main import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lineclear"):
            raise
        sentence = f"the package {error.name} is not installed; run: {install_command('scheduler')}"
        print(f"lineclear-scheduler: {sentence}", file=sys.stderr)
        return _CONFIGURATION
    return run()
