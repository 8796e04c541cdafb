"""One answer as it is made, read by a thread (`Stream`) or by a task (`AsyncStream`).

`Answer` decides what both do: what is asked for, whether an answer that was cut off goes on, and how reading it ends.
The two below it know how to wait, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from lineclear.errors import Cancelled, DataLoss, LineclearError, ModelChanged
from lineclear.v1 import inference_pb2 as pb

from . import rpc_methods, sigint
from .answer_assembler import AnswerAssembler
from .call_settings import CallOptions
from .results import Delta, Generation
from .retry import ReplicaSearch, ResumeState
from .session_messages import names_one_server
from .transport import AsyncCall, AsyncTransport, Call, Transport

C = TypeVar("C", Call[pb.GenerateResponse], AsyncCall[pb.GenerateResponse])


class Answer(Generic[C]):
    """What has come so far, and the result once all has; beneath it the call that is read now.

    Whoever reads takes the messages of `_entered()` to `_take` until it `_ended`. An error of the call goes to
    `_pause_after`, and after that pause `_go_on` has the next call. Any other end goes to `_give_up`.
    """

    _block: ClassVar[str]
    _open_call: Callable[..., C]
    _stop: threading.Event | asyncio.Event  # set when cancelled; it ends a pause, too

    def __init__(self, outgoing: CallOptions, open_call: Callable[..., C], target: str) -> None:
        self._outgoing = outgoing
        self._open_call = open_call
        # A submitted answer is at one server alone.
        self._has_replicas = outgoing.may_go_elsewhere and not names_one_server(target)
        self._call: C | None = None
        message = outgoing.message
        self._assembly = AnswerAssembler(message.from_index if isinstance(message, pb.AttachRequest) else 0)
        self._restarted = False  # the next delta is the first of a new answer
        self._heard = False  # a first response came: from here on the call is not made again but resumed
        self._goes_on = False  # a response came from the call that is read now
        self._ended = False
        self._result: Generation | None = None

    @property
    def resumes(self) -> int:
        """How often the answer was cut off so far, and went on or is about to."""
        return self._resumptions.count - self._assembly.restarts

    @property
    def may_restart(self) -> bool:
        """Whether the answer begins again where its model is replaced."""
        return self._outgoing.may_restart

    @property
    def restarts(self) -> int:
        """How often the answer began again with another model; `text` and `token_ids` are the last one's."""
        return self._assembly.restarts

    @property
    def text(self) -> str:
        """The text so far."""
        return self._assembly.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._assembly.token_ids)

    @property
    def result(self) -> Generation:
        """The whole answer. Raises RuntimeError before the loop over the pieces has ended."""
        if not (self._ended and self._assembly.complete):
            raise RuntimeError("the answer is not complete: read the stream to its end first")
        if self._result is None:
            self._result = self._assembly.generation()
        return self._result

    def cancel(self) -> None:
        """Cancel the request; a loop over the pieces, wherever it runs, ends with Cancelled."""
        self._stop.set()
        if self._call is not None:
            self._call.cancel()

    def _attach_call(self) -> None:
        assert self._call is None, "a stream is entered once"
        self._attempts = self._outgoing.attempts()
        self._resumptions = ResumeState(self._outgoing.retry, self._attempts)
        self._replicas = ReplicaSearch(self._outgoing.retry, self._attempts)
        self._open()

    def _leave(self) -> None:
        if not self._ended:
            self.cancel()

    def _entered(self) -> C:
        if self._call is None:
            raise RuntimeError(f"a stream is read inside its `{self._block}` block")
        return self._call

    def _take(self, message: pb.GenerateResponse | None) -> Delta | None:
        """The piece that a message has; None where it is the greeting of a call that goes on, or no message: the end.

        Raises DataLoss where the one does not continue the answer, or the other does not complete it.
        """
        if message is None:
            self._assembly.close()
            self._ended = True
            return None
        self._heard = True
        delta = self._assembly.add(message)
        self._goes_on = True
        self._assembly.resumes = self.resumes
        if self._restarted:
            self._restarted, delta = False, replace(delta, restarted=True)
        if delta.token_ids or delta.text or delta.finish_reason:
            self._resumptions.on_progress()
            self._replicas.begin_anew()
            return delta
        return delta if delta.started is not None or not self._resumptions.count else None

    def _is_complete(self) -> bool:
        """Whether the last message came, so that an error after it changes nothing: the answer has ended."""
        self._ended = self._assembly.complete
        return self._ended

    def _pause_after(self, error: LineclearError) -> float:
        """Seconds until `_go_on`. Raises `error` where there is to be no other call."""
        if self._stop.is_set():
            raise error
        if isinstance(error, ModelChanged) and (pause_seconds := self._pause_before_replica()) is not None:
            return pause_seconds
        if self._heard and isinstance(error, ModelChanged):
            return self._begin_anew(error)
        return (self._resumptions if self._heard else self._attempts).pause_after(error)

    def _pause_before_replica(self) -> float | None:
        """Seconds until another server is asked for the same answer. None where no other one is to be asked."""
        is_cut = self._goes_on
        if not self._has_replicas or (is_cut and self._resumptions.are_spent):
            return None
        pause_seconds = self._replicas.pause_seconds()
        if pause_seconds is None:
            return None
        if is_cut:  # a refused resume is counted already
            self._resumptions.count_one()
        if self._call is not None:
            self._call.cancel()
        return pause_seconds

    def _begin_anew(self, error: ModelChanged) -> float:
        """Drop the answer of the model that is gone. Raises `error`, which has that answer, where it was not to be."""
        error.text, error.token_ids = self.text, self.token_ids
        if not self._outgoing.may_restart:
            raise error
        pause_seconds = self._resumptions.pause_after(error, restarts=True)
        if self._call is not None:
            self._call.cancel()
        restarts = self._assembly.restarts + 1
        self._assembly = AnswerAssembler()
        self._assembly.restarts = restarts
        self._heard, self._restarted = False, True
        return pause_seconds

    def _go_on(self) -> C:
        """After the pause: the next call. Raises Cancelled where that is what ended the pause."""
        if self._stop.is_set():
            raise Cancelled("the call was cancelled") from None
        return self._open()

    def _give_up(self) -> None:
        self.cancel()
        self._ended = True

    def _open(self) -> C:
        method, message = self._wanted()
        call: C = self._open_call(
            method, message, timeout_seconds=self._attempts.begin(), metadata=self._outgoing.metadata
        )
        self._call, self._goes_on = call, False
        if self._stop.is_set():  # cancelled before it began, or by another thread while it was being made
            call.cancel()
        return call

    def _wanted(self) -> tuple[rpc_methods.Method[Any, pb.GenerateResponse], pb.GenerateRequest | pb.AttachRequest]:
        """Everything, or what is missing."""
        message = self._outgoing.message
        if isinstance(message, pb.AttachRequest):
            index = self._assembly.next_index
            return rpc_methods.ATTACH, pb.AttachRequest(request_id=message.request_id, from_index=index)
        return rpc_methods.GENERATE, self._assembly.rest(message) if self._heard else message


class Stream(Answer[Call[pb.GenerateResponse]]):
    """An answer as it is made: `with client.stream(...) as stream: for delta in stream: ...`, then `stream.result`.

    The call is made on entering the block, and cancelled on leaving it before the answer's end. Any thread may
    `cancel` it.
    """

    _block = "with"
    _stop: threading.Event

    def __init__(self, transport: Transport, outgoing: CallOptions) -> None:
        super().__init__(outgoing, transport.stream, transport.target)
        self._stop = threading.Event()
        self._interrupts = sigint.Canceller(self.cancel)

    def __enter__(self) -> Self:
        try:
            with self._interrupts.guard():
                self._attach_call()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with sigint.defer_sigint():
                self._leave()
        finally:
            self._interrupts.close()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """The next piece. Raises the LineclearError the call ended with."""
        call = self._entered()
        if self._ended:
            raise StopIteration
        with self._interrupts.guard():
            return self._next(call)

    def cancel(self) -> None:
        """Cancel the request; a loop over the pieces, wherever it runs, ends with Cancelled. From any thread."""
        with sigint.defer_sigint():
            super().cancel()

    def _next(self, call: Call[pb.GenerateResponse]) -> Delta:
        try:
            while not self._ended:
                try:
                    delta = self._take(next(call, None))
                except LineclearError as error:
                    if self._is_complete() and not isinstance(error, DataLoss):
                        break
                    self._stop.wait(self._pause_after(error))
                    call = self._go_on()
                    continue
                if delta is not None:
                    return delta
        except BaseException:
            self._give_up()
            raise
        raise StopIteration

    def read_all(self) -> Generation:
        """The whole answer, for one who has not entered the block. Ctrl-C cancels it, and is raised at its end."""
        with sigint.cancel_on_sigint(self.cancel), self:
            for _ in self:
                pass
        return self.result


class AsyncStream(Answer[AsyncCall[pb.GenerateResponse]]):
    """An answer as it is made: `async with client.stream(...) as stream: async for delta in stream: ...`.

    The call is made on entering the block, and cancelled on leaving it before the answer's end.
    """

    _block = "async with"
    _stop: asyncio.Event

    def __init__(self, transport: AsyncTransport, outgoing: CallOptions) -> None:
        super().__init__(outgoing, transport.stream_async, transport.target)
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._attach_call()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """The next piece. Raises the LineclearError the call ended with."""
        call = self._entered()
        try:
            while not self._ended:
                try:
                    delta = self._take(await anext(call, None))
                except LineclearError as error:
                    if self._is_complete() and not isinstance(error, DataLoss):
                        break
                    pause_seconds = self._pause_after(error)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause_seconds):
                            await self._stop.wait()
                    call = self._go_on()
                    continue
                if delta is not None:
                    return delta
        except BaseException:
            self._give_up()
            raise
        raise StopAsyncIteration

    async def read_all(self) -> Generation:
        """The whole answer, for one who has not entered the block."""
        async with self:
            async for _ in self:
                pass
        return self.result
