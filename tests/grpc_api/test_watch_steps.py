"""WatchSteps: a real server with a toy worker, and the client library that reads its steps."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
from support.processes import TOKENIZER, Running, endless, starting, until
from support.serving import error_of, serving
from support.time_limits import PATIENCE_SECONDS

from lineclear.client import AdminClient, AsyncAdminClient, AsyncClient, Client, step_rows
from lineclear.errors import TooManyWatchers, Unauthenticated
from lineclear.scheduler.grpc_api.admin_service import watch_interval, watch_steps
from lineclear.scheduler.observe.step_feed import REPLACE_SECONDS, StepFeed
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.v1 import admin_pb2_grpc, steps_pb2
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1.steps_pb2 import StepRecord, WatchStepsResponse

TOKEN = "watcher-0123456789abcdef"
SLOW = {"min_step_seconds": 0.01, "max_step_seconds": 0.01}


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with starting(model, "--admin-listen", f"unix:{tmp_path}/a") as start_scheduler:
        yield start_scheduler


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[AdminClient]:
    with Client(f"unix:{tmp_path}/a") as client:
        yield AdminClient(client)


def read_until(watched: Iterator[WatchStepsResponse], done: Callable[[list[StepRecord]], bool]) -> list[StepRecord]:
    found: list[StepRecord] = []
    with contextlib.closing(watched):  # type: ignore[type-var]
        for entry in watched:
            assert entry.skipped == 0
            found += entry.steps
            if done(found):
                return found
    raise AssertionError("the stream ended")


def test_the_steps_of_an_answer_without_its_content(start: Callable[..., Running], admin: AdminClient) -> None:
    """Each position of prompt and answer is in one row; the request starts and ends once."""
    server = start()
    text, prompt_len = "confidential words", len(TOKENIZER.encode("confidential words"))
    sampling = {"max_tokens": 10, "ignore_eos": True}
    watched = admin.watch_steps(history=100)
    list(server.stub.Generate(pb.GenerateRequest(text=text, request_id="invoice-4711", sampling=sampling)))
    found = read_until(watched, lambda steps: any(1 in step.ended for step in steps))
    rows = [row for step in found for row in step_rows(step)]
    assert [(row.request, row.slot, row.cached_tokens) for row in rows] == [(1, 0, 0)] * len(rows)
    computed = [position for row in rows for position in range(row.start, row.start + row.num_tokens)]
    assert computed == [*range(prompt_len + 9)]
    assert [row.kind for row in rows if row.start >= prompt_len] == ["decode"] * 9
    assert sum(row.samples for row in rows) == 10
    assert [number for step in found for number in step.started] == [1]
    assert [step.step for step in found] == [*range(1, len(found) + 1)]
    assert {step.worker for step in found} == {0}
    assert all(a.planned_at.ToNanoseconds() <= b.planned_at.ToNanoseconds() for a, b in pairwise(found))
    sent = b"".join(step.SerializeToString() for step in found)
    assert not [secret for secret in (b"invoice", b"confidential") if secret in sent]
    # All lists of numbers that the messages have: none is one of tokens.
    assert {field.name for field in steps_pb2.StepRows.DESCRIPTOR.fields} == {
        *("slot", "request", "start", "num_tokens", "cached_tokens", "kind", "samples")
    }


@pytest.fixture(scope="module")
def slow(model: Path) -> Iterator[tuple[Running, AdminClient]]:
    """A server with a request that runs for seconds and places for two watchers."""
    flags = ("--admin-listen", "127.0.0.1:0", "--max-step-watchers", "2")
    with starting(model, *flags) as start_scheduler:
        server = start_scheduler(**SLOW)
        with Client(server.wait_for("listening")["admin_address"]) as client:
            yield server, AdminClient(client)


def test_the_state_shows_queue_slots_and_blocks(start: Callable[..., Running], admin: AdminClient) -> None:
    """The second request copies the full blocks of the first: those are shared."""
    server = start("--max-batch-size", "2", **SLOW)
    request = endless()
    request.token_ids.ids[:] = range(5, 105)
    request.sampling.max_tokens = 400
    calls = []
    for number in range(4):
        calls.append(server.stub.Generate(request))
        if number < 2:
            next(calls[number])

    def is_complete(state: Any) -> bool:
        return state.num_waiting == 2 and len(state.running) == 2 and state.workers[0].blocks_shared > 0

    with contextlib.closing(admin.watch_steps(include_block_map=True)) as watched:
        states = (entry.state for entry in watched if entry.HasField("state"))
        state = next(state for state in states if is_complete(state))
    assert [request.request for request in state.waiting] == [3, 4]
    assert {(request.prompt_tokens, request.max_tokens) for request in state.waiting} == {(100, 400)}
    assert sorted((request.request, request.slot) for request in state.running) == [(1, 0), (2, 1)]
    assert all(100 <= request.position < 500 for request in state.running)
    (worker,) = state.workers
    assert (worker.worker, worker.num_slots, worker.num_running) == (0, 2, 2)
    assert len(worker.block_map) == worker.num_blocks
    assert sum(code > 1 for code in worker.block_map) == worker.blocks_used > 0
    assert worker.block_map.count(3) == worker.blocks_shared
    assert worker.block_map.count(1) == worker.blocks_cached


def test_a_watcher_that_does_not_read_misses_steps_and_delays_nobody(
    start: Callable[..., Running], admin: AdminClient
) -> None:
    server = start("--step-history", "4")
    watched = admin.watch_steps(min_interval_seconds=0.02)
    call = server.stub.Generate(endless())
    next(call)
    first = next(watched)
    assert len([token for response in call for token in response.token_ids]) > 400
    entry = next(watched)
    total = len(first.steps) + first.skipped
    while not entry.steps[-1].ended:
        total += len(entry.steps) + entry.skipped
        entry = next(watched)
    watched.close()
    total += len(entry.steps) + entry.skipped
    assert len(entry.steps) <= 4
    assert total >= 400, "read and skipped steps together are all steps"


def test_the_stream_ends_when_the_server_stops(start: Callable[..., Running], admin: AdminClient) -> None:
    server = start()
    ended = threading.Event()

    def watch() -> None:
        for _ in admin.watch_steps(include_state=True, min_interval_seconds=10.0):
            pass
        ended.set()

    thread = threading.Thread(target=watch)
    thread.start()
    call = server.stub.Generate(endless())
    list(islice(call, 3))
    server.popen.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    thread.join(PATIENCE_SECONDS)
    assert ended.is_set(), "the stream ended with an error"


@pytest.mark.parametrize(("asked", "taken"), [({}, 0.02), ({"seconds": 5}, 5.0), ({"seconds": 3600}, 10.0)])
def test_the_interval_is_bounded(asked: dict[str, int], taken: float) -> None:
    """With none at all a call would ask the engine for its state all the time."""
    assert watch_interval(steps_pb2.WatchStepsRequest(min_interval=asked)) == taken


def test_a_call_of_a_minute_makes_room() -> None:
    now = [100.0]
    feed = StepFeed(StepHistory(8), lambda call: call(), Mock(), 1, lambda: now[0])
    context = Mock(auth_context=dict, write=AsyncMock())

    async def serve() -> None:
        first = asyncio.create_task(watch_steps(feed, steps_pb2.WatchStepsRequest(), context, 5.0))
        await asyncio.sleep(0)
        with pytest.raises(TooManyWatchers):
            feed.watch()
        now[0] += REPLACE_SECONDS
        with feed.watch(), pytest.raises(TooManyWatchers, match="has the place"):
            await asyncio.wait_for(first, PATIENCE_SECONDS)

    asyncio.run(serve())


def test_watchers_are_limited(slow: tuple[Running, AdminClient]) -> None:
    server, admin = slow
    call = server.stub.Generate(endless())
    next(call)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            next(stack.enter_context(contextlib.closing(admin.watch_steps())))
        with pytest.raises(TooManyWatchers):
            next(admin.watch_steps())

    def is_free() -> bool:
        with contextlib.suppress(TooManyWatchers), contextlib.closing(admin.watch_steps(history=1)) as watched:
            return bool(next(watched))
        return False

    until(is_free)


def test_watching_needs_the_admin_token(start: Callable[..., Running], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"operator {TOKEN}\n")
    tokens.chmod(0o400)
    server = start("--admin-token-file", str(tokens), **SLOW)
    call = server.stub.Generate(endless())
    list(islice(call, 20))
    with Client(f"unix:{tmp_path}/a") as client, pytest.raises(Unauthenticated):
        next(AdminClient(client).watch_steps())
    with (
        Client(f"unix:{tmp_path}/a", token=TOKEN) as client,
        contextlib.closing(AdminClient(client).watch_steps(history=3)) as watched,
    ):
        assert next(watched).steps[0].number > 10
        tokens.chmod(0o600)
        tokens.write_text("operator another-0123456789abcdef\n")
        with pytest.raises(Unauthenticated, match="no longer valid"):
            for _ in watched:
                pass


async def test_asyncio_clients_watch_too(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_listen=f"unix:{tmp_path}/a") as s:
        async with AsyncClient(s.server.admin_address) as client:
            admin = AsyncAdminClient(client)
            async with contextlib.aclosing(admin.watch_steps(include_state=True)) as watched:
                entry = await anext(watched)
                assert entry.HasField("state")
                assert not entry.state.workers
                assert s.operations.steps.num_watchers == 1
            await admin.flush_prefix_cache()
            assert s.operations.calls == ["flush"]
        stub: Any = admin_pb2_grpc.AdminServiceStub(grpc.aio.insecure_channel(s.server.admin_address))
        request = steps_pb2.WatchStepsRequest()
        request.min_interval.seconds = -1
        error = await error_of(stub.WatchSteps(request))
        assert (error.reason, [v.field for v in error.violations]) == ("INVALID_REQUEST", ["min_interval"])
