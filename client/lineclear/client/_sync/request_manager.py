# Generated from _async/request_manager.py by client/unasync.py. Do not edit.
"""Requests whose results are read as they finish. The words are those of transformers' ContinuousBatchingManager."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self, Unpack

from lineclear.errors import Cancelled, DuplicateRequest

from ..batch_window import Outcome
from ..concurrency import Condition
from ..futures import AnswerFuture
from ..requests import Params, Prompt, Request, Sampling
from ..results import Generation
from ..retry import log
from ..sigint import Canceller


class RequestManager(Iterator[tuple[str, Outcome]]):
    """Requests that a client sent, and their results in the order in which they finish.

        with client.manager() as manager:
            manager.add_request("The sun is", max_tokens=8)
            for request_id, outcome in manager:
                print(request_id, outcome)

    A result is a pair of request id and Generation, or the LineclearError of a failed request. A loop ends when every
    result is read. Leaving the block cancels the requests that are open.
    """

    def __init__(self, submit_future: Callable[[Request], AnswerFuture]) -> None:
        self._submit_future = submit_future
        self._changed = Condition()  # guards the fields below
        self._open: dict[str, AnswerFuture] = {}
        self._unread: dict[str, AnswerFuture] = {}
        self._handler: Callable[[str, Outcome], object] | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the requests that are open. Results that are ready can still be read."""
        with self._changed:
            self._is_closed = True
            futures = list(self._open.values())
        for future in futures:
            future.cancel()

    def add_request(self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]) -> str:
        """Send a request and return its id, without waiting. Arguments are those of `Client.stream`."""
        request = Request.of(prompt, sampling, **params)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the manager is closed")
            if request.request_id in self._open or request.request_id in self._unread:
                raise DuplicateRequest("the manager has a request with this request_id whose result is not read")
            future = self._submit_future(request)
            self._open[future.request_id] = future
        future.add_done_callback(lambda _: self._finish(future))
        return future.request_id

    def add_requests(
        self, prompts: Iterable[Prompt | Request], sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> list[str]:
        """Send a request for each prompt, and return their ids."""
        return [self.add_request(prompt, sampling, **params) for prompt in prompts]

    def get_result(
        self, request_id: str | None = None, *, timeout_seconds: float | None = None
    ) -> tuple[str, Outcome] | None:
        """Wait for the next result, or for that of `request_id`, and return it. Each result is returned once.

        Returns None after `timeout_seconds`. Without a timeout, returns None if there is no such request. An exception
        of `on_delta` or `on_token` is raised.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            self._wait(request_id, deadline)
            with self._changed:
                future = self._unread.pop(self._next_id(request_id), None)
                if future is not None:
                    break
                if self._is_over(request_id, deadline):
                    return None
        outcome = _outcome(future)
        if isinstance(outcome, Outcome):
            return future.request_id, outcome
        raise outcome

    def __next__(self) -> tuple[str, Outcome]:
        """Return the next result."""
        result = self.get_result()
        if result is None:
            raise StopIteration
        return result

    def register_result_handler(self, handler: Callable[[str, Outcome], object] | None) -> None:
        """Call `handler` with the request id and the outcome of each request that finishes from now on.

        Such a result is not for `get_result` then. If the handler raises, the exception is logged and the result is
        for `get_result`. The handler runs where done callbacks of futures run, so it should be short.
        """
        with self._changed:
            self._handler = handler

    def cancel_request(self, request_id: str) -> bool:
        """Cancel a request, whose outcome is then Cancelled. Returns False if it is not open."""
        with self._changed:
            future = self._open.get(request_id)
        return future is not None and future.cancel()

    def _wait(self, request_id: str | None, deadline: float | None) -> None:
        """Wait for a result. Ctrl-C ends the wait, and takes no result."""
        is_interrupted = False

        def interrupt() -> None:
            nonlocal is_interrupted
            is_interrupted = True
            with self._changed:
                self._changed.notify_all()

        with Canceller.cancelling(interrupt), self._changed:
            while not (
                is_interrupted or self._next_id(request_id) in self._unread or self._is_over(request_id, deadline)
            ):
                self._changed.wait(None if deadline is None else deadline - time.monotonic())

    def _next_id(self, request_id: str | None) -> str:
        return next(iter(self._unread), "") if request_id is None else request_id

    def _is_over(self, request_id: str | None, deadline: float | None) -> bool:
        """Return whether the wait for a result ends without one."""
        if deadline is not None:
            return time.monotonic() >= deadline
        return not self._open if request_id is None else request_id not in self._open

    def _finish(self, future: AnswerFuture) -> None:
        outcome = _outcome(future)
        is_handled = isinstance(outcome, Outcome) and self._handle(future.request_id, outcome)
        with self._changed:
            del self._open[future.request_id]
            if not is_handled:
                self._unread[future.request_id] = future
            self._changed.notify_all()

    def _handle(self, request_id: str, outcome: Outcome) -> bool:
        """Return whether the handler took the result."""
        if self._handler is None:
            return False
        try:
            self._handler(request_id, outcome)
        except Exception:
            log.exception("the result handler failed")
            return False
        return True


def _outcome(future: AnswerFuture) -> Generation | BaseException:
    if future.cancelled():
        return Cancelled("the request was cancelled")
    return future.exception() or future.result()
