"""The messages of submitted requests."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Unpack

from lineclear.errors import InvalidRequest, LineclearError
from lineclear.status_codec import from_status
from lineclear.v1 import inference_pb2 as pb

from .call_params import Params
from .call_settings import CallOptions
from .chat_messages import ToolCall
from .parameters import Prompt, Sampling
from .requests import Request
from .results import Queued, queued_from_proto
from .retry import bounded

_STATES = {
    pb.RESULT_STATE_WAITING: "waiting",
    pb.RESULT_STATE_RUNNING: "running",
    pb.RESULT_STATE_FINISHED: "finished",
    pb.RESULT_STATE_FAILED: "failed",
}


@dataclass(frozen=True, slots=True)
class SubmittedStatus:
    """The state of a submitted request, and its answer so far.

    `state` is "waiting", "running", "finished" or "failed"; `error` is set if it is "failed", `queued` if it is
    "waiting" and the request has `queue_position=True`. `text` and `token_ids` are those of output 0, `texts` has those
    of all outputs.
    """

    state: str
    text: str
    token_ids: tuple[int, ...]
    error: LineclearError | None = None
    queued: Queued | None = None
    texts: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete or the request failed."""
        return self.state in ("finished", "failed")


def submitted_status(message: pb.GetResultResponse) -> SubmittedStatus:
    """Convert the response of GetResult."""
    error = from_status(message.error) if message.HasField("error") else None
    state = _STATES.get(message.state, "unspecified")
    answer = message.response
    queued = queued_from_proto(answer.queued) if answer.HasField("queued") else None
    texts = (answer.text, *(output.text for output in message.more_outputs))
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in answer.tool_calls)
    return SubmittedStatus(state, answer.text, tuple(answer.token_ids), error, queued, texts, calls, answer.reasoning)


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
