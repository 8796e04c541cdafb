"""Score and Embed when a worker, the scheduler or the caller fails: real processes and sockets, toy workers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
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
    if run is embed:
        vectors = (struct.unpack("<2f", expected_vector(x, POOLING)) for x in embed_arguments(number)[0])
        return str(tuple(vectors))
    whole = ([*prompt(number), *continuation] for continuation in CONTINUATIONS)
    first = len(prompt(number)) - 1
    return [[x.logprobs[0] for x in expected_scores(tokens, first, 0, VOCABULARY)] for tokens in whole]


both = pytest.mark.parametrize("run", [score, embed], ids=["score", "embed"])
ONCE = RetryPolicy(max_attempts=1)
CALLS: tuple[tuple[Run, int], ...] = (score, 20), (embed, 21)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyService]:
    with toy_service(tmp_path_factory.mktemp("toy"), *SMALL_STEPS, **SLOW) as service:
        yield service


def working(client: Client, steps: int = 2) -> None:
    """Wait for so many more steps."""
    before = client.stats().counters.steps
    wait_for(lambda: client.stats().counters.steps >= before + steps, "some steps")


def begin(pool: Executor, client: Client, calls: Iterable[tuple[Run, int]] = CALLS) -> list[Future[Any]]:
    """Return the answers of calls of which some steps have been computed."""
    found = [pool.submit(run, client, number) for run, number in calls]
    working(client)
    return found


def check(found: list[Future[Any]], calls: Iterable[tuple[Run, int]] = CALLS) -> None:
    assert [answer.result() for answer in found] == [right(run, number) for run, number in calls]


def test_work_of_a_killed_worker_is_done_again(tmp_path: Path) -> None:
    calls = [(run, number) for number in range(20, 24) for run in (score, embed)]
    with (
        toy_service(tmp_path, *SMALL_STEPS, "--num-workers", "2", **SLOW) as service,
        Client(service.target, retry=ONCE) as client,
        ThreadPoolExecutor(len(calls)) as pool,
    ):
        found = begin(pool, client, calls)
        for _ in range(3):
            working(client, 8)
            wait_for(lambda: client.stats().gauges.num_requests_running > 0, "running requests")
            signal_worker(lambda: client.stats().worker.pid)
        check(found, calls)
        assert client.stats().worker.joins > 2
        wait_for(lambda: is_idle(client.stats()), "all blocks free")


@both
async def test_a_call_that_is_cancelled_ends_its_work(service: ToyService, run: Run) -> None:
    with Client(service.target) as client:
        before = client.stats().counters.requests_cancelled
        async with AsyncClient(service.target) as other:
            call = other.score(*score_arguments(22)) if run is score else other.embed(*embed_arguments(23), **EMBED)
            task = asyncio.create_task(call)
            await asyncio.to_thread(working, client)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        wait_for(lambda: is_idle(client.stats()), "the end of the work")
        assert client.stats().counters.requests_cancelled > before
        assert run(client, 21) == right(run, 21)


@both
def test_a_deadline_ends_all_parts(service: ToyService, run: Run) -> None:
    with Client(service.target) as client:
        with pytest.raises(DeadlineExceeded):
            run(client, 24 if run is score else 25, timeout_seconds=0.1)
        wait_for(lambda: is_idle(client.stats()), "the end of the work")
        assert run(client, 21) == right(run, 21)


def test_a_full_queue_refuses_the_whole_call(tmp_path: Path) -> None:
    flags = "--max-queue-size", "2", "--max-batch-size", "1"
    with toy_service(tmp_path, *flags) as service, Client(service.target, retry=ONCE) as client:
        for run, number in CALLS:  # of three parts
            with pytest.raises(QueueFull) as caught:
                run(client, number)
            assert caught.value.retry_after_seconds is not None
            wait_for(lambda: is_idle(client.stats()), "no place of the refused call stays taken")
            assert len(client.embed([[1], [2]]).vectors) == 2


def wait_for_refusal(call: Callable[[], Any]) -> ServerDraining:
    """Call until the server drains; return its error."""
    while True:
        try:
            call()
        except ServerDraining as error:
            return error


def test_a_drain_lets_the_call_finish(tmp_path: Path) -> None:
    with (
        toy_service(tmp_path, *SMALL_STEPS, "--drain-linger-seconds", "2", **SLOW) as service,
        Client(service.target, retry=ONCE) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        found = begin(pool, client)
        stopped = pool.submit(service.stop)
        refused = [
            wait_for_refusal(lambda: client.embed([[1]], timeout_seconds=60)),
            wait_for_refusal(lambda: client.score([1], [[2]], timeout_seconds=60)),
        ]
        assert all(error.retry_after_seconds is not None for error in refused)
        check(found)
        assert stopped.result() == 0


def test_the_end_of_the_drain_time_interrupts_the_call(tmp_path: Path) -> None:
    with (
        toy_service(tmp_path, "--target-batch-tokens", "1", "--drain-timeout-seconds", "0.1", **SLOW) as service,
        Client(service.target, retry=ONCE) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        found = begin(pool, client)
        assert service.stop() == 0
        for answer in found:
            error = answer.exception()
            assert isinstance(error, ShutdownInterrupted)
            assert error.retry_after_seconds is not None


def test_the_client_repeats_the_call_on_the_next_scheduler(tmp_path: Path) -> None:
    flags = *SMALL_STEPS, "--drain-timeout-seconds", "0.1"
    with (
        toy_service(tmp_path, *flags, **SLOW) as service,
        Client(service.target) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        for end, number in ((service.kill, 20), (service.stop, 22)):
            calls = (score, number), (embed, number + 1)
            found = begin(pool, client, calls)
            end()
            assert not any(answer.done() for answer in found)
            service.start()
            check(found, calls)
