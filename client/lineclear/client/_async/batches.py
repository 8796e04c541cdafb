"""The batches of a client: in order, as completed, and all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Unpack, cast, overload

from lineclear.errors import LineclearError

from ..batch_window import (
    ALL_AT_ONCE,
    DEFAULT_CONCURRENCY,
    AsyncItems,
    BatchParams,
    BatchWindow,
    Item,
    Outcome,
    ScoreBatchParams,
    WindowParams,
    checked_window,
    default_concurrency,
)
from ..call_params import Params
from ..parameters import Prompt, Sampling
from ..progress import display
from ..requests import Request
from ..results import Generation
from ..sigint import AsyncCanceller
from .answer_stream import AsyncStream
from .batch_workers import AsyncBatchCall, AsyncBatchResults, AsyncBatchWorkers
from .connection import AsyncConnection

Answer = TypeVar("Answer")
Key = TypeVar("Key")

_SLOTS_TIMEOUT_SECONDS = 1.0
"""Longest wait for the number of slots of the server, before a batch without `concurrency`."""


class AsyncBatches(AsyncConnection):
    """Runs batches. `concurrency`, `window` and `progress` are keyword arguments beside the parameters of a call."""

    @overload
    def iter_batch(
        self,
        prompts: AsyncItems[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        return_exceptions: Literal[False],
        **params: Unpack[WindowParams],
    ) -> AsyncBatchResults[Generation]: ...
    @overload
    def iter_batch(
        self,
        prompts: AsyncItems[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        return_exceptions: bool = True,
        **params: Unpack[WindowParams],
    ) -> AsyncBatchResults[Outcome]: ...
    def iter_batch(
        self,
        prompts: AsyncItems[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        return_exceptions: bool = True,
        **params: Unpack[WindowParams],
    ) -> AsyncBatchResults[Generation] | AsyncBatchResults[Outcome]:
        """Iterate over the answers in the order of the prompts, each as soon as it and all before it are complete.

        `concurrency`: requests at a time, by default as many as the server has slots. Prompts are read as needed: at
        most `window` (default: the larger of 256 and 8 * `concurrency`) run or wait for an earlier answer. A failed
        request yields its LineclearError; with `return_exceptions=False` the loop raises it and the other requests are
        cancelled. Where the loop may end early, wrap the results in `contextlib.aclosing`: that cancels the other
        requests. Raises ValueError if `concurrency` is below 1.
        """
        window = BatchWindow(prompts, _window(params), return_exceptions)
        return self._batch(window, self._streams(sampling, params), outcome_alone, params)

    @overload
    def as_completed(  # type: ignore[overload-overlap]
        self, prompts: Mapping[Key, Prompt | Request], sampling: Sampling | None = None, **params: Unpack[WindowParams]
    ) -> AsyncBatchResults[tuple[Key, Outcome]]: ...
    @overload
    def as_completed(
        self, prompts: AsyncItems[Prompt | Request], sampling: Sampling | None = None, **params: Unpack[WindowParams]
    ) -> AsyncBatchResults[tuple[int, Outcome]]: ...
    def as_completed(
        self,
        prompts: Mapping[Key, Prompt | Request] | AsyncItems[Prompt | Request],
        sampling: Sampling | None = None,
        **params: Unpack[WindowParams],
    ) -> AsyncBatchResults[tuple[Key, Outcome]] | AsyncBatchResults[tuple[int, Outcome]]:
        """Iterate over pairs of key and answer, each as soon as it is complete. Otherwise like `iter_batch`.

        The key of an answer is that of its prompt in a mapping, or its index. A failed request yields its error.
        """
        items, keys = _items(prompts)
        window, streams = BatchWindow(items, _window(params), in_order=False), self._streams(sampling, params)
        if keys is None:
            return self._batch(window, streams, lambda index, outcome: (index, outcome), params)
        return self._batch(window, streams, lambda index, outcome: (keys[index], outcome), params)

    @overload
    async def generate_batch(  # type: ignore[overload-overlap]
        self,
        prompts: Mapping[Key, Prompt | Request],
        sampling: Sampling | None = None,
        *,
        return_exceptions: Literal[False] = False,
        **params: Unpack[BatchParams],
    ) -> dict[Key, Generation]: ...
    @overload
    async def generate_batch(  # type: ignore[overload-overlap]
        self,
        prompts: Mapping[Key, Prompt | Request],
        sampling: Sampling | None = None,
        *,
        return_exceptions: bool,
        **params: Unpack[BatchParams],
    ) -> dict[Key, Outcome]: ...
    @overload
    async def generate_batch(
        self,
        prompts: AsyncItems[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        return_exceptions: Literal[False] = False,
        **params: Unpack[BatchParams],
    ) -> list[Generation]: ...
    @overload
    async def generate_batch(
        self,
        prompts: AsyncItems[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        return_exceptions: bool,
        **params: Unpack[BatchParams],
    ) -> list[Outcome]: ...
    async def generate_batch(
        self,
        prompts: Mapping[Key, Prompt | Request] | AsyncItems[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        return_exceptions: bool = False,
        **params: Unpack[BatchParams],
    ) -> dict[Key, Generation] | dict[Key, Outcome] | list[Generation] | list[Outcome]:
        """Return all answers: a list in the order of the prompts, or a dict with the keys of a mapping.

        Up to `concurrency` requests run at a time, by default as many as the server has slots. The first failure is
        raised and the other requests are cancelled; with `return_exceptions=True` the errors are among the answers.
        `progress`: True shows a bar on a terminal if rich is installed; a function is called with (done, total).
        """
        checked_window(params.get("concurrency"), None)
        items, keys = _items(prompts)
        window = BatchWindow(items, ALL_AT_ONCE, return_exceptions)
        outcomes = await all_of(self._batch(window, self._streams(sampling, params), outcome_alone, params))
        return outcomes if keys is None else dict(zip(keys, outcomes, strict=True))

    def _streams(self, sampling: Sampling | None, params: BatchParams) -> Callable[[Prompt | Request], AsyncStream]:
        """Return what opens the stream of a prompt, with the parameters that `_batch` leaves in `params`."""
        return lambda prompt: self.stream(prompt, sampling, **cast("Params", params))

    def _batch(
        self,
        window: BatchWindow[Item],
        open_call: Callable[[Item], AsyncBatchCall],
        shown: Callable[[int, Any], Answer],
        params: BatchParams | ScoreBatchParams,
    ) -> AsyncBatchResults[Answer]:
        """Return the outcomes of the items of `window`. Removes the parameters of the batch from `params`."""
        concurrency, progress = params.pop("concurrency", None), params.pop("progress", None)

        async def chosen_concurrency() -> int:
            return concurrency or await self._default_concurrency()

        return AsyncBatchResults(AsyncBatchWorkers(window, chosen_concurrency, open_call), display(progress), shown)

    async def _default_concurrency(self) -> int:
        try:
            return default_concurrency(await self.model(timeout_seconds=_SLOTS_TIMEOUT_SECONDS))
        except LineclearError:
            return DEFAULT_CONCURRENCY


def _window(params: WindowParams) -> int:
    return checked_window(params.get("concurrency"), params.pop("window", None))


def _items(
    prompts: Mapping[Key, Prompt | Request] | AsyncItems[Prompt | Request],
) -> tuple[AsyncItems[Prompt | Request], list[Key] | None]:
    return (list(prompts.values()), list(prompts)) if isinstance(prompts, Mapping) else (prompts, None)


def outcome_alone(index: int, outcome: Any) -> Any:
    """Return the items of a batch without keys."""
    return outcome


async def all_of(results: AsyncBatchResults[Answer]) -> list[Answer]:
    """Return the items of a batch. Ctrl-C cancels it."""
    with AsyncCanceller.cancelling(results.cancel):
        return [outcome async for outcome in results]
