"""The core's events one request at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lineclear.scheduler.core.events import StepTokens
from lineclear.wire.messages import Logprobs


def flat(events: Iterable[Any]) -> Iterator[Any]:
    """`events` with a TokensReady for each request in place of a step's columns."""
    for event in events:
        if isinstance(event, StepTokens):
            rows = len(event.request_ids)
            assert len(event.indices) == len(event.tokens) == rows, "columns of different lengths"
            assert len(event.logprobs) in (0, rows), "logprobs for some rows and not for others"
            yield from event
        else:
            yield event


def told(request_id: str, first_index: int, tokens: Sequence[int], logprobs: Sequence[Logprobs] = ()) -> StepTokens:
    """Some tokens of one request: to who reads rows, the same as a step for each."""
    indices = tuple(range(first_index, first_index + len(tokens)))
    return StepTokens((request_id,) * len(tokens), indices, tuple(tokens), tuple(logprobs))
