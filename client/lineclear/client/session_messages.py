"""What a session's messages mean for each of its requests, and when a client uses a session at all.

Pure: from a SessionResponse to the messages that calls of their own would have had. The waiting is in `sessions`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TypeAlias

from lineclear import grpc_status
from lineclear.errors import LineclearError, Violation
from lineclear.v1 import inference_pb2 as pb

# Of one request: a message of its answer, the error it ended with, or None after the last message.
Item: TypeAlias = pb.GenerateResponse | LineclearError | None

_CODES = {number: name for name, number in grpc_status.CODE_NUMBERS.items()}


def items(message: pb.SessionResponse) -> Iterator[tuple[int, Item]]:
    """(handle, item) in order."""
    yield from _rows(message)
    for piece in message.pieces:
        if piece.HasField("failure"):
            yield piece.handle, error_of(piece.failure)
            continue
        yield piece.handle, piece.response
        if piece.response.HasField("finished"):
            yield piece.handle, None


def _rows(message: pb.SessionResponse) -> Iterator[tuple[int, pb.GenerateResponse]]:
    """The columns, those rows together that follow one another in one answer."""
    handles, indexes, token_ids = list(message.handles), list(message.indexes), list(message.token_ids)
    texts = list(message.texts) or [""] * len(handles)
    row = 0
    while row < len(handles):
        end = row + 1
        while end < len(handles) and handles[end] == handles[row]:
            end += 1
        yield (
            handles[row],
            pb.GenerateResponse(first_index=indexes[row], token_ids=token_ids[row:end], text="".join(texts[row:end])),
        )
        row = end


def submission(handle: int, request: pb.GenerateRequest, timeout_seconds: float | None) -> pb.SessionSubmit:
    """The order that begins a request."""
    order = pb.SessionSubmit(handle=handle, request=request)
    if timeout_seconds is not None:
        order.timeout.FromNanoseconds(round(timeout_seconds * 1e9))
    return order


def error_of(failure: pb.Failure) -> LineclearError:
    """The error that a call of its own would have ended with."""
    return grpc_status.make(
        _CODES.get(failure.code, "UNKNOWN"),
        failure.reason,
        failure.message,
        retry_after_seconds=failure.retry_after.ToNanoseconds() / 1e9 if failure.HasField("retry_after") else None,
        metadata=dict(failure.metadata),
        violations=[Violation(entry.field, entry.description) for entry in failure.violations],
    )


def names_one_server(target: str) -> bool:
    """Whether every connection to the target ends at the same server.

    Behind a name there may be many, among whom calls are shared out; a session would give all to one of them.
    """
    if target.startswith("unix:"):
        return True
    host = target.rpartition("/")[2].rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
