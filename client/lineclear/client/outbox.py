"""Commands of a session that wait for the next message.

A message costs both ends far more than a command, so commands that gather while one message is sent share the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, TypeAlias

from lineclear.api_limits import MAX_GATHERED_BYTES, MAX_SESSION_COMMANDS, REQUEST_BYTES_KEY
from lineclear.v1 import inference_pb2 as pb

Command: TypeAlias = pb.SubmitCommand | pb.CancelCommand


class Outbox:
    """A queue of commands. Any thread may call `put`; one thread at a time calls `take`.

    Its length is bounded by the program's own calls, each of which waits for an answer.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._max_bytes = 0

    def put(self, command: Command) -> None:
        """Queue `command` for the next message that has room."""
        self._commands.append(command)

    def share_messages(self, max_request_bytes: int | None) -> None:
        """Put several commands into a message from now on, up to half of the server's `max_request_bytes`."""
        self._max_bytes = min(MAX_GATHERED_BYTES, (max_request_bytes or 2 * MAX_GATHERED_BYTES) // 2)

    def take(self) -> pb.SessionRequest | None:
        """Return the next message, or None while no command waits."""
        if not self._commands:
            return None
        taken = [self._commands.popleft()]
        num_bytes = taken[0].ByteSize()
        while self._commands and len(taken) < MAX_SESSION_COMMANDS:
            num_bytes += self._commands[0].ByteSize()
            if num_bytes > self._max_bytes:
                break
            taken.append(self._commands.popleft())
        # A request is submitted before it is cancelled and its handle is never used again: cancels may come last.
        return pb.SessionRequest(
            submits=[command for command in taken if isinstance(command, pb.SubmitCommand)],
            cancels=[command for command in taken if isinstance(command, pb.CancelCommand)],
        )


def most_request_bytes(metadata: Iterable[Any] | None) -> int | None:
    """Return the largest request a server takes, by the initial metadata of its session; None where it does not say."""
    for key, value in metadata or ():
        if key == REQUEST_BYTES_KEY and str(value).isdecimal():
            return int(value)
    return None
