"""`lineclear simulate`: runs `command`, or names the packages to install if they are missing."""

import sys

from lineclear.exit_codes import ExitCode
from lineclear.extras import missing_package

if __name__ == "__main__":
    try:
        from lineclear.planner.command import main
    except ModuleNotFoundError as error:
        print(f"lineclear simulate: {missing_package(error, 'scheduler')}", file=sys.stderr)
        sys.exit(ExitCode.CONFIGURATION)
    sys.exit(main(sys.argv[1:]))
