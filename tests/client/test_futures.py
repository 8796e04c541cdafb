"""`submit_future` of both clients: results, errors, cancelling, closing, interrupts and the threads in use."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from support.service import wait_for
from support.time_limits import PATIENCE_SECONDS
from support.toy_service import answer, toy_service

from lineclear.client import AnswerFuture, AsyncClient, Client
from lineclear.client.futures import MAX_OPEN_FUTURES
from lineclear.client.testing import Answer, FakeTransport
from lineclear.errors import ConnectionLost, DeadlineExceeded, PromptTooLong, QueueFull

SLOW = Answer("never", delay_seconds=3600.0)


def test_future_has_the_answer(server: Any) -> None:
    with Client(server.target) as client:
        future = client.submit_future("one two", request_id="mine")
        assert isinstance(future, concurrent.futures.Future)
        assert (future.result(PATIENCE_SECONDS).text, future.exception(), future.done()) == ("one two", None, True)
        assert server.requests[-1].request_id == future.request_id == "mine"
        unnamed = client.submit_future("x")
        unnamed.result(PATIENCE_SECONDS)
        assert server.requests[-1].request_id == unnamed.request_id != ""


async def test_task_has_the_answer(server: Any) -> None:
    async with AsyncClient(server.target) as client:
        future = client.submit_future("one two", request_id="mine")
        assert asyncio.isfuture(future)
        assert future.request_id == "mine"
        done, _ = await asyncio.wait([future, client.submit_future("three")])
        assert {task.result().text for task in done} == {"one two", "three"}


def test_futures_of_a_session_need_one_thread(tmp_path: Path) -> None:
    """The first request is a call of its own, the others share the Session."""
    prompts = [[5, 6, 7 + n] for n in range(100)]
    with toy_service(tmp_path) as service, Client(service.target) as client:
        futures = [client.submit_future(prompt, max_tokens=200, seed=3, ignore_eos=True) for prompt in prompts]
        seen = set[tuple[str, ...]]()
        while not any(future.done() for future in futures):
            names = (thread.name for thread in threading.enumerate())
            seen.add(tuple(sorted(name for name in names if name.startswith("lineclear-"))))
        assert concurrent.futures.wait(futures, PATIENCE_SECONDS).not_done == set()
        assert max(seen, key=len) == ("lineclear-future", "lineclear-futures", "lineclear-session")
        assert [list(f.result().token_ids) for f in futures] == [answer(p, 200, seed=3) for p in prompts]


def test_cancel_frees_the_slot_in_a_session(tmp_path: Path) -> None:
    steps = {"min_step_seconds": 0.005, "max_step_seconds": 0.005}
    with toy_service(tmp_path, **steps) as service, Client(service.target) as client:
        futures = [client.submit_future([5, n], max_tokens=500, seed=3, ignore_eos=True) for n in range(4)]
        wait_for(lambda: client.stats().gauges.num_requests_running == 4, "all run", PATIENCE_SECONDS)
        for future in futures:
            assert future.cancel()
        wait_for(lambda: client.stats().counters.requests_cancelled == 4, "all cancelled", PATIENCE_SECONDS)


def test_deadline_of_a_future_in_a_session(tmp_path: Path) -> None:
    """The Session has no deadline, so the loop keeps that of each request."""
    with toy_service(tmp_path) as service, Client(service.target, max_attempts=1) as client:
        futures = [client.submit_future([5, n], max_tokens=500, ignore_eos=True, timeout_seconds=2) for n in range(3)]
        os.kill(service.pid, signal.SIGSTOP)  # so that it keeps no deadline
        try:
            for future in futures:
                assert isinstance(future.exception(PATIENCE_SECONDS), DeadlineExceeded)
        finally:
            os.kill(service.pid, signal.SIGCONT)


def test_as_completed_and_done_callbacks() -> None:
    called: list[Any] = []
    with Client(transport=FakeTransport(lambda request: request.text)) as client:
        futures = {client.submit_future(str(n)): str(n) for n in range(20)}
        for future in concurrent.futures.as_completed(futures, PATIENCE_SECONDS):
            assert future.result().text == futures[future]
        done = next(iter(futures))
        done.add_done_callback(called.append)
    assert called == [done]


def test_exception_is_that_of_the_request() -> None:
    with Client(transport=FakeTransport(PromptTooLong("too long"))) as client:
        assert isinstance(client.submit_future("x").exception(PATIENCE_SECONDS), PromptTooLong)
        with pytest.raises(TypeError, match="no such parameter"):
            client.submit_future("x", temprature=1)


def test_future_is_retried_and_resumed_as_any_answer() -> None:
    replies = [QueueFull("full", retry_after_seconds=0.0), Answer(pieces=("a", "b"), error=ConnectionLost("cut"))]
    seen: list[int] = []
    fake = FakeTransport(replies)
    with Client(transport=fake) as client:
        answer = client.submit_future("x", on_token=seen.append).result(PATIENCE_SECONDS)
    assert (answer.text, answer.resumes, bytes(seen), len(fake.requests)) == ("ab", 1, b"ab", 3)


def test_deadline_of_a_future() -> None:
    with Client(transport=FakeTransport(SLOW)) as client, pytest.raises(DeadlineExceeded):
        client.submit_future("x", timeout_seconds=0.02).result(PATIENCE_SECONDS)


def running(client: Client) -> AnswerFuture:
    """Return a future whose answer has begun."""
    began = threading.Event()
    future = client.submit_future("x", on_delta=lambda _: began.set())
    assert began.wait(PATIENCE_SECONDS)
    return future


def test_cancel_cancels_the_request() -> None:
    fake = FakeTransport(SLOW)
    with Client(transport=fake) as client:
        future = running(client)
        assert future.cancel()
        wait_for(lambda: fake.cancelled == 1, "the call is cancelled", PATIENCE_SECONDS)
        assert future.cancelled()
        assert concurrent.futures.wait([future], PATIENCE_SECONDS).done == {future}
        with pytest.raises(concurrent.futures.CancelledError):
            future.result()


def test_cancel_before_the_start_sends_nothing() -> None:
    fake = FakeTransport(SLOW)
    with Client(transport=fake) as client:
        for _ in range(50):
            future = client.submit_future("x")
            assert future.cancel()
            assert concurrent.futures.wait([future], PATIENCE_SECONDS).done == {future}
    assert fake.cancelled == len(fake.requests)


def test_cancel_after_the_end_is_false() -> None:
    with Client(transport=FakeTransport("ok")) as client:
        future = client.submit_future("x")
        future.result(PATIENCE_SECONDS)
        assert not future.cancel()


async def test_cancelled_task_cancels_the_request() -> None:
    fake = FakeTransport(SLOW)
    began = asyncio.Event()
    async with AsyncClient(transport=fake) as client:
        future = client.submit_future("x", on_delta=lambda _: began.set())
        await began.wait()
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future
        assert fake.cancelled == 1


def test_close_cancels_every_future() -> None:
    fake = FakeTransport(SLOW)
    client = Client(transport=fake)
    futures = [running(client), client.submit_future("y")]
    client.close()
    assert [future.cancelled() for future in futures] == [True, True]
    assert "lineclear-futures" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="closed"):
        client.submit_future("x")
    client.close()


async def test_close_cancels_every_task() -> None:
    fake = FakeTransport(SLOW)
    async with AsyncClient(transport=fake) as client:
        future = client.submit_future("x")
        await asyncio.sleep(0)
    assert future.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_close_in_a_done_callback() -> None:
    closed = threading.Event()
    client = Client(transport=FakeTransport("ok"))

    def close(future: Any) -> None:
        client.close()
        closed.set()

    client.submit_future("x").add_done_callback(close)
    assert closed.wait(PATIENCE_SECONDS)


def test_exception_of_a_callback_is_that_of_its_future_only() -> None:
    def callback(token_id: int) -> None:
        raise KeyError(token_id)

    with Client(transport=FakeTransport("ok")) as client:
        bad, good = client.submit_future("x", on_token=callback), client.submit_future("y")
        assert isinstance(bad.exception(PATIENCE_SECONDS), KeyError)
        assert good.result(PATIENCE_SECONDS).text == "ok"


def test_open_requests_are_bounded() -> None:
    """The rest waits in the client, and follows when a place is free."""
    began = threading.Semaphore(0)
    fake = FakeTransport(SLOW)
    with Client(transport=fake) as client:
        futures = [client.submit_future("x", on_delta=lambda _: began.release()) for _ in range(MAX_OPEN_FUTURES + 10)]
        for _ in range(MAX_OPEN_FUTURES):
            assert began.acquire(timeout=PATIENCE_SECONDS)
        assert len(fake.requests) == MAX_OPEN_FUTURES
        futures[0].cancel()
        assert began.acquire(timeout=PATIENCE_SECONDS)
        assert len(fake.requests) == MAX_OPEN_FUTURES + 1


def test_ctrl_c_interrupts_the_wait_for_a_future() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Client(transport=FakeTransport([SLOW, "ok"])) as client:
            future = running(client)
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                future.result(PATIENCE_SECONDS)
            assert client.submit_future("y").result(PATIENCE_SECONDS).text == "ok"
            assert not future.done()
    finally:
        signal.signal(signal.SIGINT, before)
