"""Converts between the columns of StepTokens and events of one request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lineclear.scheduler.core.events import StepTokens
from lineclear.wire.messages import Logprobs


def flat(events: Iterable[Any]) -> Iterator[Any]:
    """Yield `events` with one TokensReady per row in place of each StepTokens."""
    for event in events:
        if isinstance(event, StepTokens):
            rows = len(event.request_ids)
            assert len(event.indices) == len(event.tokens) == rows, "columns of different lengths"
            assert len(event.logprobs) in (0, rows), "logprobs for some rows and not for others"
            yield from event
        else:
            yield event


def step_tokens(
    request_id: str, first_index: int, tokens: Sequence[int], logprobs: Sequence[Logprobs] = ()
) -> StepTokens:
    """Return one event with several tokens of one request, as rows."""
    indices = tuple(range(first_index, first_index + len(tokens)))
    return StepTokens((request_id,) * len(tokens), indices, tuple(tokens), tuple(logprobs))
