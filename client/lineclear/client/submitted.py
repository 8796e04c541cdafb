"""Submitted requests as values: the message that submits one, and what GetResult says of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from lineclear.errors import LineclearError
from lineclear.grpc_status import from_status
from lineclear.v1 import inference_pb2 as pb

from .call_settings import CallOptions
from .retry import bounded

_STATES = {
    pb.RESULT_STATE_WAITING: "waiting",
    pb.RESULT_STATE_RUNNING: "running",
    pb.RESULT_STATE_FINISHED: "finished",
    pb.RESULT_STATE_FAILED: "failed",
}


@dataclass(frozen=True, slots=True)
class SubmittedStatus:
    """A submitted request at one moment. `state` is "waiting", "running", "finished" or "failed" (then with `error`).

    `text` and `token_ids` are all there is of the answer by then.
    """

    state: str
    text: str
    token_ids: tuple[int, ...]
    error: LineclearError | None = None

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self.state in ("finished", "failed")


def snapshot(message: pb.GetResultResponse) -> SubmittedStatus:
    """What the message says."""
    error = from_status(message.error) if message.HasField("error") else None
    state = _STATES.get(message.state, "unspecified")
    return SubmittedStatus(state, message.response.text, tuple(message.response.token_ids), error)


def submission(outgoing: CallOptions) -> pb.SubmitRequest:
    """The message that submits it, under a name of ours where it has none: so that it can be sent twice."""
    assert isinstance(outgoing.message, pb.GenerateRequest)
    request = pb.SubmitRequest(request=outgoing.message)
    if not outgoing.names_itself:
        request.request.request_id = secrets.token_hex(16)
    timeout_seconds = bounded(outgoing.timeout_seconds)
    if timeout_seconds is not None:
        request.timeout.FromNanoseconds(round(max(timeout_seconds, 0.0) * 1e9))
    return request
