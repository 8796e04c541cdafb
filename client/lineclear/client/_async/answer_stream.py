"""One answer while the server makes it: sends its calls, reads them and waits between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from lineclear.errors import Cancelled, DataLoss, LineclearError
from lineclear.v1 import inference_pb2 as pb

from ..answer_resume import AnswerProgress, AnswerSoFar
from ..call_settings import CallOptions
from ..concurrency import AsyncEvent, async_call
from ..results import Delta, Generation, Queued
from ..rpc_methods import AsyncCall, AsyncTransport
from ..session_messages import SessionRefused
from ..sigint import AsyncCanceller


class AsyncStream(AnswerSoFar):
    """An answer, piece by piece.

        async with client.stream("Once upon a time") as stream:
            async for delta in stream:
                print(delta.text, end="")
        print(stream.result.usage)

    The call starts when the block is entered. Leaving the block before the end of the answer cancels the request.
    """

    def __init__(self, transport: AsyncTransport, options: CallOptions) -> None:
        super().__init__(AnswerProgress(options, transport.target))
        self._transport = transport
        self._call: AsyncCall[pb.GenerateResponse] | None = None
        self._stop = AsyncEvent()  # set by cancel(); it also ends a pause between calls
        self._canceller = AsyncCanceller(self.cancel)
        self._reported: Queued | None = None  # to `on_queued`

    async def __aenter__(self) -> Self:
        assert self._call is None, "a stream is entered once"
        try:
            with self._canceller.guard():
                self._progress.begin()
                self._start_call()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if not self._progress.ended:
                self.cancel()
        finally:
            self._canceller.close()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Return the next piece. Raises the LineclearError that the request ended with."""
        if self._call is None:
            raise RuntimeError("a stream is read inside its `async with` block")
        if self._progress.ended:
            raise StopAsyncIteration
        with self._canceller.guard():
            return await self._next(self._call)

    def cancel(self) -> None:
        """Cancel the request. A loop over the stream ends with Cancelled. Safe from any thread or task."""
        with self._canceller.deferred():
            self._stop.set()
            if self._call is not None:
                self._call.cancel()

    async def read_all(self) -> Generation:
        """Enter the block, read to the end and return the complete answer. Ctrl-C cancels the request."""
        with AsyncCanceller.cancelling(self.cancel):
            async with self:
                async for _ in self:
                    pass
        return self.result

    async def _next(self, call: AsyncCall[pb.GenerateResponse]) -> Delta:
        progress = self._progress
        try:
            while not progress.ended:
                try:
                    delta = progress.add(await anext(call, None))
                except SessionRefused:
                    call = self._start_call()  # without the session from now on
                    continue
                except LineclearError as error:
                    progress.ended = progress.assembler.complete
                    if progress.ended and not isinstance(error, DataLoss):
                        break  # the last message arrived, so the error changes nothing
                    await self._pause_after(error, call)
                    call = self._start_call()
                    continue
                if progress.queued is not self._reported:
                    await self._report_place()
                if delta is not None:
                    return delta
        except BaseException:
            self.cancel()
            progress.ended = True
            raise
        raise StopAsyncIteration

    async def _pause_after(self, error: LineclearError, call: AsyncCall[pb.GenerateResponse]) -> None:
        """Wait until the next call. Raises `error` if the request ends with it, Cancelled after `cancel`."""
        if self._stop.is_set():
            raise error
        pause_seconds = self._progress.pause_after(error)
        call.cancel()  # a call whose response was rejected still runs
        await self._stop.wait_for(pause_seconds)
        if self._stop.is_set():
            raise Cancelled("the call was cancelled") from None

    async def _report_place(self) -> None:
        self._reported = self._progress.queued
        on_queued = self._progress.options.on_queued
        if on_queued is not None and self._reported is not None:
            await async_call(on_queued, self._reported)

    def _start_call(self) -> AsyncCall[pb.GenerateResponse]:
        method, message, timeout_seconds = self._progress.next_call()
        metadata = self._progress.options.metadata
        call = self._transport.stream_async(method, message, timeout_seconds=timeout_seconds, metadata=metadata)
        self._call = call
        if self._stop.is_set():  # cancelled while the call was made
            call.cancel()
        return call
