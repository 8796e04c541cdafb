"""What `submit` returns: futures for threads and asyncio, and a stream of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from lineclear.scheduler.core.events import Finished, FinishReason, RequestStats

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete answer of a request. Times are seconds; `queue_seconds` ends with the first step of the request."""

    request_id: str
    tokens: tuple[int, ...]
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float
    first_token_seconds: float
    seconds: float
    preemptions: int

    @property
    def tokens_per_second(self) -> float:
        """Return output tokens per second since the arrival."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0


class EmbeddedFuture(Future[_T], ABC, Generic[_T]):
    """A concurrent.futures.Future that can be awaited as well, and that `asyncio.wait` takes.

    `cancel` ends the request in the queue and while it runs; the step in progress still computes its row.
    """

    def __init__(self, request_id: str, number: int, cancel: Callable[[str], None], cost: int = 0) -> None:
        super().__init__()
        self.request_id = request_id
        self.number = number
        self.cost = cost
        self.is_waiting = True
        """The request has not been in a step yet."""
        self.failure: BaseException | None = None
        """The last exception of the step function in a step of this request."""
        self._cancel_request = cancel
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._loop_callbacks: list[Callable[[Any], object]] = []

    def add_done_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        """Call `fn` with this future at its end: on the running event loop if there is one, else on any thread."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            super().add_done_callback(fn)
            return
        self._loop_callbacks.append(fn)
        super().add_done_callback(lambda _: _call_soon(loop, self._run_callback, fn))

    def remove_done_callback(self, fn: Callable[[Future[_T]], object]) -> int:
        """Drop the callbacks `fn` that were added on an event loop, and return how many there were."""
        kept = [callback for callback in self._loop_callbacks if callback != fn]
        removed, self._loop_callbacks = len(self._loop_callbacks) - len(kept), kept
        return removed

    def _run_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        if fn in self._loop_callbacks:
            self._loop_callbacks.remove(fn)
            fn(self)

    def cancel(self) -> bool:
        """Cancel the request. Returns False if it has ended."""
        if not super().cancel():
            return False
        with self._lock:
            is_first, self._is_cancelled = not self._is_cancelled, True
        if is_first:
            self.set_running_or_notify_cancel()  # wakes concurrent.futures.wait and as_completed
            self._cancel_request(self.request_id)
        return True

    def __await__(self) -> Generator[Any, None, _T]:
        # Not asyncio.wrap_future: its callback is thread-safe and would take a second turn of the loop.
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        super().add_done_callback(lambda _: _call_soon(loop, _wake_task, waiter))
        try:
            yield from waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.cancelled():
            raise asyncio.CancelledError
        return self.result(0)

    def succeed(self, value: _T) -> None:
        """Set the result, unless the caller has cancelled the request."""
        with contextlib.suppress(InvalidStateError):
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Set the exception, unless the caller has cancelled the request."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)

    @abstractmethod
    def finish(self, event: Finished) -> None:
        """Set the result of a request that finished."""


class Answer(EmbeddedFuture[Completion]):
    """The answer to a prompt: a future of its Completion, and an iterable of its tokens.

    `for token in answer` and `async for token in answer` yield each token after the step that sampled it. They raise
    the request's error after the tokens before it.
    """

    def __init__(self, request_id: str, number: int, cancel: Callable[[str], None], data: Any = None) -> None:
        super().__init__(request_id, number, cancel)
        self.data = data
        self._tokens: list[int] = []
        self._wakeups: list[Callable[[], None]] = []
        Future.add_done_callback(self, lambda _: self._wake())  # on the batcher's thread

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._tokens)

    def add_token(self, token: int) -> None:
        """Append a sampled token."""
        with self._lock:
            self._tokens.append(token)
        self._wake()

    def finish(self, event: Finished) -> None:
        """Set the Completion."""
        stats = event.stats
        self.succeed(
            Completion(
                self.request_id,
                self.tokens,
                event.reason,
                stats.prompt_tokens,
                stats.cached_tokens,
                queue_seconds(stats),
                (stats.first_token_at or stats.arrival) - stats.arrival,
                (stats.ended_at or stats.arrival) - stats.arrival,
                stats.preemptions,
            )
        )

    def __iter__(self) -> Iterator[int]:
        woken = threading.Event()
        for index in count():
            while self._must_wait(index, woken.set):
                woken.wait()
                woken.clear()
            if index == len(self._tokens):
                break
            yield self._tokens[index]
        self.result(0)

    async def __aiter__(self) -> AsyncIterator[int]:
        woken = asyncio.Event()
        wake = partial(_call_soon, asyncio.get_running_loop(), woken.set)
        for index in count():
            while self._must_wait(index, wake):
                await woken.wait()
                woken.clear()
            if index == len(self._tokens):
                break
            yield self._tokens[index]
        self.result(0)

    def _must_wait(self, index: int, wakeup: Callable[[], None]) -> bool:
        """Return whether token `index` may still come; then call `wakeup` at the next change."""
        with self._lock:
            if index < len(self._tokens) or self.done():
                return False
            self._wakeups.append(wakeup)
            return True

    def _wake(self) -> None:
        with self._lock:
            wakeups, self._wakeups = self._wakeups, []
        for wakeup in wakeups:
            wakeup()


def queue_seconds(stats: RequestStats) -> float:
    """Return the time between arrival and first step; until the end, if there was no step."""
    until = stats.started_at if stats.started_at is not None else stats.ended_at
    return 0.0 if until is None else until - stats.arrival


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(function, *arguments)


def _wake_task(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
