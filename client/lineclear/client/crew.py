"""Threads that work on many requests at once, and what their answers are read from.

Decides who works on what and how all of it ends. The order of the answers is `many`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic

from lineclear.errors import Cancelled, LineclearError

from .many import Batch, Item, Outcome
from .progress import Display
from .results import Generation
from .stream import Stream


class Outcomes(Iterator[Outcome]):
    """The answers of a batch, in order; to be read by one thread. Nothing is asked before the first is read."""

    def __init__(self, crew: Crew[Any], shown: Display) -> None:
        self._crew = crew
        self._outcomes = _shown(crew, shown)

    def __next__(self) -> Outcome:
        return next(self._outcomes)

    def cancel(self) -> None:
        """Cancel what has not been read; from any thread. A loop over the answers ends with Cancelled."""
        self._crew.cancel()

    def close(self) -> None:
        """Cancel what has not been read, and wait for its end; from the thread that reads."""
        self._outcomes.close()


def _shown(crew: Crew[Any], shown: Display) -> Generator[Outcome, None, None]:
    try:
        yield from crew.outcomes(shown)
    finally:
        shown.close()
        crew.stop()


class Crew(Generic[Item]):
    """The threads that work on one batch. All state is behind `_changed`."""

    def __init__(
        self, batch: Batch[Item], concurrency: int, return_exceptions: bool, open_stream: Callable[[Item], Stream]
    ) -> None:
        self._batch = batch
        self._return_exceptions = return_exceptions
        self._open_stream = open_stream
        self._changed = threading.Condition()
        self._running: set[Stream] = set()
        self._stopped = False
        count = concurrency if batch.total is None else min(concurrency, batch.total)
        self._threads = [threading.Thread(target=self._work, name=f"lineclear-{n}", daemon=True) for n in range(count)]

    def outcomes(self, shown: Display) -> Iterator[Outcome]:
        """In order. `shown` hears, on the reader's thread, whenever more of the batch is complete."""
        for thread in self._threads:
            thread.start()
        batch, reported = self._batch, -1
        while True:
            with self._changed:
                if not self._threads:
                    batch.take()  # nobody else finds out that there is nothing
                while not batch.done and batch.completed == reported:
                    self._changed.wait()
                due, done, failure = batch.ready(), batch.done, batch.failure
                reported = batch.completed
                self._changed.notify_all()  # the window may have moved
            shown.update(batch.completed, batch.failed, batch.completion_tokens, batch.total)
            if failure is not None:
                raise failure
            yield from due
            if done:
                return

    def cancel(self) -> None:
        """End the batch and what is running of it; from any thread. Its reader gets Cancelled."""
        self._fail(Cancelled("the batch was cancelled"))
        self._hang_up()

    def stop(self) -> None:
        """Cancel what is running and wait for the threads."""
        self._hang_up()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            index, item = taken
            try:
                outcome: Outcome = self._run(item)
            except LineclearError as error:
                outcome = error
            except BaseException as error:  # a bug, or a wrong argument: the reader's to see
                self._fail(error)
                return
            with self._changed:
                if isinstance(outcome, LineclearError) and not self._return_exceptions:
                    self._batch.fail(outcome)
                self._batch.put(index, outcome)
                self._changed.notify_all()

    def _take(self) -> tuple[int, Item] | None:
        with self._changed:
            while not self._stopped:
                taken = self._batch.take()
                if taken is not None:
                    return taken
                if self._batch.exhausted or self._batch.failure is not None:
                    self._changed.notify_all()  # that there is no more may be what the reader waits for
                    return None
                self._changed.wait()
            return None

    def _run(self, item: Item) -> Generation:
        stream = self._open_stream(item)
        with self._changed:
            self._running.add(stream)
            if self._stopped:
                stream.cancel()
        try:
            return stream.read_all()
        finally:
            with self._changed:
                self._running.discard(stream)

    def _hang_up(self) -> None:
        with self._changed:
            self._stopped = True
            running = list(self._running)
            self._changed.notify_all()
        for stream in running:
            stream.cancel()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._batch.fail(error)
            self._changed.notify_all()
