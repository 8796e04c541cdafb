"""One answer while the server makes it: the current call, its retries and resumes, and the answer so far."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from lineclear.errors import Cancelled, DataLoss, LineclearError, ModelChanged
from lineclear.v1 import inference_pb2 as pb

from .. import rpc_methods
from ..answer_assembler import AnswerAssembler
from ..call_settings import CallOptions
from ..chat_messages import ToolCall
from ..concurrency import AsyncEvent, async_call
from ..grpc_channel import names_one_server
from ..requests import arrives_whole
from ..results import Delta, Generation, Queued, queued_from_proto
from ..retry import ResumeState
from ..rpc_methods import AsyncCall, AsyncTransport
from ..session_messages import SessionRefused
from ..sigint import AsyncCanceller


class AsyncStream:
    """An answer, piece by piece.

        async with client.stream("Once upon a time") as stream:
            async for delta in stream:
                print(delta.text, end="")
        print(stream.result.usage)

    The call starts when the block is entered. Leaving the block before the end of the answer cancels the request.
    """

    def __init__(self, transport: AsyncTransport, options: CallOptions) -> None:
        self._transport = transport
        self._options = options
        self._call: AsyncCall[pb.GenerateResponse] | None = None
        self._stop = AsyncEvent()  # set by cancel(); it also ends a pause between calls
        self._canceller = AsyncCanceller(self.cancel)
        message = options.message
        self._arrives_whole = isinstance(message, pb.GenerateRequest) and arrives_whole(message.sampling)
        self._assembler = AnswerAssembler(message.from_index if isinstance(message, pb.AttachRequest) else 0)
        self._has_responses = False  # from the first response on, the next call resumes the answer
        self._call_has_responses = False
        self._restarting = False  # the next delta is the first of a new answer
        self._ended = False
        self._result: Generation | None = None
        self._queued: Queued | None = None
        self._reported: Queued | None = None  # to `on_queued`

    @property
    def resumes(self) -> int:
        """How often the answer was cut off and resumed so far."""
        return self._resume_state.count - self._assembler.restarts

    @property
    def may_restart(self) -> bool:
        """Whether the answer starts over if its model is replaced."""
        return self._options.may_restart

    @property
    def restarts(self) -> int:
        """How often the answer started over with another model; `text` and `token_ids` are those of the last one."""
        return self._assembler.restarts

    @property
    def queued(self) -> Queued | None:
        """The request's place in the queue when it arrived, with `queue_position=True`. None if it did not wait."""
        return self._queued

    @property
    def text(self) -> str:
        """The text received so far, of output 0."""
        return self._assembler.outputs[0].text

    @property
    def texts(self) -> tuple[str, ...]:
        """The text received so far of each output."""
        return tuple(output.text for output in self._assembler.outputs)

    @property
    def reasoning(self) -> str:
        """The reasoning received so far."""
        return self._assembler.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls received so far. The last may be incomplete."""
        return self._assembler.outputs[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens received so far, of output 0."""
        return tuple(self._assembler.outputs[0].token_ids)

    @property
    def result(self) -> Generation:
        """The complete answer. Raises RuntimeError until the stream is read to its end."""
        if not (self._ended and self._assembler.complete):
            raise RuntimeError("the answer is not complete: read the stream to its end first")
        if self._result is None:
            self._result = self._assembler.generation(self._options.response_format, self._options.constraint_start)
        return self._result

    async def __aenter__(self) -> Self:
        assert self._call is None, "a stream is entered once"
        try:
            with self._canceller.guard():
                self._retry_state = self._options.attempts()
                self._resume_state = ResumeState(self._retry_state)
                self._start_call()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if not self._ended:
                self.cancel()
        finally:
            self._canceller.close()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Return the next piece. Raises the LineclearError that the request ended with."""
        if self._call is None:
            raise RuntimeError("a stream is read inside its `async with` block")
        if self._ended:
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
        try:
            while not self._ended:
                try:
                    delta = self._add(await anext(call, None))
                except SessionRefused:
                    call = self._start_call()  # without the session from now on
                    continue
                except LineclearError as error:
                    if self._is_complete() and not isinstance(error, DataLoss):
                        break  # the last message arrived, so the error changes nothing
                    await self._stop.wait_for(self._pause_after(error))
                    if self._stop.is_set():
                        raise Cancelled("the call was cancelled") from None
                    call = self._start_call()
                    continue
                if self._queued is not self._reported:
                    await self._report_place()
                if delta is not None:
                    return delta
        except BaseException:
            self.cancel()
            self._ended = True
            raise
        raise StopAsyncIteration

    async def _report_place(self) -> None:
        self._reported = self._queued
        if self._options.on_queued is not None and self._queued is not None:
            await async_call(self._options.on_queued, self._queued)

    def _add(self, message: pb.GenerateResponse | None) -> Delta | None:
        """Add a response, or None at the end of the stream, to the answer.

        Returns None at the end, for the place in the queue, and for the first response of a resumed call. Raises
        DataLoss if the message does not continue the answer, or the answer is not complete at the end.
        """
        if message is None:
            self._assembler.close()
            self._ended = True
            return None
        if message.HasField("queued"):
            self._queued = queued_from_proto(message.queued)
            if not message.HasField("started"):
                return None
        self._has_responses = True
        self._assembler.resumes = self.resumes
        delta = self._assembler.add(message)
        self._call_has_responses = True
        if self._restarting:
            self._restarting, delta = False, replace(delta, restarted=True)
        if delta.token_ids or delta.text or delta.reasoning or delta.tool_calls or delta.finish_reason:
            self._resume_state.on_progress()
            return delta
        return delta if delta.started is not None or not self._resume_state.count else None

    def _is_complete(self) -> bool:
        self._ended = self._assembler.complete
        return self._ended

    def _pause_after(self, error: LineclearError) -> float:
        """Return the seconds until the next call. Raises `error` if the request ends with it."""
        if self._stop.is_set() or (self._has_responses and self._arrives_whole):
            raise error
        if isinstance(error, ModelChanged):
            # A submitted request is known to one server only.
            has_replicas = self._options.may_go_elsewhere and not names_one_server(self._transport.target)
            pause_seconds = self._resume_state.pause_before_replica(self._call_has_responses) if has_replicas else None
            if pause_seconds is None and self._has_responses:
                pause_seconds = self._pause_before_restart(error)
            if pause_seconds is not None:
                assert self._call is not None
                self._call.cancel()
                return pause_seconds
        return (self._resume_state if self._has_responses else self._retry_state).pause_after(error)

    def _pause_before_restart(self, error: ModelChanged) -> float:
        """Drop the answer of the replaced model. Raises `error`, with that answer, if the request may not restart."""
        error.text, error.token_ids = self.text, self.token_ids
        if not self._options.may_restart:
            raise error
        pause_seconds = self._resume_state.pause_after(error, restarts=True)
        restarts = self._assembler.restarts + 1
        self._assembler = AnswerAssembler()
        self._assembler.restarts = restarts
        self._has_responses, self._restarting = False, True
        return pause_seconds

    def _start_call(self) -> AsyncCall[pb.GenerateResponse]:
        method, message = self._next_request()
        timeout_seconds = self._retry_state.begin()
        call = self._transport.stream_async(
            method, message, timeout_seconds=timeout_seconds, metadata=self._options.metadata
        )
        self._call, self._call_has_responses = call, False
        if self._stop.is_set():  # cancelled while the call was made
            call.cancel()
        return call

    def _next_request(self) -> tuple[rpc_methods.Method[Any, pb.GenerateResponse], Any]:
        """Return the method and the request for what is missing of the answer."""
        message = self._options.message
        if isinstance(message, pb.AttachRequest):
            first, *more = (output.next_index for output in self._assembler.outputs)
            again = pb.AttachRequest(request_id=message.request_id, from_index=first, more_from_indexes=more)
            return rpc_methods.ATTACH, again
        return rpc_methods.GENERATE, self._assembler.rest(message) if self._has_responses else message
