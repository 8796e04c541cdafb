"""Output streams and their router: every token is read once, and every stream has one end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.events import step_tokens
from support.serving import TOKENIZER
from support.time_limits import PATIENCE_SECONDS

from lineclear.errors import Cancelled, DeadlineExceeded, InternalError, LineclearError
from lineclear.scheduler.core.events import (
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Preempted,
    RequestStats,
    Started,
    StepTokens,
    WorkerJoined,
    WorkerLost,
)
from lineclear.scheduler.engine.engine_stats import TokenRate
from lineclear.scheduler.requests.output_router import OutputRouter
from lineclear.scheduler.requests.output_stream import TOKEN_BYTES, Completion, OutputChunk, OutputStream
from lineclear.scheduler.requests.tenant_limits import QueueLimiter
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.scheduler.text.stop_strings import StopStrings
from lineclear.wire.messages import Logprobs

RECORD = RequestStats(0.0, 3)
CLOSED = Cancelled("closed")


class Engine:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def cancel(self, request_id: str, error: LineclearError | None = None) -> None:
        self.calls.append(("cancel", request_id))

    def finish(self, request_id: str, num_tokens: int) -> None:
        self.calls.append(("finish", request_id, num_tokens))


def new_router(max_unread_tokens: int = 100) -> tuple[OutputRouter, Engine, list[bool]]:
    engine, workers = Engine(), list[bool]()
    incident, rate = (lambda error: InternalError(str(error))), TokenRate(0.0)
    router = OutputRouter(engine, max_unread_tokens, workers.append, incident, rate, lambda: 0.0)
    return router, engine, workers


def open_stream(router: OutputRouter, text: AnswerText | None = None, **options: Any) -> OutputStream:
    place = QueueLimiter(SchedulerSettings(), lambda: 0.0).reserve("")
    return router.open("r", text, place, **options)


async def read(stream: OutputStream) -> OutputChunk:
    ready = asyncio.Event()
    stream.subscribe(ready.set)
    async with asyncio.timeout(PATIENCE_SECONDS):
        if not stream.has_output:
            await ready.wait()
    return stream.read_nowait()


@settings(max_examples=300, deadline=None)
@given(
    chunks=st.lists(st.integers(0, 4), max_size=8),
    reads=st.lists(st.booleans(), min_size=11, max_size=11),
    fails=st.booleans(),
    asks_logprobs=st.booleans(),
)
async def test_every_token_once_and_one_end(
    chunks: list[int], reads: list[bool], fails: bool, asks_logprobs: bool
) -> None:
    router, engine, _ = new_router()
    stream = open_stream(router, wants_times=True)
    events: list[Event] = [Admitted(stream.engine_id), Started(stream.engine_id, 1, 2, 0)]
    count = 0
    for size in chunks:
        if size == 0:
            events.append(Preempted(stream.engine_id))
            continue
        logprobs = tuple(Logprobs(-float(n)) for n in range(count, count + size)) if asks_logprobs else ()
        events.append(step_tokens(stream.engine_id, count, tuple(range(count, count + size)), logprobs))
        count += size
    error = DeadlineExceeded("late")
    last = (
        Failed(stream.engine_id, error, RECORD)
        if fails
        else Finished(stream.engine_id, FinishReason.LENGTH, None, RECORD)
    )
    tokens: list[int] = []
    logprobs_seen: list[float] = []
    num_starts = 0

    async def read_next() -> bool:
        nonlocal num_starts
        chunk = await read(stream)
        assert chunk.first_index == len(tokens)
        tokens.extend(chunk.token_ids)
        logprobs_seen.extend(entry.logprob for entry in chunk.logprobs)
        assert len(chunk.times) == len(chunk.token_ids)
        num_starts += chunk.started is not None
        assert chunk.error is (error if fails and chunk.error else None)
        return bool(chunk.end or chunk.error)

    for event, is_read in zip(events, reads, strict=False):
        router.dispatch([event], 1.0)
        if is_read and isinstance(event, StepTokens | Started):
            assert not await read_next()
    router.dispatch([last], 1.0)
    while not await read_next():
        pass
    assert tokens == list(range(count))
    assert logprobs_seen == ([-float(n) for n in range(count)] if asks_logprobs else [])
    assert num_starts == 1 or (fails and count == 0)
    router.close(stream, CLOSED)
    assert engine.calls == []
    assert len(router) == 0


async def test_events_after_the_end_change_nothing() -> None:
    router, _, _ = new_router()
    stream = open_stream(router)
    router.dispatch([Failed(stream.engine_id, Cancelled("first"), RECORD)], 0.0)
    stream.cancel(InternalError("second"))
    router.dispatch([step_tokens(stream.engine_id, 0, (1,))], 0.0)
    router.dispatch([Finished(stream.engine_id, FinishReason.LENGTH, None, RECORD)], 0.0)
    for _ in range(2):
        assert str((await read(stream)).error) == "first"


async def test_complete_answer_stays_complete() -> None:
    """The deadline passes between the stop string and the engine's end of the request."""

    router, engine, _ = new_router()
    stream = open_stream(router, AnswerText(TOKENIZER, stops=StopStrings(["lo"])))
    ids = TOKENIZER.encode_sealed("Hello, how")
    router.dispatch([step_tokens(stream.engine_id, 0, tuple(ids))], 0.0)
    assert engine.calls[0][0] == "finish"
    used = engine.calls[0][2]
    router.dispatch(
        [step_tokens(stream.engine_id, len(ids), (5,))], 0.0
    )  # computed before the engine processed the end
    router.dispatch([Failed(stream.engine_id, DeadlineExceeded("late"), RECORD)], 0.0)
    chunk = await read(stream)
    assert list(chunk.token_ids) == ids[:used]
    assert "".join(chunk.texts) == "Hel"
    assert chunk.end is not None
    assert chunk.end.reason is FinishReason.STOP_STRING
    assert chunk.end.completion_tokens == used


async def test_delivered_output_ends_with_its_last_part() -> None:
    router, _, _ = new_router()
    stream = open_stream(router)
    started, end = Started(stream.engine_id, 0, 1, 0), Completion(FinishReason.LENGTH, None, None, 9, RECORD)
    stream.deliver(OutputChunk(0, list(range(9)), [], started=started, end=end))
    parts = [stream.read_nowait(4 * TOKEN_BYTES) for _ in range(3)]
    assert [part.token_ids for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [part.started for part in parts] == [started, None, None]
    assert [part.end for part in parts] == [None, None, end]


async def test_stop_string_wakes_the_reader_at_once() -> None:
    router, _, _ = new_router()
    stream = open_stream(router, AnswerText(TOKENIZER, stops=StopStrings(["Hello"])))
    waiting = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    router.dispatch([step_tokens(stream.engine_id, 0, tuple(TOKENIZER.encode_sealed("Hello")))], 0.0)
    chunk = await waiting
    assert chunk.token_ids
    assert chunk.end is None


async def test_cancel_stops_the_engine_once_and_keeps_unread_tokens() -> None:
    router, engine, _ = new_router()
    stream = open_stream(router)
    router.dispatch([step_tokens(stream.engine_id, 0, (1, 2))], 0.0)
    stream.cancel(Cancelled("by the client"))
    assert engine.calls == [("cancel", stream.engine_id)]
    assert list((await read(stream)).token_ids) == [1, 2]
    assert str((await read(stream)).error) == "by the client"
    router.close(stream, CLOSED)
    assert engine.calls == [("cancel", stream.engine_id)]


async def test_token_gap_is_an_assertion() -> None:
    router, _, _ = new_router()
    stream = open_stream(router)
    with pytest.raises(AssertionError, match="gap"):
        router.dispatch([step_tokens(stream.engine_id, 1, (5,))], 0.0)


async def test_queue_place_is_released_at_the_start_or_the_end() -> None:
    router, _, workers = new_router()
    quota = QueueLimiter(SchedulerSettings(), lambda: 0.0)
    streams = [router.open(str(n), None, quota.reserve("")) for n in range(3)]
    assert len(quota) == 3
    router.dispatch([Started(streams[0].engine_id, 0, 1, 0), WorkerLost(1), WorkerJoined(2)], 0.0)
    assert (len(quota), workers) == (2, [False, True])
    router.close(streams[0], CLOSED)
    router.close(streams[1], CLOSED)
    assert len(quota) == 1
    idle = asyncio.create_task(router.wait_until_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    router.close(streams[2], CLOSED)
    await asyncio.wait_for(idle, 5)
    assert len(quota) == 0
