"""Those who work on many requests at once: threads (`Crew`, whose answers are `Outcomes`) or tasks (`AsyncCrew`).

Decides who works on what and how all of it is stopped. The order of the answers, and what ends them, is `many`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from typing import Any, Generic, TypeVar, cast

from lineclear.errors import Cancelled

from . import sigint
from .answer_stream import Stream
from .batch_window import Item, OrderedWindow, Outcome, Read
from .fork_guard import OwnerProcess
from .progress import Display
from .results import Generation

Answer = TypeVar("Answer", bound=Outcome, covariant=True)

_LAST_READ_SECONDS = 0.2
"""A batch that ends waits this long for the caller's iterable, if an item is being read from it."""


class BatchResults(Iterator[Answer], Generic[Answer]):
    """The answers of a batch, in order; to be read by one thread. Nothing is asked before the first is read.

    `Outcomes[Generation]` where the first failure is raised, else `Outcomes[Generation | LineclearError]`.
    """

    def __init__(self, crew: BatchWorkers[Any], shown: Display) -> None:
        self._crew = crew
        self._outcomes = crew.outcomes(shown)
        self._interrupts = sigint.Canceller(crew.cancel)

    def __next__(self) -> Answer:
        self._crew.home.enter()
        try:
            with self._interrupts.guard():
                return cast("Answer", next(self._outcomes))
        except BaseException:
            self._interrupts.close()
            raise

    def cancel(self) -> None:
        """Cancel what has not been read; from any thread. A loop over the answers ends with Cancelled."""
        with sigint.defer_sigint():
            self._crew.cancel()

    def close(self) -> None:
        """Cancel what has not been read, and wait for its end; from the thread that reads."""
        self._outcomes.close()
        self._interrupts.close()


class BatchWorkers(Generic[Item]):
    """The threads that work on one batch. All state is behind one lock, that of `_changed` and `_may_read`.

    Each thread in its turn reads an item, holding no lock: the caller's iterable may wait for a person or a network.
    """

    def __init__(self, batch: OrderedWindow[Item], concurrency: int, open_stream: Callable[[Item], Stream]) -> None:
        self._batch = batch
        self._open_stream = open_stream
        self.home = OwnerProcess()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # for the reader of the outcomes
        self._may_read = threading.Condition(lock)  # for the threads
        self._reading: threading.Thread | None = None
        self._running: set[Stream] = set()
        workers = range(batch.workers(concurrency))
        self._threads = [threading.Thread(target=self._work, name=f"lineclear-{n}", daemon=True) for n in workers]

    def outcomes(self, shown: Display) -> Generator[Outcome, None, None]:
        """In order. `shown` hears, on the reader's thread, whenever more of the batch is complete."""
        batch = self._batch
        try:
            for thread in self._threads:
                thread.start()
            while True:
                with self._changed:
                    while (turn := batch.turn()) is None:
                        self._changed.wait()
                    self._may_read.notify()  # the window may have moved
                shown.update(batch.completed, batch.failed, batch.completion_tokens, batch.total)
                if turn.failure is not None:
                    raise turn.failure
                yield from turn.due
                if turn.is_last:
                    return
        finally:
            with sigint.defer_sigint():
                shown.close()
                self._stop()

    def cancel(self) -> None:
        """End the batch and what is running of it; from any thread. Its reader gets Cancelled."""
        if self.home.is_elsewhere:
            return
        with self._changed:
            self._batch.fail(Cancelled("the batch was cancelled"))
            running = list(self._running)
            self._wake_all()
        for stream in running:
            stream.cancel()

    def _stop(self) -> None:
        if self.home.is_elsewhere:
            return
        self.cancel()
        with self._changed:
            reading = self._reading
        for thread in self._threads:
            if thread.ident is not None:
                # The caller's iterable may never give another item. What it gives is dropped, and its reader ends.
                thread.join(_LAST_READ_SECONDS if thread is reading else None)

    def _wake_all(self) -> None:
        self._changed.notify_all()
        self._may_read.notify_all()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            index, item = taken
            try:
                outcome: Generation | BaseException = self._run(item)
            except BaseException as error:  # the batch's to judge
                outcome = error
            with self._changed:
                self._batch.put(index, outcome)
                self._changed.notify_all()
                if self._batch.has_no_more:
                    self._may_read.notify_all()

    def _take(self) -> tuple[int, Item] | None:
        with self._changed:
            while not self._batch.has_no_more and (self._reading is not None or not self._batch.has_room):
                self._may_read.wait()
            if self._batch.has_no_more:
                return None
            self._reading = threading.current_thread()
        read = self._batch.read()
        with self._changed:
            self._reading = None
            taken = self._batch.take(read)
            if taken is None:
                self._wake_all()  # that there is no more may be what the reader of the outcomes waits for
            else:
                self._may_read.notify()
            return taken

    def _run(self, item: Item) -> Generation:
        stream = self._open_stream(item)
        with self._changed:
            self._running.add(stream)
            if self._batch.failure is not None:
                stream.cancel()
        try:
            return stream.read_all()
        finally:
            with self._changed:
                self._running.discard(stream)


class AsyncBatchWorkers(Generic[Item]):
    """The tasks that work on one batch. Only the event loop touches it, so a Condition is used as a bell alone.

    Items are read on a thread: the caller's iterable may wait, and the event loop must not.
    """

    def __init__(
        self, batch: OrderedWindow[Item], concurrency: int, run: Callable[[Item], Coroutine[Any, Any, Generation]]
    ) -> None:
        self._batch = batch
        self._workers = batch.workers(concurrency)
        self._run = run
        self._changed = asyncio.Condition()
        self._turn_to_read = asyncio.Lock()
        self._reader = _ReaderThread(batch.read)

    async def outcomes(self, shown: Display) -> AsyncGenerator[Outcome, None]:
        """In order. `shown` hears, in the reader's task, whenever more of the batch is complete."""
        batch = self._batch
        tasks = [asyncio.create_task(self._work()) for _ in range(self._workers)]
        try:
            while True:
                async with self._changed:
                    while (turn := batch.turn()) is None:
                        await self._changed.wait()
                    self._changed.notify_all()  # the window may have moved
                shown.update(batch.completed, batch.failed, batch.completion_tokens, batch.total)
                if turn.failure is not None:
                    raise turn.failure
                for outcome in turn.due:
                    yield outcome
                if turn.is_last:
                    return
        finally:
            shown.close()
            self._reader.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        while (taken := await self._take()) is not None:
            index, item = taken
            try:
                outcome: Generation | BaseException = await self._run(item)
            except Exception as error:  # the batch's to judge; what cancels this task is not
                outcome = error
            async with self._changed:
                self._batch.put(index, outcome)
                self._changed.notify_all()

    async def _take(self) -> tuple[int, Item] | None:
        async with self._turn_to_read:
            async with self._changed:
                while not self._batch.has_no_more and not self._batch.has_room:
                    await self._changed.wait()
            if self._batch.has_no_more:
                return None
            read = self._batch.read() if self._batch.is_in_memory else await self._reader.read()
            async with self._changed:
                taken = self._batch.take(read)
                if taken is None:
                    self._changed.notify_all()  # that there is no more may be what the reader of the outcomes waits for
                return taken


class _ReaderThread(Generic[Item]):
    """Reads items for an event loop, in the context of the task that made it.

    A thread of its own and a daemon: neither the loop's end nor the program's waits for an iterable that gives no more.
    """

    def __init__(self, read: Callable[[], Read[Item]]) -> None:
        self._read = read
        self._context = contextvars.copy_context()
        self._asked: queue.SimpleQueue[asyncio.Future[Read[Item]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def read(self) -> Read[Item]:
        """Read one item. One reader at a time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lineclear-prompts", daemon=True)
            self._thread.start()
        answer: asyncio.Future[Read[Item]] = asyncio.get_running_loop().create_future()
        self._asked.put(answer)
        return await answer

    def close(self) -> None:
        """End the thread after the item that it reads."""
        self._asked.put(None)

    def _run(self) -> None:
        while (answer := self._asked.get()) is not None:
            read = self._context.run(self._read)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                answer.get_loop().call_soon_threadsafe(_answer, answer, read)


def _answer(future: asyncio.Future[Read[Item]], read: Read[Item]) -> None:
    if not future.done():  # the task that asked may be cancelled
        future.set_result(read)
