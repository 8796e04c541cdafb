"""`lineclear simulate`: becomes the planner."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def run(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the planner. It prints the command that installs a missing package."""
    sys.stdout.flush()
    sys.stderr.flush()
    # -P: a file in the working directory must not shadow a package.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "lineclear.planner", *arguments])
