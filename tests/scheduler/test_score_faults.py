"""Score and Embed when a worker, the scheduler or the caller fails: real processes and sockets, toy workers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.service import is_idle, wait_for
from support.toy import expected_scores, expected_vector
from support.toy_service import VOCABULARY, ToyService, toy_service
from support.worker_kills import signal_worker

from lineclear.client import AsyncClient, Client
from lineclear.client.retry import RetryPolicy
from lineclear.errors import DeadlineExceeded, QueueFull, ServerDraining, ShutdownInterrupted
from lineclear.wire.messages import Pooling, PoolingKind

SLOW = {"min_step_seconds": 0.02, "max_step_seconds": 0.02, "num_blocks": 512}
SMALL_STEPS = "--target-batch-tokens", "16"
CONTINUATIONS = [[5, 6], [7], [8, 9, 10]]
POOLING = Pooling(PoolingKind.MEAN, 2, normalize=False)
NUM_PARTS = 3

Run = Callable[..., Any]


def prompt(number: int) -> list[int]:
    """Return a prompt that shares no block with that of another number."""
    return [number, *range(1, 150)]


def score_arguments(number: int) -> tuple[Any, ...]:
    return prompt(number), CONTINUATIONS


def embed_arguments(number: int) -> tuple[Any, ...]:
    return ([prompt(number), prompt(number)[:50], [number]],)


EMBED: dict[str, Any] = {"pooling": "mean", "dimensions": 2, "normalize": False}


def score(client: Client, number: int, **params: Any) -> Any:
    found = client.score(*score_arguments(number), **params)
    return [[x.logprob for x in entry.logprobs] for entry in found.scores]


def embed(client: Client, number: int, **params: Any) -> Any:
    return str(client.embed(*embed_arguments(number), **EMBED, **params).vectors)


def right(run: Run, number: int) -> Any:
    """Return what `run` must return."""
    if run is embed:
        vectors = (struct.unpack("<2f", expected_vector(x, POOLING)) for x in embed_arguments(number)[0])
        return str(tuple(vectors))
    whole = ([*prompt(number), *continuation] for continuation in CONTINUATIONS)
    first = len(prompt(number)) - 1
    return [[x.logprobs[0] for x in expected_scores(tokens, first, 0, VOCABULARY)] for tokens in whole]


both = pytest.mark.parametrize("run", [score, embed], ids=["score", "embed"])


def working(client: Client, steps: int = 2) -> None:
    wait_for(lambda: client.stats().counters.steps >= steps, "some steps")


@pytest.mark.parametrize("num_workers", [1, 2])
def test_work_of_a_killed_worker_is_done_again(tmp_path: Path, num_workers: int) -> None:
    calls = [(run, number) for number in range(20, 24) for run in (score, embed)]
    with (
        toy_service(tmp_path, *SMALL_STEPS, "--num-workers", str(num_workers), **SLOW) as service,
        Client(service.target, retry=RetryPolicy(max_attempts=1)) as client,
        ThreadPoolExecutor(len(calls)) as pool,
    ):
        found = [pool.submit(run, client, number) for run, number in calls]
        for kill in range(1, 4):
            working(client, 8 * kill)
            wait_for(lambda: client.stats().gauges.num_requests_running > 0, "running requests")
            signal_worker(lambda: client.stats().worker.pid)
        assert [x.result() for x in found] == [right(*call) for call in calls]
        assert client.stats().worker.joins > num_workers
        wait_for(lambda: is_idle(client.stats()), "all blocks free")


@both
async def test_a_call_that_is_cancelled_ends_its_work(tmp_path: Path, run: Run) -> None:
    with toy_service(tmp_path, *SMALL_STEPS, **SLOW) as service, Client(service.target) as client:
        async with AsyncClient(service.target) as other:
            call = other.score(*score_arguments(20)) if run is score else other.embed(*embed_arguments(20), **EMBED)
            task = asyncio.create_task(call)
            await asyncio.to_thread(working, client)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        wait_for(lambda: is_idle(client.stats()), "the end of the work")
        assert client.stats().counters.requests_cancelled > 0
        assert run(client, 21) == right(run, 21)


@both
def test_a_deadline_ends_all_parts(tmp_path: Path, run: Run) -> None:
    with toy_service(tmp_path, *SMALL_STEPS, **SLOW) as service, Client(service.target) as client:
        with pytest.raises(DeadlineExceeded):
            run(client, 20, timeout_seconds=0.1)
        wait_for(lambda: is_idle(client.stats()), "the end of the work")
        assert run(client, 21) == right(run, 21)


@both
def test_a_full_queue_refuses_the_whole_call(tmp_path: Path, run: Run) -> None:
    flags = "--max-queue-size", str(NUM_PARTS - 1), "--max-batch-size", "1"
    with toy_service(tmp_path, *flags) as service, Client(service.target) as client:
        with pytest.raises(QueueFull) as caught, Client(service.target, retry=RetryPolicy(max_attempts=1)) as once:
            run(once, 20)
        assert caught.value.retry_after_seconds is not None
        wait_for(lambda: is_idle(client.stats()), "no place of the refused call stays taken")
        assert len(client.embed([[1], [2]]).vectors) == NUM_PARTS - 1


def wait_for_refusal(call: Callable[[], Any]) -> ServerDraining:
    """Call until the server drains; return its error."""
    while True:
        try:
            call()
        except ServerDraining as error:
            return error


@both
def test_a_drain_lets_the_call_finish(tmp_path: Path, run: Run) -> None:
    with (
        toy_service(tmp_path, *SMALL_STEPS, "--drain-linger-seconds", "5", **SLOW) as service,
        Client(service.target, retry=RetryPolicy(max_attempts=1)) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        found = pool.submit(run, client, 20)
        working(client)
        stopped = pool.submit(service.stop)
        refused = wait_for_refusal(lambda: run(client, 21, timeout_seconds=60))
        assert refused.retry_after_seconds is not None
        assert found.result() == right(run, 20)
        assert stopped.result() == 0


@both
def test_the_end_of_the_drain_time_interrupts_the_call(tmp_path: Path, run: Run) -> None:
    with (
        toy_service(tmp_path, "--target-batch-tokens", "1", "--drain-timeout-seconds", "0.1", **SLOW) as service,
        Client(service.target, retry=RetryPolicy(max_attempts=1)) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        found = pool.submit(run, client, 20)
        working(client)
        assert service.stop() == 0
        error = found.exception()
        assert isinstance(error, ShutdownInterrupted)
        assert error.retry_after_seconds is not None


@both
@pytest.mark.parametrize("end", [ToyService.kill, ToyService.stop], ids=["killed", "stopped"])
def test_the_client_repeats_the_call_on_the_next_scheduler(
    tmp_path: Path, run: Run, end: Callable[[ToyService], Any]
) -> None:
    with (
        toy_service(tmp_path, *SMALL_STEPS, "--drain-timeout-seconds", "0.1", **SLOW) as service,
        Client(service.target) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        found = pool.submit(run, client, 20)
        working(client)
        end(service)
        assert not found.done()
        service.start()
        assert found.result() == right(run, 20)
