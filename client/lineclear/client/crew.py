"""Those who work on many requests at once: threads (`Crew`, whose answers are `Outcomes`) or tasks (`AsyncCrew`).

Decides who works on what and how all of it is stopped. The order of the answers, and what ends them, is `many`'s.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from typing import Any, Generic, TypeVar, cast

from lineclear.errors import Cancelled

from . import interrupts
from .many import Batch, Item, Outcome
from .progress import Display
from .results import Generation
from .stream import Stream

Answer = TypeVar("Answer", bound=Outcome, covariant=True)


class Outcomes(Iterator[Answer], Generic[Answer]):
    """The answers of a batch, in order; to be read by one thread. Nothing is asked before the first is read.

    `Outcomes[Generation]` where the first failure is raised, else `Outcomes[Generation | LineclearError]`.
    """

    def __init__(self, crew: Crew[Any], shown: Display) -> None:
        self._crew = crew
        self._outcomes = crew.outcomes(shown)
        self._interrupts = interrupts.Canceller(crew.cancel)

    def __next__(self) -> Answer:
        try:
            with self._interrupts.guard():
                return cast("Answer", next(self._outcomes))
        except BaseException:
            self._interrupts.close()
            raise

    def cancel(self) -> None:
        """Cancel what has not been read; from any thread. A loop over the answers ends with Cancelled."""
        with interrupts.deferring():
            self._crew.cancel()

    def close(self) -> None:
        """Cancel what has not been read, and wait for its end; from the thread that reads."""
        self._outcomes.close()
        self._interrupts.close()


class Crew(Generic[Item]):
    """The threads that work on one batch. All state is behind `_changed`."""

    def __init__(self, batch: Batch[Item], concurrency: int, open_stream: Callable[[Item], Stream]) -> None:
        self._batch = batch
        self._open_stream = open_stream
        self._changed = threading.Condition()
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
                    self._changed.notify_all()  # the window may have moved
                shown.update(batch.completed, batch.failed, batch.completion_tokens, batch.total)
                if turn.failure is not None:
                    raise turn.failure
                yield from turn.due
                if turn.is_last:
                    return
        finally:
            with interrupts.deferring():
                shown.close()
                self._stop()

    def cancel(self) -> None:
        """End the batch and what is running of it; from any thread. Its reader gets Cancelled."""
        with self._changed:
            self._batch.fail(Cancelled("the batch was cancelled"))
            running = list(self._running)
            self._changed.notify_all()
        for stream in running:
            stream.cancel()

    def _stop(self) -> None:
        self.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

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

    def _take(self) -> tuple[int, Item] | None:
        with self._changed:
            while (taken := self._batch.take()) is None and not self._batch.has_no_more:
                self._changed.wait()
            if taken is None:
                self._changed.notify_all()  # that there is no more may be what the reader waits for
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


class AsyncCrew(Generic[Item]):
    """The tasks that work on one batch. Only the event loop touches it, so a Condition is used as a bell alone."""

    def __init__(
        self, batch: Batch[Item], concurrency: int, run: Callable[[Item], Coroutine[Any, Any, Generation]]
    ) -> None:
        self._batch = batch
        self._workers = batch.workers(concurrency)
        self._run = run
        self._changed = asyncio.Condition()

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
        async with self._changed:
            while (taken := self._batch.take()) is None and not self._batch.has_no_more:
                await self._changed.wait()
            if taken is None:
                self._changed.notify_all()  # that there is no more may be what the reader waits for
            return taken
