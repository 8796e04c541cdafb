"""Mailboxes: whatever the engine says and whenever the caller reads, each token comes once and there is one end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.serving import TOKENIZER
from support.events import told
from support.time_limits import PATIENCE_SECONDS

from lineclear.errors import Cancelled, DeadlineExceeded, DuplicateRequest, InternalError, LineclearError
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
from lineclear.scheduler.requests.output_stream import OutputChunk, OutputRouter, OutputStream
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.scheduler.text.stop_strings import StopStrings
from lineclear.wire.messages import Logprobs

RECORD = RequestStats(0.0, 3)


class Engine:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def cancel(self, request_id: str, error: LineclearError | None = None) -> None:
        self.told.append(("cancel", request_id))

    def finish(self, request_id: str, num_tokens: int) -> None:
        self.told.append(("finish", request_id, num_tokens))


def streams(max_unread_tokens: int = 100) -> tuple[OutputRouter, Engine, list[bool]]:
    engine, workers = Engine(), list[bool]()
    return (
        OutputRouter(engine, max_unread_tokens, 2**20, workers.append, lambda error: InternalError(str(error))),
        engine,
        workers,
    )


async def taken(mailbox: OutputStream) -> OutputChunk:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await mailbox.read()


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
    inbox, engine, _ = streams()
    mailbox = inbox.open("r", None, wants_times=True)
    events: list[Event] = [Admitted(mailbox.engine_id), Started(mailbox.engine_id, 1, 2, 0)]
    count = 0
    for size in chunks:
        if size == 0:
            events.append(Preempted(mailbox.engine_id))
            continue
        logprobs = tuple(Logprobs(-float(n)) for n in range(count, count + size)) if asks_logprobs else ()
        events.append(told(mailbox.engine_id, count, tuple(range(count, count + size)), logprobs))
        count += size
    error = DeadlineExceeded("late")
    last = (
        Failed(mailbox.engine_id, error, RECORD)
        if fails
        else Finished(mailbox.engine_id, FinishReason.LENGTH, None, RECORD)
    )
    tokens: list[int] = []
    logprobs_seen: list[float] = []
    num_starts = 0

    async def read() -> bool:
        nonlocal num_starts
        delivery = await taken(mailbox)
        assert delivery.first_index == len(tokens)
        tokens.extend(delivery.token_ids)
        logprobs_seen.extend(entry.logprob for entry in delivery.logprobs)
        assert len(delivery.times) == len(delivery.token_ids)
        num_starts += delivery.started is not None
        return delivery.end is not None

    for event, is_read in zip(events, reads, strict=False):
        inbox.dispatch([event], 1.0)
        if is_read and isinstance(event, StepTokens | Started):
            assert not await read()
    inbox.dispatch([last], 1.0)
    if fails:
        while len(tokens) < count:
            assert not await read()
        with pytest.raises(DeadlineExceeded):
            await read()
    else:
        while not await read():
            pass
    assert tokens == list(range(count))
    assert logprobs_seen == ([-float(n) for n in range(count)] if asks_logprobs else [])
    assert num_starts == 1 or (fails and count == 0)
    inbox.close(mailbox)
    assert engine.told == []
    assert (len(inbox), inbox.num_waiting) == (0, 0)


async def test_what_comes_after_the_end_changes_nothing() -> None:
    inbox, _, _ = streams()
    mailbox = inbox.open("r", None)
    inbox.dispatch([Failed(mailbox.engine_id, Cancelled("first"), RECORD)], 0.0)
    mailbox.fail(InternalError("second"))
    inbox.dispatch([told(mailbox.engine_id, 0, (1,))], 0.0)
    inbox.dispatch([Finished(mailbox.engine_id, FinishReason.LENGTH, None, RECORD)], 0.0)
    for _ in range(2):
        with pytest.raises(Cancelled, match="first"):
            await taken(mailbox)


async def test_a_complete_answer_stays_complete_whatever_happens_then() -> None:
    """A stop string was found; that the deadline passes before the engine hears of it changes nothing."""

    inbox, engine, _ = streams()
    mailbox = inbox.open("r", AnswerText(TOKENIZER, stops=StopStrings(["lo"])))
    ids = TOKENIZER.encode_sealed("Hello, how")
    inbox.dispatch([told(mailbox.engine_id, 0, tuple(ids))], 0.0)
    assert engine.told[0][0] == "finish"
    used = engine.told[0][2]
    inbox.dispatch([told(mailbox.engine_id, len(ids), (5,))], 0.0)  # made meanwhile
    inbox.dispatch([Failed(mailbox.engine_id, DeadlineExceeded("late"), RECORD)], 0.0)
    delivery = await taken(mailbox)
    assert list(delivery.token_ids) == ids[:used]
    assert delivery.text == "Hel"
    assert delivery.end is not None
    assert delivery.end.reason is FinishReason.STOP_STRING
    assert delivery.end.completion_tokens == used


async def test_a_stop_string_wakes_the_reader_before_the_engine_agrees() -> None:
    inbox, _, _ = streams()
    mailbox = inbox.open("r", AnswerText(TOKENIZER, stops=StopStrings(["Hello"])))
    waiting = asyncio.create_task(taken(mailbox))
    await asyncio.sleep(0)
    inbox.dispatch([told(mailbox.engine_id, 0, tuple(TOKENIZER.encode_sealed("Hello")))], 0.0)
    delivery = await waiting
    assert delivery.token_ids
    assert delivery.end is None


async def test_unread_tokens_are_bounded_and_forgotten_when_there_are_too_many() -> None:
    inbox, engine, _ = streams(max_unread_tokens=4)
    mailbox = inbox.open("r", None)
    inbox.dispatch([told(mailbox.engine_id, 0, (1, 2, 3, 4))], 0.0)
    assert engine.told == []
    inbox.dispatch([told(mailbox.engine_id, 4, (5,))], 0.0)
    assert engine.told == [("cancel", mailbox.engine_id)]
    inbox.dispatch([told(mailbox.engine_id, 5, (6,))], 0.0)  # made before the engine heard
    with pytest.raises(LineclearError, match="5 tokens are unread") as caught:
        await taken(mailbox)
    assert caught.value.reason == "SLOW_CONSUMER"


async def test_a_label_is_taken_until_its_reader_is_done() -> None:
    inbox, engine, _ = streams()
    first = inbox.open("same", None)
    with pytest.raises(DuplicateRequest):
        inbox.open("same", None)
    inbox.close(first)
    assert engine.told == [("cancel", first.engine_id)]
    second = inbox.open("same", None)
    assert second.engine_id != first.engine_id
    inbox.dispatch([Failed(first.engine_id, Cancelled("first"), RECORD)], 0.0)
    inbox.dispatch([Started(second.engine_id, 0, 1, 0)], 0.0)
    assert (await taken(second)).started is not None


async def test_a_gap_is_a_bug_and_not_sent() -> None:
    inbox, _, _ = streams()
    mailbox = inbox.open("r", None)
    with pytest.raises(AssertionError, match="gap"):
        inbox.dispatch([told(mailbox.engine_id, 1, (5,))], 0.0)


async def test_how_many_wait() -> None:
    inbox, _, workers = streams()
    boxes = [inbox.open(str(n), None) for n in range(3)]
    assert inbox.num_waiting == 3
    inbox.dispatch([Started(boxes[0].engine_id, 0, 1, 0), WorkerLost(1), WorkerJoined(2)], 0.0)
    assert (inbox.num_waiting, workers) == (2, [False, True])
    inbox.close(boxes[0])
    inbox.close(boxes[1])
    assert inbox.num_waiting == 1
    idle = asyncio.create_task(inbox.wait_until_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    inbox.close(boxes[2])
    await asyncio.wait_for(idle, 5)
    assert inbox.num_waiting == 0
