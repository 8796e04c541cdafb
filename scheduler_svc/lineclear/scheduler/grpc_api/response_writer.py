"""Write the messages of one call, and fail it with SlowConsumer if one write takes longer than the stall timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from google.protobuf.message import Message
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from lineclear.errors import SlowConsumer
from lineclear.scheduler.security.identity import Context


class ResponseWriter:
    """Writes responses. As a context manager it makes sure that a status can follow an unfinished write.

    Leaving the block may wait for a stalled client, so resources are released inside it.
    """

    def __init__(self, context: Context, stall_timeout_seconds: float) -> None:
        self._context = context
        self._limit_seconds = stall_timeout_seconds
        self._first: asyncio.Task[None] | None = None
        self._is_open = False  # the headers are sent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, SlowConsumer) and self._first is not None:
            await asyncio.wait((self._first,))

    async def send_headers(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Send the headers before the first message."""
        try:
            await self._context.send_initial_metadata(tuple(metadata))
        except cygrpc.ExecuteBatchError:
            await asyncio.sleep(self._limit_seconds)  # see write_only
            raise
        self._is_open = True

    async def write(self, message: Message) -> None:
        """Send a message. Return once the transport has it. Raises SlowConsumer."""
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
        except cygrpc.ExecuteBatchError:
            await asyncio.sleep(self._limit_seconds)  # see write_only
            raise

    async def _write_first(self, message: Message) -> None:
        # The headers travel with the first message. After a cancelled write gRPC would send them again with the status,
        # fail, and never end the call.
        self._first = asyncio.ensure_future(self._context.write(message))
        # Retrieved, or asyncio would report the exception of a write after a hang-up.
        self._first.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._first)
        self._is_open = True


async def write_only(context: Context, message: Message | bytes, cancel_seconds: float = 20.0) -> None:
    """Send the only message of a unary call. A hang-up cancels this task, within `cancel_seconds`."""
    try:
        await context.write(message)
    except cygrpc.ExecuteBatchError:  # the call has ended; gRPC cancels this task a moment later
        await asyncio.sleep(cancel_seconds)
        raise
