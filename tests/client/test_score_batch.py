"""`score_batch`: the scores of many prompts, in order and a few at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.time_limits import PATIENCE_SECONDS

from lineclear import errors
from lineclear.client import AsyncClient, Client, Scores
from lineclear.client.testing import FakeTransport

ITEMS = [(f"prompt {n}", ["x" * (1 + n % 5), "y"]) for n in range(40)]
Call = Callable[..., Any]


class Gate(FakeTransport):
    """Refuses a prompt named "bad", and counts the calls that run at once: each ends when `together` of them run."""

    def __init__(self, together: int = 1) -> None:
        super().__init__("unused")
        self.most, self._running, self._together = 0, 0, together
        self._changed = threading.Condition()

    def unary(self, method: Any, request: Any, **options: Any) -> Any:
        if getattr(request, "text", "") == "bad":
            raise errors.PromptTooLong("too long")
        return super().unary(method, request, **options)

    def _unary_answer(self, path: str, request: Any) -> Any:
        with self._changed:
            self._running += 1
            self.most = max(self.most, self._running)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.most >= self._together, PATIENCE_SECONDS)
            self._running -= 1
        return super()._unary_answer(path, request)


def in_threads(transport: FakeTransport, *arguments: Any, **params: Any) -> Any:
    with Client(transport=transport, max_attempts=1) as client:
        return client.score_batch(*arguments, **params)


def in_tasks(transport: FakeTransport, *arguments: Any, **params: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(transport=transport, max_attempts=1) as client:
            return await client.score_batch(*arguments, **params)

    return asyncio.run(run())


both = pytest.mark.parametrize("run", [in_threads, in_tasks])


@both
def test_scores_are_in_the_order_of_the_prompts(run: Call) -> None:
    seen: list[tuple[int, int | None]] = []
    transport = Gate()
    found = run(
        transport, iter(ITEMS), concurrency=7, top_logprobs=1, progress=lambda done, total: seen.append((done, total))
    )
    assert [len(scores.scores[0].token_ids) for scores in found] == [1 + n % 5 for n in range(40)]
    assert {call.message.text for call in transport.calls if getattr(call.message, "top_logprobs", 0) == 1} == {
        p for p, _ in ITEMS
    }
    assert seen[-1][0] == 40


def test_concurrency_calls_run_at_once() -> None:
    transport = Gate(together=3)
    assert len(in_threads(transport, ITEMS, concurrency=3)) == 40
    assert transport.most == 3


@both
def test_failure_takes_the_place_of_its_scores(run: Call) -> None:
    items = [ITEMS[0], ("bad", ["x"]), ("good", "text"), ITEMS[1]]
    kinds = [type(found) for found in run(Gate(), items, return_exceptions=True)]
    assert kinds == [Scores, errors.PromptTooLong, errors.InvalidRequest, Scores]
    with pytest.raises(errors.PromptTooLong):
        run(Gate(), items, concurrency=1)


@both
def test_wrong_arguments_are_raised(run: Call) -> None:
    with pytest.raises(ValueError, match="concurrency"):
        run(Gate(), ITEMS, concurrency=0)
    with pytest.raises(TypeError, match="score\\(\\) has no parameter temperature"):
        run(Gate(), ITEMS, temperature=1.0)
    assert run(Gate(), []) == []


async def test_cancelling_the_task_ends_its_calls() -> None:
    ended: list[str] = []

    class Silent(FakeTransport):
        async def unary_async(self, method: Any, request: Any, **options: Any) -> Any:
            try:
                await asyncio.sleep(PATIENCE_SECONDS)
            finally:
                ended.append(request.text)

    async with AsyncClient(transport=Silent("unused")) as client:
        task = asyncio.create_task(client.score_batch(ITEMS, concurrency=4))
        while not ended:
            await asyncio.sleep(0.01)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert sorted(ended) == [f"prompt {n}" for n in range(4)]
