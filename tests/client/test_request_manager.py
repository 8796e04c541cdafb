"""`manager()` of both clients: the next finished result, handlers, cancelling and closing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest
from support.time_limits import PATIENCE_SECONDS

from lineclear.client import AsyncClient, Client, Generation
from lineclear.client.testing import Answer, FakeTransport
from lineclear.errors import Cancelled, DuplicateRequest, PromptTooLong
from lineclear.v1 import inference_pb2 as pb

SLOW = Answer("never", delay_seconds=3600.0)


def reply(request: pb.GenerateRequest) -> Any:
    """Answer "slow" never and "bad" with an error, anything else at once."""
    return {"slow": SLOW, "bad": PromptTooLong("too long")}.get(request.text, request.text)


def kinds(results: list[tuple[str, Any]]) -> dict[str, str]:
    return {request_id: type(outcome).__name__ for request_id, outcome in results}


def test_results_as_they_finish() -> None:
    with Client(transport=FakeTransport(reply)) as client, client.manager() as manager:
        for name, prompt in (("s", "slow"), ("b", "bad"), ("a", "x y")):
            assert manager.add_request(prompt, request_id=name) == name
        found = [manager.get_result(timeout_seconds=PATIENCE_SECONDS) for _ in range(2)]
        assert kinds([result for result in found if result is not None]) == {"b": "PromptTooLong", "a": "Generation"}
        assert manager.get_result(timeout_seconds=0.01) is None
        assert manager.cancel_request("s")
        assert kinds(list(manager)) == {"s": "Cancelled"}
        assert manager.get_result() is None
        assert not manager.cancel_request("s")


async def test_results_as_they_finish_in_a_loop() -> None:
    async with AsyncClient(transport=FakeTransport(reply)) as client, client.manager() as manager:
        for name, prompt in (("s", "slow"), ("b", "bad"), ("a", "x y")):
            assert manager.add_request(prompt, request_id=name) == name
        found = [await manager.get_result(timeout_seconds=PATIENCE_SECONDS) for _ in range(2)]
        assert kinds([result for result in found if result is not None]) == {"b": "PromptTooLong", "a": "Generation"}
        assert await manager.get_result(timeout_seconds=0.01) is None
        assert manager.cancel_request("s")
        assert kinds([result async for result in manager]) == {"s": "Cancelled"}
        assert await manager.get_result() is None


def test_requests_added_together() -> None:
    with Client(transport=FakeTransport(reply)) as client, client.manager() as manager:
        names = manager.add_requests(["a", "b", "c"], max_tokens=7)
        assert {name: getattr(outcome, "text", "") for name, outcome in manager} == dict(zip(names, "abc", strict=True))


async def test_requests_added_together_in_a_loop() -> None:
    async with AsyncClient(transport=FakeTransport(reply)) as client, client.manager() as manager:
        names = manager.add_requests(["a", "b", "c"])
        assert sorted([name async for name, _ in manager]) == sorted(names)


def test_result_of_one_request() -> None:
    with Client(transport=FakeTransport(reply)) as client, client.manager() as manager:
        first, second = manager.add_request("x"), manager.add_request("y")
        for name, text in ((second, "y"), (first, "x")):
            result = manager.get_result(name)
            assert result is not None
            assert isinstance(result[1], Generation)
            assert (result[0], result[1].text) == (name, text)
        assert manager.get_result(first) is None  # read already
        assert manager.get_result("unknown") is None


def test_request_added_during_the_wait() -> None:
    with Client(transport=FakeTransport(reply)) as client, client.manager() as manager:
        threading.Timer(0.05, manager.add_request, ["x"]).start()
        result = manager.get_result(timeout_seconds=PATIENCE_SECONDS)
        assert result is not None


def test_each_result_is_for_one_reader() -> None:
    names: list[str] = []
    with Client(transport=FakeTransport(reply)) as client, client.manager() as manager:
        wanted = [manager.add_request(str(n)) for n in range(200)]
        readers = [threading.Thread(target=lambda: names.extend(name for name, _ in manager)) for _ in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(PATIENCE_SECONDS)
    assert sorted(names) == sorted(wanted)


def test_id_in_use() -> None:
    with Client(transport=FakeTransport(reply)) as client, client.manager() as manager:
        manager.add_request("slow", request_id="a")
        with pytest.raises(DuplicateRequest):
            manager.add_request("x", request_id="a")
        manager.cancel_request("a")
        assert kinds(list(manager)) == {"a": "Cancelled"}
        assert manager.add_request("x", request_id="a") == "a"


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_handler_gets_the_results(kind: str) -> None:
    handled: list[tuple[str, Any]] = []

    async def scenario() -> None:
        async with AsyncClient(transport=FakeTransport(reply)) as client, client.manager() as manager:
            manager.register_result_handler(lambda name, outcome: handled.append((name, outcome)))
            manager.add_request("x", request_id="a")
            manager.add_request("bad", request_id="b")
            assert await manager.get_result() is None

    if kind == "asyncio":
        asyncio.run(scenario())
    else:
        with Client(transport=FakeTransport(reply)) as client, client.manager() as manager:
            manager.register_result_handler(lambda name, outcome: handled.append((name, outcome)))
            manager.add_request("x", request_id="a")
            manager.add_request("bad", request_id="b")
            assert manager.get_result() is None
    assert kinds(handled) == {"a": "Generation", "b": "PromptTooLong"}


def test_result_of_a_failed_handler_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    def handler(name: str, outcome: Any) -> None:
        raise KeyError(name)

    with Client(transport=FakeTransport(reply)) as client, client.manager() as manager:
        manager.register_result_handler(handler)
        name = manager.add_request("x")
        assert kinds(list(manager)) == {name: "Generation"}
    assert "the result handler failed" in caplog.text


def test_exception_of_a_callback_is_raised_to_the_reader() -> None:
    def callback(token_id: int) -> None:
        raise KeyError(token_id)

    with Client(transport=FakeTransport(reply)) as client, client.manager() as manager:
        manager.add_request("x", on_token=callback)
        with pytest.raises(KeyError):
            manager.get_result()
        assert manager.get_result() is None


def test_close_cancels_open_requests_and_keeps_results() -> None:
    with Client(transport=FakeTransport(reply)) as client:
        with client.manager() as manager:
            manager.add_request("slow", request_id="s")
            manager.add_request("x", request_id="a")
            result = manager.get_result()
        assert result is not None
        assert kinds(list(manager)) == {"s": "Cancelled"}
        with pytest.raises(RuntimeError, match="closed"):
            manager.add_request("x")
        assert client.generate("y").text == "y"


def test_closed_client_ends_a_wait() -> None:
    client = Client(transport=FakeTransport(reply))
    manager = client.manager()
    name = manager.add_request("slow")
    threading.Timer(0.05, client.close).start()
    result = manager.get_result()
    assert result is not None
    assert kinds([result]) == {name: "Cancelled"}
    assert isinstance(result[1], Cancelled)


def test_ctrl_c_ends_a_wait_and_takes_no_result() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Client(transport=FakeTransport(reply)) as client, client.manager() as manager:
            name = manager.add_request("slow")
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                manager.get_result()
            manager.cancel_request(name)
            assert kinds(list(manager)) == {name: "Cancelled"}
    finally:
        signal.signal(signal.SIGINT, before)
