"""Read a request's answer as protobuf responses: the one loop behind Generate, Session and submitted requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from lineclear.api_limits import MAX_PIECE_BYTES
from lineclear.errors import LineclearError
from lineclear.scheduler.requests import responses
from lineclear.scheduler.requests.request_context import RequestContext, outcome_of
from lineclear.v1 import inference_pb2 as pb

AnswerPart: TypeAlias = tuple[pb.GenerateResponse, Sequence[str], LineclearError | None]
"""A response with the text of each of its tokens and of the end; or an empty response and the error of the request."""


def read_answer(request: RequestContext, max_bytes: int | None = None) -> Iterator[AnswerPart]:
    """Yield the unread parts of an answer, up to about `max_bytes`. Close the request after its last part was used.

    Does not wait. A bug in a response ends the answer with an incident.
    """
    output, bytes_left = request.output, MAX_PIECE_BYTES if max_bytes is None else max_bytes
    while output.has_output and bytes_left > 0:
        chunk = output.read_nowait(bytes_left)
        end, error = chunk.end, chunk.error
        if error is None:
            try:
                timings = None if end is None else request.record_completion(end)
                response = responses.response(chunk, request, timings)
            except Exception as bug:
                error = request.incident(bug)
        if error is not None:
            yield pb.GenerateResponse(), (), error
            request.close(outcome_of(error))
            return
        yield response, chunk.texts, None
        if end is not None:
            request.close(end.reason.name.lower())
            return
        if max_bytes is not None:
            bytes_left -= response.ByteSize()
