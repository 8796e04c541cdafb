"""What both clients share: the settings of a client, and a call about to be made.

Everything here is arithmetic on values; the waiting is in `sync`, `aio` and `stream`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack, get_args

from lineclear.v1 import inference_pb2 as pb

from .channel import Pairs
from .requests import Metadata, OnModelChange, Params, Prompt, Request, Sampling, Unset, pairs
from .retry import OnWait, RetryPolicy, RetryState

DEFAULT_TIMEOUT_SECONDS = 600.0
# Of the calls that compute nothing.
SHORT_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class CallOptions:
    """A request on its way: the message and what travels beside it."""

    message: pb.GenerateRequest | pb.AttachRequest
    timeout_seconds: float | None
    metadata: Pairs
    retry: RetryPolicy
    on_wait: OnWait | None = None
    on_model_change: OnModelChange = "error"

    @property
    def may_restart(self) -> bool:
        """Whether another model may answer from the beginning, once the answer of the first one cannot go on."""
        names_model = isinstance(self.message, pb.AttachRequest) or self.message.HasField("model_fingerprint")
        return self.on_model_change == "restart" and not names_model

    @property
    def may_go_elsewhere(self) -> bool:
        """Any server of the right model can answer. A submitted request is at one server alone."""
        return isinstance(self.message, pb.GenerateRequest)

    @property
    def names_itself(self) -> bool:
        """The caller gave the request a name."""
        return isinstance(self.message, pb.GenerateRequest) and self.message.HasField("request_id")

    def attempts(self) -> RetryState:
        """The attempts of the call, whose time starts to run now."""
        return RetryState(self.retry, self.timeout_seconds, meets_itself=True, on_wait=self.on_wait)


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """What every call of a client has in common unless it says otherwise."""

    timeout_seconds: float | None
    retry: RetryPolicy
    metadata: Pairs
    sampling: Sampling | None
    on_model_change: OnModelChange = "error"
    on_wait: OnWait | None = None
    """Hears, on any thread, of every pause before a call is made again. The command line sets it."""

    def outgoing(
        self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> CallOptions:
        """Raises InvalidRequest for what no message can hold, TypeError for a keyword that is no parameter."""
        request = Request.of(prompt, sampling, **params)
        own = request.timeout_seconds
        return CallOptions(
            message=request.to_proto(self.sampling),
            timeout_seconds=self.timeout_seconds if isinstance(own, Unset) else own,
            metadata=pairs(self.metadata, request.metadata),
            retry=self.retry,
            on_wait=self.on_wait,
            on_model_change=_checked(request.on_model_change or self.on_model_change),
        )

    def attaching(
        self, request_id: str, from_index: int, metadata: Pairs, timeout_seconds: float | None
    ) -> CallOptions:
        """What listens to a submitted request."""
        message = pb.AttachRequest(request_id=request_id, from_index=from_index)
        return CallOptions(message, timeout_seconds, metadata, self.retry, self.on_wait)

    def short(self, timeout_seconds: float | Unset | None) -> RetryState:
        """The attempts of a call that computes nothing."""
        if isinstance(timeout_seconds, Unset):
            timeout_seconds = min(SHORT_TIMEOUT_SECONDS, self.timeout_seconds or SHORT_TIMEOUT_SECONDS)
        return RetryState(self.retry, timeout_seconds, on_wait=self.on_wait)


def client_config(
    timeout_seconds: float | None,
    max_attempts: int | None,
    retry: RetryPolicy | None,
    metadata: Metadata,
    sampling: Sampling | None,
    on_model_change: OnModelChange = "error",
) -> ClientConfig:
    """Of a client's arguments; `max_attempts` alone is a RetryPolicy with the other numbers left as they are."""
    if max_attempts is not None and retry is not None:
        raise ValueError("give max_attempts or retry, not both")
    if max_attempts is not None:
        retry = RetryPolicy(max_attempts=max_attempts)
    return ClientConfig(
        timeout_seconds, retry or RetryPolicy(), pairs(metadata), sampling, on_model_change=_checked(on_model_change)
    )


def _checked(value: OnModelChange) -> OnModelChange:
    if value not in get_args(OnModelChange):
        raise ValueError(f"on_model_change must be one of {', '.join(get_args(OnModelChange))}")
    return value
