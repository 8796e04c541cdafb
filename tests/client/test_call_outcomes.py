"""How the calls of both clients end: left, cancelled, late, failed, cut off, closed, or made again."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from client.conftest import finished, started, tokens
from support.blackhole import BlackHole
from support.time_limits import PATIENCE_SECONDS

from lineclear import errors
from lineclear.client import AsyncClient, Client, RetryPolicy
from lineclear.errors import QueueFull, Unreachable, Violation
from lineclear.v1 import inference_pb2 as pb


def test_leaving_the_block_cancels_the_call(server: Any, client: Any) -> None:
    server.hold()
    reached: list[bool] = []
    client.after_block = lambda: reached.append(server.ended.wait(PATIENCE_SECONDS))
    deltas, _ = client.read("x", take=2)
    assert (len(deltas), reached) == (2, [True])


def test_cancelling_from_another_thread_ends_the_loop(server: Any) -> None:
    server.hold()
    with Client(server.target) as client, client.stream("x") as stream:
        assert [next(stream).text, next(stream).text] == ["", "a"]
        thread = threading.Thread(target=stream.cancel)
        thread.start()
        with pytest.raises(errors.Cancelled):
            next(stream)
        thread.join()
        with pytest.raises(StopIteration):
            next(stream)
        assert server.ended.wait(PATIENCE_SECONDS)


async def test_cancelling_from_another_task_ends_the_loop(server: Any) -> None:
    server.hold()
    async with AsyncClient(server.target) as client, client.stream("x") as stream:
        assert [(await anext(stream)).text, (await anext(stream)).text] == ["", "a"]
        asyncio.get_running_loop().call_soon(stream.cancel)
        with pytest.raises(errors.Cancelled):
            await anext(stream)
        assert await asyncio.to_thread(server.ended.wait, PATIENCE_SECONDS)


async def test_cancelled_task_cancels_its_call(server: Any) -> None:
    server.hold()
    begun = asyncio.Event()
    async with AsyncClient(server.target) as client:

        async def read() -> None:
            async with client.stream("x") as stream:
                await anext(stream)
                begun.set()
                async for _ in stream:
                    pass

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.ended.wait, PATIENCE_SECONDS)


def test_cancelling_during_a_pause_between_attempts_ends_the_pause(server: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=3600.0)] * 2
    with Client(server.target, timeout_seconds=None) as client, client.stream("x") as stream:
        threading.Timer(0.05, stream.cancel).start()
        with pytest.raises(errors.Cancelled):
            next(stream)

    async def run() -> None:
        async with AsyncClient(server.target, timeout_seconds=None) as client, client.stream("x") as stream:
            asyncio.get_running_loop().call_later(0.05, stream.cancel)
            with pytest.raises(errors.Cancelled):
                await anext(stream)

    asyncio.run(run())
    assert len(server.requests) == 2  # neither was asked again


def test_deadline_during_the_answer(server: Any, client: Any) -> None:
    server.hold()
    with pytest.raises(errors.DeadlineExceeded, match="before the answer was complete"):
        client.generate("x", timeout_seconds=0.3)


def test_error_keeps_its_class_and_fields(server: Any, client: Any) -> None:
    violations = [Violation("sampling.top_p", "is above 1")]
    sent = errors.InvalidRequest("no", retry_after_seconds=1.5, metadata={"limit": "512"}, violations=violations)
    server.failures = [sent]
    with pytest.raises(errors.InvalidRequest, match=r"^no$") as caught:
        client.generate("x")
    got = caught.value
    assert (got.retry_after_seconds, got.metadata, got.violations) == (1.5, {"limit": "512"}, sent.violations)


def test_an_error_after_some_tokens_is_raised_after_them(server: Any, client: Any) -> None:
    server.play([tokens(0, 1, text="a"), errors.NonFiniteLogits("gone")])
    with pytest.raises(errors.NonFiniteLogits, match="gone"):
        client.with_settings(max_attempts=5).generate("x")
    assert len(server.requests) == 1  # half an answer is never asked for again


def test_unknown_status_keeps_its_code(server: Any, client: Any) -> None:
    server.play([(grpc.StatusCode.PERMISSION_DENIED, "no token")])
    with pytest.raises(errors.UnknownStatus, match="no token") as caught:
        client.generate("x")
    assert caught.value.code == "PERMISSION_DENIED"


def test_no_server_is_unreachable(tmp_path: Path, client: Any) -> None:
    client.target = f"unix:{tmp_path}/nobody"
    for call in (client.generate, client.tokenize, client.health):
        with pytest.raises(Unreachable, match="no answer from unix:"):
            call("x")


class LateNetwork(BlackHole):
    """Its port is open from the start, but it accepts connections a second late, like a busy machine."""

    def run(self) -> None:
        time.sleep(1.0)
        super().run()


def test_server_that_accepts_late_is_reached(server: Any, client: Any) -> None:
    with LateNetwork(server.target) as network:
        client.target = network.target
        assert client.generate("one two").text == "one two"


def test_server_that_starts_late_is_reached(tmp_path: Path, server: Any, client: Any) -> None:
    address = f"unix:{tmp_path}/late"
    late: list[Any] = []
    timer = threading.Timer(0.1, lambda: late.append(type(server)(address)))
    timer.start()
    client.target = address
    policy = RetryPolicy(max_attempts=200, first_pause_seconds=0.05, max_pause_seconds=0.1)
    assert client.with_settings(max_attempts=None, retry=policy).generate("a b").text == "a b"
    timer.join()
    late[0].stop()


def test_server_crash_during_an_answer_is_unreachable(server: Any, client: Any) -> None:
    server.play([started(), server.stop_soon])
    with pytest.raises(Unreachable):
        client.generate("x")


@pytest.mark.parametrize("how", ["status", "connection"])
@pytest.mark.parametrize("call", ["generate", "attach"])
def test_answer_is_complete_without_its_status(server: Any, client: Any, how: str, call: str) -> None:
    """Between the last message and the trailers."""
    cut = (grpc.StatusCode.UNAVAILABLE, "Socket closed") if how == "status" else server.stop_soon
    answer = [started(), tokens(0, 1, 2, text="all of it"), finished(2), cut]
    server.play(answer, [errors.InternalError("nothing is requested again")])
    client = client.with_settings(max_attempts=4)
    if call == "generate":
        found = client.generate("x")
    else:
        server.submitted["kept"] = pb.GenerateRequest(text="x")
        found = client.run(lambda client: client.submitted("kept").result())
    assert (found.text, found.finish_reason, found.resumes) == ("all of it", "length", 0)


def test_call_cancelled_by_the_server_is_retried(server: Any, client: Any) -> None:
    stopping = (grpc.StatusCode.CANCELLED, "stopping")  # as a server does that is being stopped
    server.play([stopping], [stopping], [finished(0)])
    with pytest.raises(Unreachable, match="it ended the call"):
        client.generate("x")
    client.with_settings(max_attempts=2).generate("x")
    assert len(server.requests) == 3


def test_close_cancels_running_calls(server: Any) -> None:
    server.hold()
    client = Client(server.target)
    with client.stream("x") as stream:
        assert [next(stream).text, next(stream).text] == ["", "a"]
        threading.Thread(target=client.close).start()
        with pytest.raises(errors.Cancelled):
            next(stream)
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.generate("x")


async def test_async_close_cancels_running_calls(server: Any) -> None:
    server.hold()
    client = AsyncClient(server.target)
    async with client.stream("x") as stream:
        assert [(await anext(stream)).text, (await anext(stream)).text] == ["", "a"]
        closing = asyncio.create_task(client.close())
        with pytest.raises(errors.Cancelled):
            await anext(stream)
        await closing
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.generate("x")


def test_async_client_belongs_to_one_event_loop(server: Any) -> None:
    client = AsyncClient(server.target)
    assert asyncio.run(client.generate("a b")).text == "a b"
    with pytest.raises(RuntimeError, match="event loop of its first call"):
        asyncio.run(client.generate("a b"))


QUICK = RetryPolicy(max_attempts=3, first_pause_seconds=0.01, max_pause_seconds=0.02)
FULL = QueueFull("full", retry_after_seconds=0.01)


@pytest.mark.parametrize(
    ("failures", "attempts", "num_requests"),
    [([FULL] * 2, 3, 3), ([FULL] * 3, 3, 3), ([FULL], 1, 1), ([errors.InvalidRequest("no")], 3, 1)],
)
def test_call_is_retried(server: Any, client: Any, failures: list[Any], attempts: int, num_requests: int) -> None:
    """As often as the policy allows. test_retry.py has the errors after which a call is retried."""
    server.failures = list(failures)
    patient = client.with_settings(max_attempts=None, retry=replace(QUICK, max_attempts=attempts))
    if len(failures) < num_requests:
        assert patient.generate("a b").text == "a b"
    else:
        with pytest.raises(type(failures[-1])):
            patient.generate("a b")
    assert len(server.requests) == num_requests


def test_later_attempts_have_the_remaining_time(server: Any, client: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=0.5)]
    client.with_settings(max_attempts=2).generate("x", timeout_seconds=10)  # longer ones travel in coarser steps
    first, second = server.remaining_seconds
    assert second <= first - 0.4
