"""The settings of a client and the options of a call. No I/O."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, get_args

from lineclear.errors import InvalidRequest
from lineclear.v1 import inference_pb2 as pb

from .call_params import Params
from .message_fields import filled
from .parameters import Metadata, OnModelChange, OnQueued, Prompt, Sampling, Unset
from .requests import Request, authorized, of_tenant, pairs, traced
from .retry import OnWait, RetryPolicy, RetryState, bounded
from .rpc_methods import Pairs

DEFAULT_TIMEOUT_SECONDS = 600.0
SHORT_TIMEOUT_SECONDS = 30.0
"""Default deadline of the calls that generate nothing."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The message of a call and its options."""

    message: pb.GenerateRequest | pb.AttachRequest
    timeout_seconds: float | None
    metadata: Pairs
    config: ClientConfig
    on_model_change: OnModelChange = "error"
    on_queued: OnQueued | None = None
    response_format: Any = None

    @property
    def constraint_start(self) -> str:
        """The text behind which the answer has its form; empty: the whole answer has it."""
        message = self.message
        return "" if isinstance(message, pb.AttachRequest) else message.sampling.structured_output.constraint_start

    @property
    def may_restart(self) -> bool:
        """Whether the answer may start over with another model."""
        names_model = isinstance(self.message, pb.AttachRequest) or self.message.HasField("model_fingerprint")
        return self.on_model_change == "restart" and not names_model

    @property
    def may_go_elsewhere(self) -> bool:
        """Whether any server of the model can answer. A submitted request is known to one server only."""
        return isinstance(self.message, pb.GenerateRequest)

    @property
    def has_own_id(self) -> bool:
        """Whether the caller set `request_id`."""
        return isinstance(self.message, pb.GenerateRequest) and self.message.HasField("request_id")

    def attempts(self) -> RetryState:
        """Return the retry state of the call. Its deadline starts now."""
        return RetryState(self.config.retry, self.timeout_seconds, meets_own_request=True, on_wait=self.config.on_wait)


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """The defaults of every call of a client."""

    timeout_seconds: float | None
    retry: RetryPolicy
    metadata: Pairs
    sampling: Sampling | None
    on_model_change: OnModelChange = "error"
    on_wait: OnWait | None = None
    """Called before every pause between attempts, on any thread. The command line sets it."""

    def outgoing(
        self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> CallOptions:
        """Return the options of a generating call.

        Raises InvalidRequest if a value does not fit into the message, TypeError for an unknown parameter.
        """
        request = Request.of(prompt, sampling, **params)
        own = request.timeout_seconds
        metadata = traced(pairs(self.metadata, request.metadata))
        return CallOptions(
            message=request.to_proto(self.sampling),
            timeout_seconds=self.timeout_seconds if isinstance(own, Unset) else own,
            metadata=metadata if request.tenant is None else of_tenant(metadata, request.tenant),
            config=self,
            on_model_change=_checked(request.on_model_change or self.on_model_change),
            on_queued=request.on_queued,
            response_format=request.response_format,
        )

    def attaching(
        self,
        request_id: str,
        from_index: int,
        metadata: Pairs,
        timeout_seconds: float | None,
        on_queued: OnQueued | None = None,
    ) -> CallOptions:
        message = filled(pb.AttachRequest(), request_id=request_id, from_index=from_index)
        return CallOptions(message, timeout_seconds, metadata, self, on_queued=on_queued)

    def short(self, timeout_seconds: float | Unset | None) -> RetryState:
        """Return the retry state of a call that generates nothing."""
        if isinstance(timeout_seconds, Unset):
            timeout_seconds = min(SHORT_TIMEOUT_SECONDS, self.timeout_seconds or SHORT_TIMEOUT_SECONDS)
        return RetryState(self.retry, timeout_seconds, on_wait=self.on_wait)


class ConfigArguments(TypedDict, total=False):
    """The keyword arguments of a client that its calls use. `AsyncClient` explains them."""

    token: str | None
    metadata: Metadata
    timeout_seconds: float | None
    max_attempts: int | None
    retry: RetryPolicy | None
    sampling: Sampling | None
    on_model_change: OnModelChange


def client_config(
    *,
    token: str | None = None,
    metadata: Metadata = (),
    timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
    max_attempts: int | None = None,
    retry: RetryPolicy | None = None,
    sampling: Sampling | None = None,
    on_model_change: OnModelChange = "error",
) -> ClientConfig:
    """Return the checked arguments of a client. Raises ValueError if `max_attempts` and `retry` are both given."""
    if max_attempts is not None and retry is not None:
        raise ValueError("give max_attempts or retry, not both")
    if max_attempts is not None:
        retry = RetryPolicy(max_attempts=max_attempts)
    own_metadata = pairs(authorized(metadata, token))
    return ClientConfig(timeout_seconds, retry or RetryPolicy(), own_metadata, sampling, _checked(on_model_change))


def _checked(value: OnModelChange) -> OnModelChange:
    if value not in get_args(OnModelChange):
        raise ValueError(f"on_model_change must be one of {', '.join(get_args(OnModelChange))}")
    return value


def submittable(prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]) -> Request:
    """Return the request. Raises InvalidRequest for a parameter that no submitted request has."""
    request = Request.of(prompt, sampling, **params)
    if request.response_format is not None:
        raise InvalidRequest.at("response_format", "must be unset in submit(); give json_schema, and parse the text")
    if request.on_queued is not None:
        raise InvalidRequest.at("on_queued", "must be unset in submit(); give it to attach()")
    if request.on_model_change is not None:
        raise InvalidRequest.at("on_model_change", "must be unset in submit(): the server does not start it over")
    return request


def submit_request(options: CallOptions) -> pb.SubmitRequest:
    """Return the request of Submit. It always has a `request_id`, so that it is safe to send twice."""
    assert isinstance(options.message, pb.GenerateRequest)
    request = pb.SubmitRequest(request=options.message)
    if not options.has_own_id:
        request.request.request_id = secrets.token_hex(16)
    timeout_seconds = bounded(options.timeout_seconds)
    if timeout_seconds is not None:
        request.timeout.FromNanoseconds(round(max(timeout_seconds, 0.0) * 1e9))
    return request
