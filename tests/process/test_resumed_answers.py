"""The scheduler dies or leaves under answers, another one comes up: every caller has its answer, whole and exact."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.time_limits import PATIENCE_SECONDS
from support.toy_service import answer, text_of, toy_service
from support.waiting import eventually

from lineclear.client import AsyncClient, AsyncStream, Client, Generation, RetryPolicy
from lineclear.client.retry import RetryState
from lineclear.errors import LineclearError

COUNT = 8
LENGTH = 120
PATIENT = RetryPolicy(max_attempts=1000, max_resumes=10_000, max_pause_seconds=0.2)
STEP = {"min_step_seconds": 0.004, "max_step_seconds": 0.004, "max_model_len": 512}


def prompt(number: int) -> list[int]:
    return [5 + number, 6, 7]


def check(results: list[Generation], length: int = LENGTH) -> None:
    for number, result in enumerate(results):
        # The server chose the seed and sent it in the first message.
        tokens = answer(prompt(number), length, seed=result.started.seed)
        assert list(result.token_ids) == tokens
        assert result.text == text_of(tokens)
        assert result.usage.completion_tokens == length


def test_answers_survive_the_scheduler(tmp_path: Path) -> None:
    """It is killed, and the next one is told to leave."""
    streams: list[AsyncStream] = []

    async def ask(client: AsyncClient, number: int) -> Generation:
        async with client.stream(prompt(number), max_tokens=2 * LENGTH, ignore_eos=True) as stream:
            streams.append(stream)
            async for _ in stream:
                pass
        return stream.result

    async def everybody() -> list[Generation]:
        async with AsyncClient(service.target, retry=PATIENT) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(COUNT)))

    def wait_for(length: int) -> None:
        eventually(lambda: len(streams) == COUNT and any(len(stream.token_ids) > length for stream in streams))

    with toy_service(tmp_path, "--drain-timeout-seconds", "0", **STEP) as service, ThreadPoolExecutor() as pool:
        results = pool.submit(asyncio.run, everybody())
        wait_for(10)
        service.kill()
        service.start()
        wait_for(LENGTH)
        assert service.stop() == 0
        service.start()
        check(results.result(PATIENCE_SECONDS), 2 * LENGTH)
    resumes = [result.resumes for result in results.result()]
    assert min(resumes) >= 1
    assert max(resumes) >= 2


def test_requests_that_waited_outlive_the_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not begun yet, and with as many attempts as the server needs to come back: more than `max_attempts` says."""
    failed: Counter[int] = Counter()
    real = RetryState.pause_after

    def counting(attempts: RetryState, error: LineclearError) -> float:
        failed[id(attempts)] += 1
        return real(attempts, error)

    monkeypatch.setattr(RetryState, "pause_after", counting)
    policy = RetryPolicy(max_pause_seconds=0.1, max_resumes=10_000)  # the one that had begun is not what this is about

    async def in_a_session() -> list[Generation]:
        async with AsyncClient(service.target, retry=policy, sessions=True) as client:
            calls = (client.generate(prompt(number), max_tokens=LENGTH, ignore_eos=True) for number in (0, 1))
            return await asyncio.gather(*calls)

    with (
        toy_service(tmp_path, "--max-batch-size", "1", **STEP) as service,
        Client(service.target) as watching,
        Client(service.target, retry=policy, sessions=False) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        first = pool.submit(asyncio.run, in_a_session())
        others = [pool.submit(client.generate, prompt(n), max_tokens=LENGTH, ignore_eos=True) for n in (2, 3)]
        eventually(lambda: watching.stats().gauges.num_requests_waiting == 3)
        service.kill()
        eventually(lambda: len([1 for count in failed.values() if count > policy.max_attempts]) >= 3)
        service.start()
        results = [*first.result(PATIENCE_SECONDS), *(other.result(PATIENCE_SECONDS) for other in others)]
    check(results)
    assert sum(result.resumes > 0 for result in results) <= 1, "three had not begun"
