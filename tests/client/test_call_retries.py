"""Calls that were not taken are made again by both clients, as often as they may be."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lineclear import errors
from lineclear.client import RetryPolicy
from lineclear.errors import QueueFull

QUICK = RetryPolicy(max_attempts=3, first_pause_seconds=0.01, max_pause_seconds=0.02)


FULL = QueueFull("full", retry_after_seconds=0.01)


@pytest.mark.parametrize(
    ("failures", "attempts", "num_requests"),
    [
        ([], 3, 1),
        ([FULL], 3, 2),
        ([FULL] * 2, 3, 3),
        ([FULL] * 3, 3, 3),
        ([FULL], 1, 1),
        ([QueueFull("full")], 3, 1),
        ([QueueFull("full", retry_after_seconds=6000.0)], 3, 1),
        ([errors.InvalidRequest("no")], 3, 1),
        ([errors.InternalError("bug")], 3, 1),
    ],
)
def test_call_is_retried(server: Any, client: Any, failures: list[Any], attempts: int, num_requests: int) -> None:
    """A full queue that names a pause before the deadline, as often as the policy allows; nothing else."""
    server.failures = list(failures)
    patient = client.with_settings(max_attempts=None, retry=replace(QUICK, max_attempts=attempts))
    if len(failures) < num_requests:
        assert patient.generate("a b").text == "a b"
    else:
        with pytest.raises(type(failures[-1])):
            patient.generate("a b")
    assert len(server.requests) == num_requests


def test_later_attempts_have_the_remaining_time(server: Any, client: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=0.5)]
    client.with_settings(max_attempts=2).generate("x", timeout_seconds=10)  # longer ones travel in coarser steps
    first, second = server.remaining_seconds
    assert second <= first - 0.4


def test_server_that_starts_late_is_reached(tmp_path: Path, server: Any, client: Any) -> None:
    address = f"unix:{tmp_path}/late"
    late: list[Any] = []
    timer = threading.Timer(0.1, lambda: late.append(type(server)(address)))
    timer.start()
    client.target = address
    policy = RetryPolicy(max_attempts=200, first_pause_seconds=0.05, max_pause_seconds=0.1)
    assert client.with_settings(max_attempts=None, retry=policy).generate("a b").text == "a b"
    timer.join()
    late[0].stop()
