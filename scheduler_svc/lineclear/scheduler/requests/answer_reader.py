"""Read a request's outputs as protobuf responses: the one loop behind Generate, Session and submitted requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from lineclear.api_limits import MAX_PIECE_BYTES
from lineclear.errors import LineclearError
from lineclear.scheduler.requests import responses
from lineclear.scheduler.requests.output_stream import OutputStream
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.v1 import inference_pb2 as pb

AnswerPart: TypeAlias = tuple[pb.GenerateResponse, Sequence[str], LineclearError | None]
"""A response with the text of each of its tokens and of the end; or an empty response and the error of the request."""


def read_answer(request: RequestContext) -> Iterator[AnswerPart]:
    """Yield the unread parts of all outputs. Does not wait."""
    for output in request.outputs:
        if not request.is_closed:
            yield from read_output(request, output)


def read_output(request: RequestContext, output: OutputStream, max_bytes: int | None = None) -> Iterator[AnswerPart]:
    """Yield the unread parts of an output, up to about `max_bytes`.

    Does not wait. After the end of the last output, yield the error of the request, if it has one, and close it once
    that was used. A bug in a response ends the request with an incident.
    """
    bytes_left = MAX_PIECE_BYTES if max_bytes is None else max_bytes
    while output.has_output and bytes_left > 0:
        chunk = output.read_nowait(bytes_left)
        end, error = chunk.end, chunk.error
        if error is None:
            try:
                timings = None if end is None else request.record_completion(output, end)
                response = responses.response(chunk, request, output, timings)
            except Exception as bug:
                error = request.incident(bug)
                output.discard(error)
            else:
                yield response, chunk.texts, None
        if error is not None or end is not None:
            output.is_read = True
            if request.end_output(None if end is None else end.reason, error):
                if request.error is not None:
                    yield pb.GenerateResponse(), (), request.error
                request.close()
            return
        if max_bytes is not None:
            bytes_left -= response.ByteSize()
