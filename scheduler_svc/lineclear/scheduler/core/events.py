"""What the core tells the shell: everything that happened to a request, as data, in order."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Column
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from typing import NamedTuple

from lineclear.errors import LineclearError
from lineclear.wire.messages import Logprobs


class FinishReason(Enum):
    """Why an answer is complete. STOP_STRING is found by the shell, which knows the text; the rest by the core."""

    STOP_EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    LENGTH = 4


@dataclass(frozen=True, slots=True)
class RequestStats:
    """A request's account. Times are seconds of the clock the core is given; None where it never came to that."""

    arrival: float
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    recoveries: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    last_step: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is in the queue."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue for the first time."""

    request_id: str
    slot: int
    step: int
    cached_tokens: int
    model_fingerprint: str = ""


class TokensReady(NamedTuple):
    """A row of StepTokens by itself. `first_index` counts output tokens from 0; `logprobs` is empty or one a token."""

    request_id: str
    first_index: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The confirmed tokens of a step, one for each request, as columns. Iterating gives them request by request."""

    request_ids: Column[str]
    indices: Column[int]
    """Of each token among its request's output tokens, from 0."""
    tokens: Column[int]
    logprobs: Column[Logprobs | None] = ()
    """Empty when nobody asked."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[TokensReady]:
        columns = (self.request_ids, self.indices, self.tokens, self.logprobs or repeat(None))
        for request_id, index, token, logprobs in zip(*columns, strict=False):
            yield TokensReady(request_id, index, (token,), () if logprobs is None else (logprobs,))


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete. After it comes no event of this request."""

    request_id: str
    reason: FinishReason
    matched_token_id: int | None
    record: RequestStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer. After it comes no event of this request."""

    request_id: str
    error: LineclearError
    record: RequestStats


@dataclass(frozen=True, slots=True)
class Preempted:
    """The request gave its blocks to an older one and waits again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker is there; `epoch` names it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker is gone; what it held will be computed again."""

    epoch: int


Event = Admitted | Started | StepTokens | Finished | Failed | Preempted | WorkerJoined | WorkerLost
