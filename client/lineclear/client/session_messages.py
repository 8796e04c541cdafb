"""What a session's messages mean for each of its requests, and when a client uses a session at all.

Pure: from a SessionResponse to the messages that calls of their own would have had. The waiting is in `sessions`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import TypeAlias

from lineclear.errors import LineclearError
from lineclear.grpc_status import from_status
from lineclear.v1 import inference_pb2 as pb

# Of one request: a message of its answer, the error it ended with, or None after the last message.
Item: TypeAlias = pb.GenerateResponse | LineclearError | None


def items(message: pb.SessionResponse) -> Iterator[tuple[int, Item]]:
    """(handle, item) in order."""
    yield from _rows(message)
    for event in message.events:
        if event.HasField("error"):
            yield event.handle, from_status(event.error)
            continue
        yield event.handle, event.response
        if event.response.HasField("finished"):
            yield event.handle, None


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


def submission(handle: int, request: pb.GenerateRequest, timeout_seconds: float | None) -> pb.SubmitCommand:
    """Return the command that submits a request."""
    command = pb.SubmitCommand(handle=handle, request=request)
    if timeout_seconds is not None:
        command.timeout.FromNanoseconds(round(timeout_seconds * 1e9))
    return command


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
