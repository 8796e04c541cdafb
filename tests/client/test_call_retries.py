"""Calls that were not taken are made again by both clients, as often as they may be."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.time_limits import PATIENCE_SECONDS

from lineclear import errors
from lineclear.client import RetryPolicy
from lineclear.errors import QueueFull

QUICK = RetryPolicy(max_attempts=3, first_pause_seconds=0.01, max_pause_seconds=0.02)


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_full_queue_is_retried(server: Any, client: Any, refused: int) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=0.01)] * refused
    patient = client.with_settings(max_attempts=None, retry=QUICK)
    assert patient.generate("a b").text == "a b"
    assert len(server.requests) == refused + 1


def test_attempts_are_bounded(server: Any, client: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=0.01)] * 3
    with pytest.raises(QueueFull):
        client.with_settings(max_attempts=None, retry=QUICK).generate("a b")
    assert len(server.requests) == 3


def test_one_attempt_disables_retries(server: Any, client: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=0.01)]
    with pytest.raises(QueueFull):
        client.with_settings(max_attempts=1).generate("x")
    assert len(server.requests) == 1


def test_invalid_request_is_not_retried(server: Any, client: Any) -> None:
    for error in (QueueFull("full"), errors.InvalidRequest("no"), errors.InternalError("bug")):
        server.requests.clear()
        server.failures = [error]
        with pytest.raises(type(error)):
            client.with_settings(max_attempts=5).generate("x")
        assert len(server.requests) == 1


def test_pause_beyond_the_deadline_raises_at_once(server: Any, client: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=600.0)]
    began = time.monotonic()
    with pytest.raises(QueueFull):
        client.with_settings(max_attempts=5).generate("x", timeout_seconds=PATIENCE_SECONDS)
    assert time.monotonic() - began < PATIENCE_SECONDS


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
