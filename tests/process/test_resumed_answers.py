"""The scheduler dies or leaves under answers, another one comes up: every caller has its answer, whole and exact."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path

import pytest
from support.time_limits import PATIENCE_SECONDS
from support.toy_service import ToyService, answer, text_of, toy_service
from support.waiting import eventually

from lineclear.client import AsyncClient, Client, Generation, RetryPolicy
from lineclear.client.retry import RetryState
from lineclear.errors import LineclearError

COUNT = 8
LENGTH = 120
PATIENT = RetryPolicy(max_attempts=1000, max_resumes=10_000, max_pause_seconds=0.2)
STEP = {"min_step_seconds": 0.004, "max_step_seconds": 0.004, "max_model_len": 512}


def prompt(number: int) -> list[int]:
    return [5 + number, 6, 7]


def check(results: list[Generation]) -> None:
    for number, result in enumerate(results):
        # The server chose the seed and sent it in the first message.
        tokens = answer(prompt(number), LENGTH, seed=result.started.seed)
        assert list(result.token_ids) == tokens
        assert result.text == text_of(tokens)
        assert result.usage.completion_tokens == LENGTH


def trouble(service: ToyService, how: str, begun: threading.Event) -> None:
    """Kill it, or ask it to leave, and start another one where it was."""
    assert begun.wait(PATIENCE_SECONDS)
    if how == "killed":
        service.kill()
    else:
        assert service.stop() == 0
    service.start()


@pytest.mark.parametrize("how", ["killed", "told to leave"])
def test_answers_survive_the_scheduler(tmp_path: Path, how: str) -> None:
    begun = threading.Event()

    async def ask(client: AsyncClient, number: int) -> Generation:
        async with client.stream(prompt(number), max_tokens=LENGTH, ignore_eos=True) as stream:
            async for _ in stream:
                if len(stream.token_ids) > 10:
                    begun.set()
        return stream.result

    async def everybody(target: str) -> list[Generation]:
        async with AsyncClient(target, retry=PATIENT) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(COUNT)))

    with toy_service(tmp_path, "--drain-timeout-seconds", "0", **STEP) as service:
        troubles = threading.Thread(target=trouble, args=(service, how, begun))
        troubles.start()
        results = asyncio.run(everybody(service.target))
        troubles.join()
    check(results)
    assert all(result.resumes for result in results)


@pytest.mark.parametrize(("kind", "sessions"), [("threads", False), ("threads", True), ("asyncio", True)])
def test_requests_that_waited_outlive_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, sessions: bool
) -> None:
    """Not begun yet, and with as many attempts as the server needs to come back: more than `max_attempts` says."""
    failed: Counter[int] = Counter()
    real = RetryState.pause_after

    def counting(attempts: RetryState, error: LineclearError) -> float:
        failed[id(attempts)] += 1
        return real(attempts, error)

    monkeypatch.setattr(RetryState, "pause_after", counting)
    policy = RetryPolicy(max_pause_seconds=0.1, max_resumes=10_000)  # the one that had begun is not what this is about
    results: dict[int, Generation] = {}

    def in_threads(target: str) -> None:
        with Client(target, retry=policy, sessions=sessions) as client:

            def ask(number: int) -> None:
                results[number] = client.generate(prompt(number), max_tokens=LENGTH, ignore_eos=True)

            asking = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join(PATIENCE_SECONDS)

    async def in_tasks(target: str) -> None:
        async with AsyncClient(target, retry=policy, sessions=sessions) as client:
            calls = (client.generate(prompt(number), max_tokens=LENGTH, ignore_eos=True) for number in range(4))
            results.update(enumerate(await asyncio.gather(*calls)))

    run = in_threads if kind == "threads" else lambda target: asyncio.run(in_tasks(target))
    with toy_service(tmp_path, "--max-batch-size", "1", **STEP) as service, Client(service.target) as watching:
        everybody = threading.Thread(target=run, args=(service.target,))
        everybody.start()
        eventually(lambda: watching.stats().gauges.num_requests_waiting == 3)
        service.kill()
        eventually(lambda: len([1 for count in failed.values() if count > policy.max_attempts]) >= 3)
        service.start()
        everybody.join(PATIENCE_SECONDS)
    check([results[number] for number in range(4)])
    assert sum(result.resumes > 0 for result in results.values()) <= 1, "three had not begun"
