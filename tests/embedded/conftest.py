"""Fixtures of the tests of lineclear.embedded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.time_limits import PATIENCE_SECONDS


@pytest.fixture
def running() -> Iterator[Callable[[Any], Any]]:
    """Stop the batchers of a test at its end."""
    started: list[Any] = []

    def keep(batcher: Any) -> Any:
        started.append(batcher)
        return batcher

    yield keep
    for batcher in started:
        batcher.stop(drain=False, timeout_seconds=PATIENCE_SECONDS)
