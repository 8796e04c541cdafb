"""Both clients against the real service: concurrent requests share a session and behave like direct calls."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.serving import SMILE, SMILE_IDS, Serving, serving, until

from lineclear import errors
from lineclear.client import AsyncClient, Client, Generation
from lineclear.client.target import names_one_server
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.core.policies import share_of
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.requests.session import Session
from lineclear.v1 import inference_pb2 as pb

COUNT = 12


class Threaded:
    """A Client with the interface of an AsyncClient: every call runs in a thread."""

    def __init__(self, target: str, **settings: Any) -> None:
        self.client = Client(target, **settings)
        self._threads = ThreadPoolExecutor(2 * COUNT)

    async def generate(self, *args: Any, **params: Any) -> Generation:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(self.client.generate, *args, **params))

    async def cancel(self, request_id: str) -> bool:
        return await asyncio.to_thread(self.client.cancel, request_id)

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)
        self._threads.shutdown(wait=False)


Open = Callable[..., Any]


@pytest.fixture(params=["asyncio", "threads"])
def connect(request: pytest.FixtureRequest) -> Open:
    @contextlib.asynccontextmanager
    async def connect(s: Serving, **settings: Any) -> AsyncIterator[Any]:
        settings = {"max_attempts": 1, **settings}
        kind: Any = AsyncClient if request.param == "asyncio" else Threaded
        client = kind(s.server.address, **settings)
        try:
            yield client
        finally:
            await client.close()

    return connect


async def occupied(s: Serving, client: Any) -> asyncio.Task[Any]:
    """Start a first call that stays open, so that later calls share a session."""
    first = asyncio.ensure_future(client.generate("first", request_id="first"))
    await s.engine.next_request(1)
    return first


async def finish(s: Serving, call: asyncio.Task[Any], number: int = 1, tokens: Sequence[int] = ()) -> Any:
    """Finish the call of the number-th request with these tokens and return its result."""
    key = await s.engine.next_request(number)
    s.engine.start(key)
    s.engine.tokens(key, tokens)
    s.engine.finish_by(key, FinishReason.LENGTH)
    return await call


async def test_concurrent_requests_share_a_session(tmp_path: Path, connect: Open) -> None:
    async with serving(tmp_path) as s, connect(s) as client:
        first = await occupied(s, client)
        assert len(s.manager.sessions) == 0
        tasks = [asyncio.ensure_future(client.generate(f"p{n}", seed=n)) for n in range(COUNT)]
        await s.engine.next_request(1 + COUNT)
        assert len(s.manager.sessions) == 1
        keys = [r.request_id for r in s.engine.submitted[1:]]
        for key in keys:
            s.engine.start(key)
        for token in SMILE_IDS:
            s.engine.step({key: [token] for key in keys})
        for key in keys:
            s.engine.finish_by(key, FinishReason.LENGTH)
        for result in await asyncio.gather(*tasks):
            assert (result.text, list(result.token_ids)) == (SMILE, SMILE_IDS)
            assert result.usage.completion_tokens == len(SMILE_IDS)
            assert result.started.prompt_tokens
        await finish(s, first)
        await s.idle()


async def test_session_requests_behave_like_direct_calls(tmp_path: Path) -> None:
    async with serving(tmp_path) as s, AsyncClient(s.server.address, max_attempts=1) as client:
        first = await occupied(s, client)
        with pytest.raises(errors.InvalidRequest) as wrong:
            await client.generate("x", top_p=7.0)
        assert [v.field for v in wrong.value.violations] == ["sampling.top_p"]
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate("x", timeout_seconds=0.2)
        await until(lambda: len(s.engine.cancelled) == 1)
        failing = asyncio.ensure_future(client.generate("x"))
        key = await s.engine.next_request(3)
        s.engine.start(key)
        s.engine.tokens(key, SMILE_IDS[:2])
        s.engine.fail(key, errors.NonFiniteLogits("nan"))
        with pytest.raises(errors.NonFiniteLogits, match="nan"):
            await failing
        assert len(s.manager.sessions) == 1
        assert not first.done()
        await finish(s, first)


async def test_closing_a_stream_cancels_one_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as s, AsyncClient(s.server.address, max_attempts=1) as client:
        first = await occupied(s, client)
        async with client.stream("x") as closed:
            key = await s.engine.next_request(2)
            s.engine.start(key)
            await anext(closed)
        await until(lambda: s.engine.cancelled == [key])
        other = asyncio.ensure_future(client.generate("y"))
        await finish(s, other, 3)
        await finish(s, first)


async def test_closing_the_client_ends_all(s: Serving) -> None:
    async with AsyncClient(s.server.address, max_attempts=1) as client:
        tasks = [await occupied(s, client)]
        tasks += [asyncio.ensure_future(client.generate("x")) for _ in range(3)]
        await s.engine.next_request(4)
    for call in tasks:
        with pytest.raises(errors.Cancelled):
            await call
    await s.idle()
    await until(lambda: not s.manager.sessions)


async def test_ended_session_resumes_its_answers(tmp_path: Path, connect: Open) -> None:
    """The server drains: interrupted answers are resumed by any call that is still possible."""

    def whole(request: Request) -> list[int]:
        return SMILE_IDS

    async with serving(tmp_path) as s, connect(s, max_attempts=1000) as client:
        first = await occupied(s, client)
        tasks = [asyncio.ensure_future(client.generate(f"p{n}", seed=n)) for n in range(4)]
        await s.engine.next_request(5)
        for request in s.engine.submitted:
            s.engine.start(request.request_id)
            s.engine.tokens(request.request_id, SMILE_IDS[:3])
        await until(lambda: [r.outputs[0].num_received for r in s.manager.requests] == [3] * 5)
        s.engine.answer = whole
        s.manager.fail_all(lambda request: errors.ShutdownInterrupted("gone", retry_after_seconds=0.0))
        for session in list(s.manager.sessions):
            session.drain(errors.ShutdownInterrupted("gone", retry_after_seconds=0.0))
        for result in await asyncio.gather(first, *tasks):
            assert list(result.token_ids) == SMILE_IDS
            assert result.resumes >= 1


async def test_many_requests_travel_in_few_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    run = Session.run

    async def counted(messages: AsyncIterator[pb.SessionRequest]) -> AsyncIterator[pb.SessionRequest]:
        async for message in messages:
            counts.append(len(message.submits))
            yield message

    monkeypatch.setattr(Session, "run", lambda self, messages: run(self, counted(messages)))
    async with serving(tmp_path) as s, AsyncClient(s.server.address, max_attempts=1) as client:
        first = await occupied(s, client)
        tasks = [asyncio.ensure_future(client.generate("x")) for _ in range(COUNT)]
        await s.engine.next_request(1 + COUNT)
        assert counts == [COUNT]
        for call in (first, *tasks):
            call.cancel()


async def test_multiplexing_can_be_disabled(tmp_path: Path) -> None:
    async with serving(tmp_path) as s, AsyncClient(s.server.address, sessions=False) as client:
        first = await occupied(s, client)
        second = asyncio.ensure_future(client.generate("x"))
        await s.engine.next_request(2)
        assert not s.manager.sessions
        for call in (first, second):
            call.cancel()


async def test_calls_with_different_metadata_share_no_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as s, AsyncClient(s.server.address) as client:
        calls = [await occupied(s, client)]
        for number in (1, 2):
            calls.append(asyncio.ensure_future(client.generate("x", metadata=[("x-a", str(number))])))
            await s.engine.next_request(1 + number)
        assert sum(len(session) for session in s.manager.sessions) == 1
        for call in calls:
            call.cancel()


@pytest.mark.parametrize(
    ("target", "is_one"),
    [
        *(("unix:/run/x.sock", True), ("127.0.0.1:50051", True), ("[::1]:1", True), ("localhost:1", True)),
        *(("ipv4:10.0.0.1:50051", False), ("lineclear:50051", False), ("dns:///lineclear.svc:50051", False)),
    ],
)
def test_targets(target: str, is_one: bool) -> None:
    assert names_one_server(target) is is_one


async def test_closed_client_leaves_no_threads(s: Serving) -> None:
    before = {t for t in threading.enumerate() if t.name == "lineclear-session"}
    client = Threaded(s.server.address, max_attempts=1)
    first = await occupied(s, client)
    second = asyncio.ensure_future(client.generate("x"))
    await s.engine.next_request(2)
    await client.close()
    for call in (first, second):
        with pytest.raises(errors.Cancelled):
            await call
    await until(lambda: {t for t in threading.enumerate() if t.name == "lineclear-session"} == before)


async def test_requests_survive_connection_and_session_age(tmp_path: Path) -> None:
    """An answer outlasts its connection's maximum age without an error, and new Sessions are opened."""

    async with (
        serving(tmp_path, max_connection_age_seconds=0.3) as s,
        AsyncClient(s.server.address, max_attempts=4) as client,
    ):
        opened: set[Any] = set()
        first = await occupied(s, client)

        async def generate_repeatedly(number: int) -> None:
            count = 0
            while len(opened) < 4:
                answer = await client.generate("more", request_id=f"r{number}-{count}")
                assert answer.text == SMILE
                opened.update(s.manager.sessions)
                count += 1
                await asyncio.sleep(0.005)

        # This request keeps the first Session open to the end.
        long = asyncio.ensure_future(client.generate("long", request_id="long"))
        await s.engine.next_request(2)
        s.engine.answer = lambda request: SMILE_IDS
        await asyncio.gather(*(generate_repeatedly(number) for number in range(4)))
        assert (await finish(s, long, 2, SMILE_IDS)).text == SMILE
        await finish(s, first)


async def test_too_large_request_fails_alone(tmp_path: Path) -> None:
    """gRPC would end the session with this message, and all requests in it."""

    async with serving(tmp_path) as s, AsyncClient(s.server.address, max_attempts=1) as client:
        first = await occupied(s, client)
        neighbour = asyncio.ensure_future(client.generate("x"))
        await s.engine.next_request(2)
        for size in (200_000, 3_000_000, 5_000_000):
            with pytest.raises(errors.LineclearError) as caught:
                await client.generate("x" * size)
            assert caught.value.reason in ("PROMPT_TOO_LONG", "REQUEST_TOO_LARGE")
        assert re.search(r"the request has 50000\d\d bytes and the limit is \d+;", str(caught.value))
        assert caught.value.metadata["limit"] in str(caught.value)
        assert list((await finish(s, neighbour, 2, SMILE_IDS)).token_ids) == SMILE_IDS
        assert len(s.manager.sessions) == 1
        await finish(s, first)


@pytest.mark.parametrize(("kind", "submitted"), [("sync", True), ("asyncio", False)])
async def test_cancel_by_id_ends_the_request(tmp_path: Path, kind: str, submitted: bool) -> None:
    """The id is enough, whichever client has the request."""
    async with serving(tmp_path) as s, AsyncClient(s.server.address, max_attempts=1) as client:
        if submitted:
            answer = asyncio.ensure_future((await client.submit("x", request_id="mine")).result())
        else:
            answer = asyncio.ensure_future(client.generate("x", request_id="mine"))
        s.engine.start(await s.engine.next_request(1))
        other: Any = Threaded(s.server.address) if kind == "sync" else AsyncClient(s.server.address)
        assert await other.cancel("mine") is True
        with pytest.raises(errors.Cancelled):
            await answer
        if not submitted:  # the end of a submitted request is kept
            assert await other.cancel("mine") is False
        assert await other.cancel("unknown") is False
        await other.close()


async def test_requests_of_a_session_have_their_own_tenant(tmp_path: Path) -> None:
    """The first request is a call of its own, the others share the session."""
    async with (
        serving(tmp_path) as s,
        AsyncClient(s.server.address, max_attempts=1, metadata={"x-tenant-id": "default"}) as client,
    ):
        tenants = ["a", "b", None, "a"]
        calls = []
        for number, tenant in enumerate(tenants):
            own = {} if tenant is None else {"tenant": tenant}
            calls.append(asyncio.ensure_future(client.generate("x", **own)))
            await s.engine.next_request(number + 1)
        assert [request.tenant for request in s.engine.submitted] == [
            share_of(tenant or "default") for tenant in tenants
        ]
        assert len(s.manager.sessions) == 1
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
