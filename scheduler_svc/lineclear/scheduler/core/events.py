"""The core's events: everything that happened to requests and workers, as data, in order."""

from __future__ import annotations

from collections.abc import Sequence as Column
from dataclasses import dataclass
from enum import Enum

from lineclear.errors import LineclearError
from lineclear.wire.messages import Logprobs, Scores


class FinishReason(Enum):
    """Why an answer is complete. The core finds STOP_EOS, STOP_TOKEN and LENGTH.

    The shell, which has the text, finds STOP_STRING and REPETITION. CANCELLED is one output of several.
    """

    STOP_EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    LENGTH = 4
    NO_OUTPUT = 5
    """All scores, or the vector, of a request without output have been reported."""
    CANCELLED = 6
    REPETITION = 7


@dataclass(frozen=True, slots=True)
class RequestStats:
    """A request's statistics. Times are seconds on the core's clock; None if the request did not get that far."""

    arrival: float
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    recoveries: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafts that were verified, and those of them that equal their samples."""
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    resumed_at: float | None = None
    """When it last left the queue: at its start, or after a preemption or a lost worker."""
    last_step: int = 0


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """The place of a request in the queue, at one moment."""

    requests_ahead: int
    """Waiting requests with an earlier key."""
    seconds: float | None
    """Predicted time until the request starts; None if unknown."""


@dataclass(frozen=True, slots=True)
class Admitted:
    request_id: str
    position: QueuePosition | None = None
    """Set if the request asks for it and must wait."""


@dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue for the first time."""

    request_id: str
    slot: int
    step: int
    cached_tokens: int
    model_fingerprint: str = ""
    epoch: int = 0
    """Of the worker that runs it."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The confirmed tokens of a step as columns.

    A request has one row, or several rows in order if drafts were accepted.
    """

    request_ids: Column[str]
    indices: Column[int]
    """Index of each token in its request's output, from 0."""
    tokens: Column[int]
    logprobs: Column[Logprobs | None] = ()
    """Empty if no request of the step asks for logprobs."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of the prompt's positions from `first_position` on. Each position is reported once, in order."""

    request_id: str
    first_position: int
    scores: Scores


@dataclass(frozen=True, slots=True)
class Pooled:
    """The vector of a request: little-endian float32."""

    request_id: str
    vector: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete. The last event of its request."""

    request_id: str
    reason: FinishReason
    matched_token_id: int | None
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error. The last event of its request."""

    request_id: str
    error: LineclearError
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class Preempted:
    """The request lost its blocks to an older one and waits again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The worker of `epoch` was lost; its requests will be computed again."""

    epoch: int


Event = Admitted | Started | StepTokens | Scored | Pooled | Finished | Failed | Preempted | WorkerJoined | WorkerLost
