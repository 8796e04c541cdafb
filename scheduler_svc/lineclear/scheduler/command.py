"""`lineclear-scheduler`: runs `main`, or names the packages to install if they are missing."""

from __future__ import annotations

import sys

from lineclear.exit_codes import ExitCode
from lineclear.extras import install_command


def main() -> int:
    """Run a scheduler with the flags in sys.argv. Returns the exit code."""
    try:
        from lineclear.scheduler.main import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lineclear"):
            raise
        sentence = f"the package {error.name} is not installed; run: {install_command('scheduler')}"
        program = "lineclear simulate" if sys.argv[1:2] == ["simulate"] else "lineclear-scheduler"
        print(f"{program}: {sentence}", file=sys.stderr)
        return ExitCode.CONFIGURATION
    return run()


if __name__ == "__main__":
    sys.exit(main())
