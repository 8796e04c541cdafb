"""Wait for a state of a running server."""

from __future__ import annotations

import time
from collections.abc import Callable

from support.time_limits import PATIENCE_SECONDS


def until(condition: Callable[[], object]) -> None:
    """Return once `condition` holds. Fails if it does not within PATIENCE_SECONDS."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
