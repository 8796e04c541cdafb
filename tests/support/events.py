"""The core's events one request at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from lineclear.scheduler.scheduling.events import StepTokens


def flat(events: Iterable[Any]) -> Iterator[Any]:
    """`events` with a TokensReady for each request in place of a step's columns."""
    for event in events:
        if isinstance(event, StepTokens):
            yield from event
        else:
            yield event
