"""Signals to the worker of a running server, and answers over a worker that is killed while they run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.service import Service
from support.time_limits import PATIENCE_SECONDS
from support.waiting import eventually

from lineclear.client import Generation


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


def answers_over_a_kill(service: Service, requests: Sequence[tuple[Any, dict[str, Any]]]) -> list[Generation]:
    """Return the answers to all prompts at once, over a killed worker. Some have ten tokens by then.

    On a busy machine all may be complete when the signal arrives: then they are asked for again.
    """
    found: list[Generation] = []
    for _ in range(5):
        if not any(answer.timings.recoveries for answer in found):
            found = _over_a_kill(service, requests)
    assert max(answer.timings.recoveries for answer in found) == 1
    return found


def _over_a_kill(service: Service, requests: Sequence[tuple[Any, dict[str, Any]]]) -> list[Generation]:
    seen = threading.Event()

    def read(request: tuple[Any, dict[str, Any]]) -> Generation:
        prompt, params = request
        with service.client.stream(prompt, ignore_eos=True, **params) as stream:
            for delta in stream:
                if delta.first_index >= 10:
                    seen.set()
        return stream.result

    joins = service.client.stats().worker.joins
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = [pool.submit(read, request) for request in requests]
        assert seen.wait(PATIENCE_SECONDS)
        signal_worker(lambda: service.worker_pid)
        found = [answer.result() for answer in answers]
    eventually(lambda: service.client.stats().worker.joins == joins + 1, what="another worker")
    return found
