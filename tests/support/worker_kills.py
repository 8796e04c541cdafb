"""Signals to the worker of a running server, found through its statistics."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from support.time_limits import PATIENCE_SECONDS


def signal_worker(pid_of: Callable[[], int], number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to the worker and return its pid.

    The pid in the statistics is 0 while no worker has joined, as after an earlier kill on a busy machine. A signal to
    pid 0 goes to the whole process group of the tests, so this waits for a worker.

    Args:
        pid_of: reads the worker's pid from the server.
        number: the signal.

    Raises:
        TimeoutError: no worker joined.
    """
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        if pid := pid_of():
            os.kill(pid, number)
            return pid
        time.sleep(0.02)
    raise TimeoutError("no worker joined")
