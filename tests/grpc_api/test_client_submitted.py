"""Submitted requests with both clients: submit, and fetch later, also from another client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.serving import SMILE, SMILE_IDS, Serving, serving, until

from lineclear.client import AsyncClient, Client
from lineclear.client._async.transport import AsyncGrpcTransport
from lineclear.client.testing import FakeTransport
from lineclear.errors import QueueFull, UnknownRequest
from lineclear.scheduler.core.events import FinishReason


def threaded(target: str, work: Callable[[Client], Any]) -> Any:
    """Return the result of `work` with a Client in a thread."""

    def call() -> Any:
        with Client(target, max_attempts=1) as client:
            return work(client)

    return asyncio.to_thread(call)


async def finish(s: Serving, number: int = 1) -> None:
    key = await s.engine.next_request(number)
    s.engine.start(key)
    s.engine.tokens(key, SMILE_IDS)
    s.engine.finish_by(key, FinishReason.LENGTH)


async def test_submit_and_fetch_from_another_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as s, AsyncClient(s.server.address, max_attempts=1) as client:
        submitted = await client.submit("x", temperature=0.0)
        assert repr(submitted) == f"AsyncSubmitted({submitted.request_id!r})"
        assert (await submitted.poll()).state == "waiting"
        waiting = asyncio.ensure_future(submitted.result())
        await finish(s)
        result = await waiting
        assert (result.text, list(result.token_ids)) == (SMILE, SMILE_IDS)
        assert result.usage.completion_tokens == len(SMILE_IDS)
        name = submitted.request_id
        found = await threaded(s.server.address, lambda c: c.submitted(name).result())
        assert found.text == SMILE
        snapshot = await threaded(s.server.address, lambda c: c.submitted(name).poll())
        assert (snapshot.state, snapshot.text, list(snapshot.token_ids)) == ("finished", SMILE, SMILE_IDS)
        assert await threaded(s.server.address, lambda c: c.submitted(name).cancel())
        with pytest.raises(UnknownRequest):
            await submitted.poll()


async def test_retried_submit_finds_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry after a lost response finds the first request, which must not run twice."""

    async with serving(tmp_path) as s, AsyncClient(s.server.address, max_attempts=1) as client:
        real = AsyncGrpcTransport.unary_async
        sent = []

        async def call_twice(self: AsyncGrpcTransport, method: Any, request: Any, **more: Any) -> Any:
            sent.append(request)
            if method.path.endswith("/Submit"):
                await real(self, method, request, **more)
            return await real(self, method, request, **more)

        monkeypatch.setattr(AsyncGrpcTransport, "unary_async", call_twice)
        submitted = await client.submit("x")
        assert submitted.request_id == sent[0].request.request_id
        await until(lambda: len(s.service.streams) == 1)
        assert len(s.engine.submitted) == 1


def test_fake_server_keeps_answers() -> None:
    with Client(transport=FakeTransport({"a": "one two", "b": QueueFull("full")})) as client:
        submitted = client.submit("a")
        assert submitted.result().text == "one two"
        assert submitted.poll().text == "one two"
        with submitted.attach(4) as stream:
            assert "".join(delta.text for delta in stream) == "two"
        assert client.submit("b").poll().state == "failed"
        assert submitted.cancel()
        with pytest.raises(UnknownRequest):
            submitted.result()
