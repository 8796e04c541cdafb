"""Run the requests of a batch at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from lineclear.errors import Cancelled

from ..batch_window import BatchWindow, Item, Read
from ..concurrency import AsyncCondition, AsyncReader, AsyncWorkers
from ..fork_guard import OwnerProcess
from ..progress import Display
from ..sigint import AsyncCanceller

Answer = TypeVar("Answer", covariant=True)


class AsyncBatchCall(Protocol):
    """A request of a batch. `cancel` is called from any thread or task."""

    async def read_all(self) -> Any: ...
    def cancel(self) -> None: ...


class AsyncBatchResults(AsyncIterator[Answer], Generic[Answer]):
    """The answers of a batch. The first read starts the batch; one reader at a time.

    A failed request yields its LineclearError. With `return_exceptions=False` the loop raises it instead.
    """

    def __init__(self, workers: AsyncBatchWorkers[Item], display: Display, shown: Callable[[int, Any], Answer]) -> None:
        self._workers = workers
        self._shown = shown
        self._owner = OwnerProcess()
        self._outcomes = workers.outcomes(display)
        self._cancel = workers.cancel
        self._canceller = AsyncCanceller(self.cancel)

    async def __anext__(self) -> Answer:
        self._owner.enter()
        try:
            with self._canceller.guard():
                return self._shown(*await anext(self._outcomes))
        except BaseException:
            self._canceller.close()
            raise

    def cancel(self) -> None:
        """Cancel the requests whose answers are not read yet. A loop over the answers ends with Cancelled."""
        if not self._owner.is_elsewhere:
            with self._canceller.deferred():
                self._cancel()

    async def aclose(self) -> None:
        """Cancel the requests whose answers are not read yet and wait for their end. For the reader of the answers."""
        await self._outcomes.aclose()
        self._canceller.close()


class AsyncBatchWorkers(Generic[Item]):
    """Up to `concurrency` workers, each of which takes an item and runs its request, again and again.

    The caller's iterable may block, so one worker at a time has it read: in a thread unless the items are in memory, or
    in a task if the iterable is asynchronous.
    """

    def __init__(
        self,
        window: BatchWindow[Item],
        concurrency: Callable[[], Awaitable[int]],
        open_call: Callable[[Item], AsyncBatchCall],
    ) -> None:
        self._window = window
        self._concurrency = concurrency
        self._open_call = open_call
        self._owner = OwnerProcess()
        self._changed = AsyncCondition()  # guards _running and the window
        self._running: set[AsyncBatchCall] = set()
        self._reading = asyncio.Lock()
        self._reader = AsyncReader[Read[Item]](window.async_read)
        self._workers = AsyncWorkers()

    async def outcomes(self, display: Display) -> AsyncGenerator[tuple[int, Any], None]:
        """Yield each outcome with the index of its item, and update `display` when more requests are complete."""
        window = self._window
        self._owner.enter()
        try:
            for number in range(window.workers(await self._concurrency())):
                self._workers.start(f"lineclear-{number}", self._work)
            while True:
                with self._changed:
                    while (read := window.read_outcomes()) is None:
                        await self._changed.wait()
                    self._changed.notify_all()  # the window may have moved
                display.update(window.completed, window.failed, window.tokens, window.total)
                if read.failure is not None:
                    raise read.failure
                for outcome in read.due:
                    yield outcome
                if read.is_last:
                    return
        finally:
            if not self._owner.is_elsewhere:
                with AsyncCanceller.deferred():
                    display.close()
                    self.cancel()
                    await self._workers.join()

    def cancel(self) -> None:
        """End the batch and its running requests. Its reader gets Cancelled."""
        with self._changed:
            self._window.fail(Cancelled("the batch was cancelled"))
            running = list(self._running)
            self._changed.notify_all()
        self._reader.close()
        for call in running:
            call.cancel()

    async def _work(self) -> None:
        while (taken := await self._take()) is not None:
            index, item = taken
            try:
                outcome = await self._run(item)
            except BaseException as error:  # put() decides its meaning for the batch
                outcome = error
            with self._changed:
                self._window.put(index, outcome)
                self._changed.notify_all()

    async def _take(self) -> tuple[int, Item] | None:
        """Return the next item and its index, once the window has room; None at the end of the batch."""
        async with self._reading:
            with self._changed:
                while not self._window.has_no_more and not self._window.has_room:
                    await self._changed.wait()
                if self._window.has_no_more:
                    return None
            read = self._window.read() if self._window.is_in_memory else await self._reader.read()
            with self._changed:
                taken = None if read is None else self._window.take(read)
                if taken is None:
                    self._changed.notify_all()  # the end of the items may be the end of the batch
                return taken

    async def _run(self, item: Item) -> Any:
        call = self._open_call(item)
        with self._changed:
            self._running.add(call)
            if self._window.failure is not None:
                call.cancel()
        try:
            return await call.read_all()
        finally:
            with self._changed:
                self._running.discard(call)
