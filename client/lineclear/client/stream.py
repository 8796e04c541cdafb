"""One answer read by a thread that waits for each piece: the IO around `calls.Answer`, which decides."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from lineclear.errors import Cancelled, LineclearError
from lineclear.v1 import inference_pb2 as pb

from . import interrupts
from .calls import Answer, Outgoing
from .results import Delta, Generation
from .transport import Call, Transport


class Stream(Answer):
    """An answer as it is made: `with client.stream(...) as stream: for delta in stream: ...`, then `stream.result`.

    The call is made on entering the block, and cancelled on leaving it before the answer's end.
    """

    def __init__(self, transport: Transport, outgoing: Outgoing) -> None:
        super().__init__(outgoing)
        self._transport = transport
        self._call: Call[pb.GenerateResponse] | None = None
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        assert self._call is None, "a stream is entered once"
        self._begin()
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._ended:
            self.cancel()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """The next piece. Raises the LineclearError the call ended with."""
        if self._call is None:
            raise RuntimeError("a stream is read inside its `with` block")
        if self._ended:
            raise StopIteration
        try:
            while (message := self._read()) is not None:
                delta = self._take(message)
                if delta is not None:
                    return delta
            self._assembly.close()
        except BaseException:
            self.cancel()
            self._ended = True
            raise
        self._ended = True
        raise StopIteration

    def read_all(self) -> Generation:
        """The whole answer, for one who has not entered the block. Ctrl-C cancels it, and is raised at its end."""
        with interrupts.cancelling(self.cancel), self:
            for _ in self:
                pass
        return self.result

    def cancel(self) -> None:
        """Cancel the request; from any thread. A loop over the pieces ends with Cancelled."""
        self._stop.set()
        if self._call is not None:
            self._call.cancel()

    def _open(self) -> None:
        outgoing = self._outgoing
        method, message = self._next_call()
        self._call = self._transport.stream(
            method,
            message,
            timeout_seconds=self._attempts.begin(),
            metadata=outgoing.metadata,
        )
        if self._stop.is_set():  # cancelled by another thread while the call was being made
            self._call.cancel()

    def _read(self) -> pb.GenerateResponse | None:
        while True:
            assert self._call is not None
            try:
                return next(self._call)
            except StopIteration:
                return None
            except LineclearError as error:
                if self._stop.is_set():
                    raise
                if self._stop.wait(self._pause_after(error)):
                    raise Cancelled("the call was cancelled") from None
                self._open()
