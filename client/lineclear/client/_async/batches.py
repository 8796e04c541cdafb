"""The batches of a client: in order, as completed, and all at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar, Unpack, overload

from lineclear.errors import LineclearError

from ..batch_window import ALL_AT_ONCE, DEFAULT_CONCURRENCY, BatchWindow, Outcome, checked_window, default_concurrency
from ..call_params import Params
from ..message_classes import Model
from ..parameters import Prompt, Sampling, Unset
from ..progress import Progress, display
from ..requests import Request
from ..results import Generation
from ..sigint import AsyncCanceller
from .answer_stream import AsyncStream
from .batch_workers import AsyncBatchResults, AsyncBatchWorkers

Key = TypeVar("Key")

_SLOTS_TIMEOUT_SECONDS = 1.0
"""Longest wait for the number of slots of the server, before a batch without `concurrency`."""


class AsyncBatches(ABC):
    """Runs batches with the two calls that the client defines."""

    @abstractmethod
    def stream(
        self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> AsyncStream: ...

    @abstractmethod
    async def model(self, *, timeout_seconds: float | Unset | None = ...) -> Model: ...

    @overload
    def iter_batch(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int | None = None,
        window: int | None = None,
        return_exceptions: Literal[False],
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> AsyncBatchResults[Generation]: ...
    @overload
    def iter_batch(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int | None = None,
        window: int | None = None,
        return_exceptions: bool = True,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> AsyncBatchResults[Outcome]: ...
    def iter_batch(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int | None = None,
        window: int | None = None,
        return_exceptions: bool = True,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> AsyncBatchResults[Generation] | AsyncBatchResults[Outcome]:
        """Iterate over the answers in the order of the prompts, each as soon as it and all before it are complete.

        `concurrency`: requests at a time, by default as many as the server has slots. Prompts are read as needed: at
        most `window` (default: the larger of 256 and 8 * `concurrency`) run or wait for an earlier answer. A failed
        request yields its LineclearError; with `return_exceptions=False` the loop raises it and the other requests are
        cancelled. Where the loop may end early, wrap the results in `contextlib.aclosing`: that cancels the other
        requests. Raises ValueError if `concurrency` is below 1.
        """
        batch_window = BatchWindow(prompts, checked_window(concurrency, window), return_exceptions)
        workers = self._batch_workers(batch_window, concurrency, sampling, params)
        return AsyncBatchResults(workers, display(progress), _outcome)

    @overload
    def as_completed(  # type: ignore[overload-overlap]
        self,
        prompts: Mapping[Key, Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int | None = None,
        window: int | None = None,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> AsyncBatchResults[tuple[Key, Outcome]]: ...
    @overload
    def as_completed(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int | None = None,
        window: int | None = None,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> AsyncBatchResults[tuple[int, Outcome]]: ...
    def as_completed(
        self,
        prompts: Mapping[Key, Prompt | Request] | Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int | None = None,
        window: int | None = None,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> AsyncBatchResults[tuple[Key, Outcome]] | AsyncBatchResults[tuple[int, Outcome]]:
        """Iterate over pairs of key and answer, each as soon as it is complete. Otherwise like `iter_batch`.

        The key of an answer is that of its prompt in a mapping, or its index. A failed request yields its error.
        """
        size = checked_window(concurrency, window)
        if isinstance(prompts, Mapping):
            keys = list(prompts)
            batch_window = BatchWindow(list(prompts.values()), size, in_order=False)
            workers = self._batch_workers(batch_window, concurrency, sampling, params)
            return AsyncBatchResults(workers, display(progress), lambda index, outcome: (keys[index], outcome))
        workers = self._batch_workers(BatchWindow(prompts, size, in_order=False), concurrency, sampling, params)
        return AsyncBatchResults(workers, display(progress), lambda index, outcome: (index, outcome))

    @overload
    async def generate_batch(  # type: ignore[overload-overlap]
        self,
        prompts: Mapping[Key, Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int | None = None,
        return_exceptions: Literal[False] = False,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> dict[Key, Generation]: ...
    @overload
    async def generate_batch(  # type: ignore[overload-overlap]
        self,
        prompts: Mapping[Key, Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int | None = None,
        return_exceptions: bool,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> dict[Key, Outcome]: ...
    @overload
    async def generate_batch(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int | None = None,
        return_exceptions: Literal[False] = False,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> list[Generation]: ...
    @overload
    async def generate_batch(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int | None = None,
        return_exceptions: bool,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> list[Outcome]: ...
    async def generate_batch(
        self,
        prompts: Mapping[Key, Prompt | Request] | Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int | None = None,
        return_exceptions: bool = False,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> dict[Key, Generation] | dict[Key, Outcome] | list[Generation] | list[Outcome]:
        """Return all answers: a list in the order of the prompts, or a dict with the keys of a mapping.

        Up to `concurrency` requests run at a time, by default as many as the server has slots. The first failure is
        raised and the other requests are cancelled; with `return_exceptions=True` the errors are among the answers.
        `progress`: True shows a bar on a terminal if rich is installed; a function is called with (done, total).
        """
        checked_window(concurrency, None)
        keys = list(prompts) if isinstance(prompts, Mapping) else None
        items = list(prompts.values()) if isinstance(prompts, Mapping) else prompts
        batch_window = BatchWindow(items, ALL_AT_ONCE, return_exceptions)
        workers = self._batch_workers(batch_window, concurrency, sampling, params)
        results = AsyncBatchResults(workers, display(progress), _outcome)
        with AsyncCanceller.cancelling(results.cancel):
            outcomes = [outcome async for outcome in results]
        return outcomes if keys is None else dict(zip(keys, outcomes, strict=True))

    def _batch_workers(
        self,
        batch_window: BatchWindow[Prompt | Request],
        concurrency: int | None,
        sampling: Sampling | None,
        params: Params,
    ) -> AsyncBatchWorkers[Prompt | Request]:
        async def chosen_concurrency() -> int:
            return concurrency or await self._default_concurrency()

        def open_stream(prompt: Prompt | Request) -> AsyncStream:
            return self.stream(prompt, sampling, **params)

        return AsyncBatchWorkers(batch_window, chosen_concurrency, open_stream)

    async def _default_concurrency(self) -> int:
        try:
            return default_concurrency(await self.model(timeout_seconds=_SLOTS_TIMEOUT_SECONDS))
        except LineclearError:
            return DEFAULT_CONCURRENCY


def _outcome(index: int, outcome: Outcome) -> Outcome:
    return outcome
