"""Signals to the worker of a running server, found through its statistics."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from support.waiting import eventually


def signal_worker(pid_of: Callable[[], int], number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to the worker and return its pid, which `pid_of` reads from the server.

    The pid in the statistics is 0 while no worker has joined, as after an earlier kill on a busy machine. A signal to
    pid 0 goes to the whole process group of the tests, so this waits for a worker.
    """
    pid = 0

    def is_joined() -> bool:
        nonlocal pid
        pid = pid_of()
        return pid != 0

    eventually(is_joined, what="a joined worker")
    os.kill(pid, number)
    return pid
