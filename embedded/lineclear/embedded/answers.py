"""What `submit` returns: futures for threads and asyncio, and a stream of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lineclear.errors import DeviceOutOfMemory, NonFiniteLogits, PoisonRequest
from lineclear.scheduler.core.events import Failed, Finished, FinishReason, RequestStats

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


class _LoopCallback:
    """A done callback that runs on the event loop of the task that added it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[Any], object]) -> None:
        self._loop = loop
        self.function: Callable[[Any], object] | None = function

    def __call__(self, future: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._run, future)

    def _run(self, future: Any) -> None:
        if self.function is not None:
            self.function(future)


class EmbeddedFuture(Future[_T], Generic[_T]):
    """A concurrent.futures.Future that can be awaited as well, and that `asyncio.wait` takes.

    `cancel` ends the request in the queue and while it runs; the step in progress still computes its row.
    """

    def __init__(self, request_id: str, number: int, cancel: Callable[[str], None]) -> None:
        super().__init__()
        self.request_id = request_id
        self.number = number
        self.failure: BaseException | None = None
        """The last exception of the step function in a step of this request."""
        self._cancel_request = cancel
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._loop_callbacks: list[_LoopCallback] = []

    def add_done_callback(self, fn: Callable[[Future[_T]], object]) -> None:
        """Call `fn` with this future at its end: on the running event loop if there is one, else on any thread."""
        try:
            callback = _LoopCallback(asyncio.get_running_loop(), fn)
        except RuntimeError:
            super().add_done_callback(fn)
        else:
            self._loop_callbacks.append(callback)
            super().add_done_callback(callback)

    def remove_done_callback(self, fn: Callable[[Future[_T]], object]) -> int:
        """Drop the callbacks `fn` that were added on an event loop, and return how many there were."""
        removed = [callback for callback in self._loop_callbacks if callback.function == fn]
        for callback in removed:
            callback.function = None
            self._loop_callbacks.remove(callback)
        return len(removed)

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
        waiter: asyncio.Future[_T] = loop.create_future()
        waiter.add_done_callback(self._on_waiter_done)

        def on_done(future: Future[_T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._copy_to, waiter)

        super().add_done_callback(on_done)
        return waiter.__await__()

    def _on_waiter_done(self, waiter: asyncio.Future[_T]) -> None:
        if waiter.cancelled():
            self.cancel()

    def _copy_to(self, waiter: asyncio.Future[_T]) -> None:
        if waiter.done():
            return  # the task that waited is cancelled
        if self.cancelled():
            waiter.cancel()
        elif (error := self.exception()) is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(self.result(timeout=0))

    def succeed(self, value: _T) -> None:
        """Set the result, unless the caller has cancelled the request."""
        with contextlib.suppress(InvalidStateError):
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Set the exception, unless the caller has cancelled the request."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)


class ItemFuture(EmbeddedFuture[_T], Generic[_T]):
    """The result of an item."""

    def __init__(self, request_id: str, number: int, cancel: Callable[[str], None], item: Any, cost: int) -> None:
        super().__init__(request_id, number, cancel)
        self.item = item
        self.cost = cost
        self.outcome: Any = None
        """What the process function returned for the item last."""


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
                tuple(self._tokens),
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
        index = 0
        while True:
            woken = threading.Event()
            if self._has_more(index, woken.set):
                yield self._tokens[index]
                index += 1
            elif self.done():
                break
            else:
                woken.wait()
        self.result(0)

    async def __aiter__(self) -> AsyncIterator[int]:
        loop, index = asyncio.get_running_loop(), 0
        while True:
            woken = asyncio.Event()

            def wake(woken: asyncio.Event = woken) -> None:
                loop.call_soon_threadsafe(woken.set)

            if self._has_more(index, wake):
                yield self._tokens[index]
                index += 1
            elif self.done():
                break
            else:
                await woken.wait()
        self.result(0)

    def _has_more(self, index: int, wakeup: Callable[[], None]) -> bool:
        """Return whether token `index` is there; if it may still come, call `wakeup` at the next change."""
        with self._lock:
            if index < len(self._tokens):
                return True
            if not self.done():
                self._wakeups.append(wakeup)
            return False

    def _wake(self) -> None:
        with self._lock:
            wakeups, self._wakeups = self._wakeups, []
        for wakeup in wakeups:
            with contextlib.suppress(RuntimeError):  # the reader's event loop is closed
                wakeup()


def queue_seconds(stats: RequestStats) -> float:
    """Return the time between arrival and first step; until the end, if there was no step."""
    until = stats.started_at if stats.started_at is not None else stats.ended_at
    return 0.0 if until is None else until - stats.arrival


def error_of(event: Failed, future: EmbeddedFuture[Any]) -> BaseException:
    """Return the exception for a failed request: that of the step function if it is the cause."""
    if future.failure is not None and isinstance(event.error, PoisonRequest | NonFiniteLogits):
        return future.failure
    if future.failure is not None and isinstance(event.error, DeviceOutOfMemory):
        event.error.__cause__ = future.failure
    return event.error
