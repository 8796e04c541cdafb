"""Priority of threads, for work that must not delay the steps of a worker on the same cores."""

from __future__ import annotations

import contextlib
import os
import threading

LOWEST = 19


def lower_priority(niceness: int) -> None:
    """Give this thread at least this niceness (setpriority(2)). It cannot go back. Do nothing where threads have none.

    Beside a busy thread of 0, one of 5 gets a quarter of a core, one of 10 a tenth, one of 19 a seventieth.
    """
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))
