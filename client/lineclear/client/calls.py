"""What both clients share: the settings of a client, a call about to be made, and the face of a running answer.

Everything here is arithmetic on values; the waiting is in `sync` and `aio`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

from lineclear.errors import LineclearError
from lineclear.v1 import inference_pb2 as pb

from . import methods
from .assembly import Assembly
from .channels import Pairs
from .requests import Metadata, Params, Prompt, Request, Sampling, Unset, pairs
from .results import Delta, Generation
from .retries import Attempts, Resumptions, RetryPolicy

DEFAULT_TIMEOUT_SECONDS = 600.0
# Of the calls that compute nothing.
SHORT_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request on its way: the message and what travels beside it."""

    message: pb.GenerateRequest | pb.AttachRequest
    timeout_seconds: float | None
    metadata: Pairs
    retry: RetryPolicy

    @property
    def names_itself(self) -> bool:
        """The caller gave the request a name."""
        return isinstance(self.message, pb.GenerateRequest) and self.message.HasField("request_id")

    def attempts(self) -> Attempts:
        """The attempts of the call, whose time starts to run now."""
        return Attempts(self.retry, self.timeout_seconds, meets_itself=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """What every call of a client has in common unless it says otherwise."""

    timeout_seconds: float | None
    retry: RetryPolicy
    metadata: Pairs
    sampling: Sampling | None

    def outgoing(
        self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> Outgoing:
        """Raises InvalidRequest for what no message can hold, TypeError for a keyword that is no parameter."""
        request = Request.of(prompt, sampling, **params)
        own = request.timeout_seconds
        return Outgoing(
            message=request.to_proto(self.sampling),
            timeout_seconds=self.timeout_seconds if isinstance(own, Unset) else own,
            metadata=pairs(self.metadata, request.metadata),
            retry=self.retry,
        )

    def attaching(self, request_id: str, from_index: int, metadata: Pairs, timeout_seconds: float | None) -> Outgoing:
        """What listens to a submitted request."""
        message = pb.AttachRequest(request_id=request_id, from_index=from_index)
        return Outgoing(message, timeout_seconds, metadata, self.retry)

    def short(self, timeout_seconds: float | Unset | None) -> Attempts:
        """The attempts of a call that computes nothing."""
        if isinstance(timeout_seconds, Unset):
            timeout_seconds = min(SHORT_TIMEOUT_SECONDS, self.timeout_seconds or SHORT_TIMEOUT_SECONDS)
        return Attempts(self.retry, timeout_seconds)


class Answer:
    """The readable side of a running answer: what has come so far, and the result once all has."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        message = outgoing.message
        self._assembly = Assembly(message.from_index if isinstance(message, pb.AttachRequest) else 0)
        self._heard = False  # a first response came: from here on the call is not made again but resumed
        self._ended = False
        self._result: Generation | None = None

    def _begin(self) -> None:
        self._attempts = self._outgoing.attempts()
        self._resumptions = Resumptions(self._outgoing.retry, self._attempts)

    def _next_call(self) -> tuple[methods.Method[Any, pb.GenerateResponse], pb.GenerateRequest | pb.AttachRequest]:
        """What is asked for next: everything, or what is missing."""
        message = self._outgoing.message
        if isinstance(message, pb.AttachRequest):
            index = self._assembly.next_index
            return methods.ATTACH, pb.AttachRequest(request_id=message.request_id, from_index=index)
        return methods.GENERATE, self._assembly.rest(message) if self._heard else message

    def _pause_after(self, error: LineclearError) -> float:
        """Seconds until the next call, which is `_next_call()`. Raises `error` where there is to be none."""
        if not self._heard:
            return self._attempts.pause_after(error)
        return self._resumptions.pause_after(error)

    def _take(self, message: pb.GenerateResponse) -> Delta | None:
        """The piece that a message has; None where it is only the greeting of a call that goes on."""
        self._heard = True
        delta = self._assembly.add(message)
        self._assembly.resumes = self._resumptions.count
        if delta.token_ids or delta.text or delta.finish_reason:
            self._resumptions.progressed()
            return delta
        return delta if delta.started is not None or not self._resumptions.count else None

    @property
    def resumes(self) -> int:
        """How often the answer was cut off so far, and went on or is about to."""
        return self._resumptions.count

    @property
    def text(self) -> str:
        """The text so far."""
        return self._assembly.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._assembly.token_ids)

    @property
    def result(self) -> Generation:
        """The whole answer. Raises RuntimeError before the loop over the pieces has ended."""
        if not (self._ended and self._assembly.complete):
            raise RuntimeError("the answer is not complete: read the stream to its end first")
        if self._result is None:
            self._result = self._assembly.generation()
        return self._result


def settings(
    timeout_seconds: float | None,
    max_attempts: int | None,
    retry: RetryPolicy | None,
    metadata: Metadata,
    sampling: Sampling | None,
) -> Settings:
    """Of a client's arguments; `max_attempts` alone is a RetryPolicy with the other numbers left as they are."""
    if max_attempts is not None and retry is not None:
        raise ValueError("give max_attempts or retry, not both")
    if max_attempts is not None:
        retry = RetryPolicy(max_attempts=max_attempts)
    return Settings(timeout_seconds, retry or RetryPolicy(), pairs(metadata), sampling)
