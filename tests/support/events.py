"""Converts between the columns of StepTokens and events of one request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lineclear.scheduler.core.events import StepTokens
from lineclear.wire.messages import Logprobs


class TokensReady(NamedTuple):
    """A confirmed token of one request. `first_index` counts output tokens from 0; `logprobs` has one or none."""

    request_id: str
    first_index: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()


def flat(events: Iterable[Any]) -> Iterator[Any]:
    """Yield `events` with one TokensReady per row in place of each StepTokens."""
    for event in events:
        if isinstance(event, StepTokens):
            # Strict: columns have one length, and all rows have logprobs or none.
            logprobs = event.logprobs or [None] * len(event)
            for name, index, token, entry in zip(event.request_ids, event.indices, event.tokens, logprobs, strict=True):
                yield TokensReady(name, index, (token,), () if entry is None else (entry,))
        else:
            yield event


def step_tokens(
    request_id: str, first_index: int, tokens: Sequence[int], logprobs: Sequence[Logprobs] = ()
) -> StepTokens:
    """Return one event with several tokens of one request, as rows."""
    indices = tuple(range(first_index, first_index + len(tokens)))
    return StepTokens((request_id,) * len(tokens), indices, tuple(tokens), tuple(logprobs))
