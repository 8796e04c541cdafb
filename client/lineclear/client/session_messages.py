"""Messages of a Session: commands gathered into requests, and responses taken apart by request. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from lineclear.api_limits import MAX_GATHERED_BYTES, MAX_SESSION_COMMANDS, REQUEST_BYTES_KEY
from lineclear.errors import LineclearError
from lineclear.status_codec import from_status
from lineclear.v1 import inference_pb2 as pb

Command: TypeAlias = pb.SubmitCommand | pb.CancelCommand


class SessionRefused(Exception):
    """The server has no room for another Session. The requests sent on it did not start."""


# Of one request: a response, the error that it ended with, or None after the last response of an output.
Item: TypeAlias = pb.GenerateResponse | LineclearError | SessionRefused | None


class Outbox:
    """The commands not sent yet, in order. Any thread may `put`, one may `take`.

    A message costs both ends far more than a command, so commands that gather during a write share the next message.
    """

    def __init__(self) -> None:
        self.max_bytes = MAX_GATHERED_BYTES
        """Most bytes of the commands in one message."""
        self._commands: deque[Command] = deque()

    def limit_bytes(self, max_request_bytes: int | None) -> None:
        """Keep messages well below the largest request that the server takes."""
        if max_request_bytes is not None:
            self.max_bytes = min(MAX_GATHERED_BYTES, max_request_bytes // 2)

    def put(self, command: Command) -> None:
        """Add a command to the next message with room for it."""
        self._commands.append(command)

    def take(self) -> pb.SessionRequest | None:
        """Return the next message, None without commands."""
        if not self._commands:
            return None
        taken = [self._commands.popleft()]
        num_bytes = taken[0].ByteSize()
        while self._commands and len(taken) < MAX_SESSION_COMMANDS:
            num_bytes += self._commands[0].ByteSize()
            if num_bytes > self.max_bytes:
                break
            taken.append(self._commands.popleft())
        # The server runs submits before cancels. A handle is submitted once, so that is the order of each request.
        return pb.SessionRequest(
            submits=[command for command in taken if isinstance(command, pb.SubmitCommand)],
            cancels=[command for command in taken if isinstance(command, pb.CancelCommand)],
        )


def max_request_bytes(headers: Iterable[Any] | None) -> int | None:
    """Return the largest request that the server takes, from the headers of the Session; None if not given."""
    for key, value in headers or ():
        if key == REQUEST_BYTES_KEY and str(value).isdecimal():
            return int(value)
    return None


def items(message: pb.SessionResponse) -> Iterator[tuple[int, Item]]:
    """Yield (handle, item) of a message, in order."""
    yield from _rows(message)
    for event in message.events:
        if event.HasField("error"):
            yield event.handle, from_status(event.error)
            continue
        yield event.handle, event.response
        if event.response.HasField("finished"):
            yield event.handle, None


def _rows(message: pb.SessionResponse) -> Iterator[tuple[int, pb.GenerateResponse]]:
    """Yield the responses of the columns, one for each run of rows of the same output."""
    handles, indexes, token_ids = list(message.handles), list(message.indexes), list(message.token_ids)
    texts = list(message.texts) or [""] * len(handles)
    outputs = list(message.outputs)
    row = 0
    while row < len(handles):
        end = row + 1
        while end < len(handles) and handles[end] == handles[row] and (not outputs or outputs[end] == outputs[row]):
            end += 1
        response = pb.GenerateResponse(
            first_index=indexes[row], token_ids=token_ids[row:end], text="".join(texts[row:end])
        )
        if outputs:
            response.index = outputs[row]
        yield handles[row], response
        row = end


def num_open_outputs(request: pb.GenerateRequest) -> int:
    """Return the number of outputs that the server sends an end of."""
    complete = sum(output.is_complete for output in request.resume.outputs)
    return max(request.sampling.n, 1) - complete


def submit_command(
    handle: int, request: pb.GenerateRequest, timeout_seconds: float | None, tenant: str = ""
) -> pb.SubmitCommand:
    command = pb.SubmitCommand(handle=handle, request=request, tenant=tenant)
    if timeout_seconds is not None:
        command.timeout.FromNanoseconds(round(timeout_seconds * 1e9))
    return command
