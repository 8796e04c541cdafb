"""A call's way out: its messages one after the other, and how long its caller may take none.

Decides when a caller is too slow, and when a status can follow what was written. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc.aio
from google.protobuf.message import Message
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from lineclear.errors import SlowConsumer

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ResponseWriter:
    """What a handler writes to, as a context manager: whoever leaves its block with an error can be sent a status.

    What the call holds should be given back inside the block; leaving it may last as long as the caller takes nothing.
    """

    def __init__(self, context: Context, stall_timeout_seconds: float) -> None:
        self._context = context
        self._limit_seconds = stall_timeout_seconds
        self._first: asyncio.Task[None] | None = None
        self._is_open = False  # the headers are out

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, SlowConsumer) and self._first is not None:
            await asyncio.wait((self._first,))

    async def send_headers(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Send the headers alone, to say that the call is taken."""
        try:
            await self._context.send_initial_metadata(tuple(metadata))
        except cygrpc.ExecuteBatchError:
            # The call is over. gRPC cancels this task for that, but maybe a moment later; until then it is no bug.
            await asyncio.sleep(self._limit_seconds)
            raise
        self._is_open = True

    async def write(self, message: Message) -> None:
        """Send a message; return once it is on its way. Raises SlowConsumer."""
        try:
            async with asyncio.timeout(self._limit_seconds):
                if self._is_open:
                    await self._context.write(message)
                else:
                    await self._write_first(message)
        except TimeoutError:
            limit = f"{self._limit_seconds:g}"
            raise SlowConsumer(
                f"the stream took no message for {limit} s, the server's --stall-timeout-seconds; read faster",
                metadata={"stall_timeout_seconds": limit},
            ) from None

    async def _write_first(self, message: Message) -> None:
        # gRPC sends the headers with the first message, and knows that it did when that write is over. Given up before,
        # it would send them with the status again, which is an error to it, and the caller would never hear of an end.
        self._first = asyncio.ensure_future(self._context.write(message))
        self._first.add_done_callback(_take_note)
        await asyncio.shield(self._first)
        self._is_open = True


def _take_note(task: asyncio.Task[None]) -> None:
    """Nobody waits for a write whose caller is gone; asyncio would report what it ended with as lost."""
    if not task.cancelled():
        task.exception()
