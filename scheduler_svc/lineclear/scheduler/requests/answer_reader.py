"""Read a request's answer as protobuf responses: the one loop behind Generate, Session and submitted requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lineclear.api_limits import MAX_PIECE_BYTES
from lineclear.errors import LineclearError
from lineclear.scheduler.requests import responses
from lineclear.scheduler.requests.request_context import RequestContext, outcome_of
from lineclear.v1 import inference_pb2 as pb


class AnswerPart(NamedTuple):
    """One response or one error. `outcome` is set in the last part: the finish reason or the error's reason."""

    response: pb.GenerateResponse
    texts: Sequence[str] = ()
    """Text of each token of the response, and of the end."""
    error: LineclearError | None = None
    outcome: str | None = None


def read_answer(request: RequestContext, max_bytes: int | None = None) -> Iterator[AnswerPart]:
    """Yield the unread parts of an answer, up to about `max_bytes`. Close the request after its last part was used.

    Does not wait. A bug in a response ends the answer with an incident.
    """
    output, bytes_left = request.output, MAX_PIECE_BYTES if max_bytes is None else max_bytes
    while output.has_output and bytes_left > 0:
        part = _next_part(request, bytes_left)
        yield part
        if part.outcome is not None:
            request.close(part.outcome)
            return
        if max_bytes is not None:
            bytes_left -= part.response.ByteSize()


def _next_part(request: RequestContext, max_bytes: int) -> AnswerPart:
    chunk = request.output.read_nowait(max_bytes)
    if chunk.error is not None:
        return _failed(chunk.error)
    try:
        timings = None if chunk.end is None else request.record_completion(chunk.end)
        response = responses.response(chunk, request, timings)
    except Exception as error:
        return _failed(request.incident(error))
    return AnswerPart(response, chunk.texts, outcome=None if chunk.end is None else chunk.end.reason.name.lower())


def _failed(error: LineclearError) -> AnswerPart:
    return AnswerPart(pb.GenerateResponse(), error=error, outcome=outcome_of(error))
