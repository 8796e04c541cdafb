"""Large requests and responses leave the event loop free: slices, and pauses as long as the last work took."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator

import pytest
from support.serving import Serving, text_request, until

from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.grpc_api.error_interceptor import _serializer
from lineclear.scheduler.requests import logprob_messages, prompt_requests
from lineclear.scheduler.requests.logprob_messages import encoded_score
from lineclear.scheduler.requests.loop_pacer import LoopPacer
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Scores


def scores(count: int, num_top: int) -> Scores:
    logprobs = tuple(-float(i) for i in range(count))
    top = range(count * num_top)
    return Scores(logprobs, tuple(top), tuple(-float(i) for i in top))


class Clock:
    """Time that passes only by work and sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        monkeypatch.setattr("lineclear.scheduler.requests.loop_pacer.asyncio.sleep", self.sleep)

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds


@pytest.mark.parametrize("num_top", [0, 20])
async def test_no_slice_has_many_entries(monkeypatch: pytest.MonkeyPatch, num_top: int) -> None:
    made = [0]  # entries since the loop was free
    largest = 0
    make = logprob_messages.token_logprobs

    def counted(rows: list[Scores]) -> list[pb.TokenLogprobs]:
        nonlocal largest
        entries = make(rows)
        made[0] += sum(1 + len(entry.top_logprobs) for entry in entries)
        largest = max(largest, made[0])
        return entries

    async def free() -> None:
        while True:
            made[0] = 0
            await asyncio.sleep(0)

    monkeypatch.setattr(logprob_messages, "token_logprobs", counted)
    ticker = asyncio.ensure_future(free())
    rows = [scores(90, num_top), scores(1, num_top), scores(2000, num_top)]
    encoded = await encoded_score([7, 8], rows, LoopPacer(time.monotonic))
    ticker.cancel()
    total = sum(logprob for row in rows for logprob in row.logprobs)
    score = pb.ContinuationScore(token_ids=[7, 8], logprobs=make(rows), total_logprob=total)
    assert pb.ScoreResponse.FromString(encoded) == pb.ScoreResponse(scores=[score])
    assert largest <= 512


async def test_the_loop_is_free_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many responses are made at once."""
    clock = Clock(monkeypatch)
    busy = 0.0

    class Pacer(LoopPacer):
        async def wait(self) -> None:
            await super().wait()
            assert clock.now - 100.0 >= 2 * busy

        @contextlib.contextmanager
        def measured(self) -> Iterator[None]:
            nonlocal busy
            with super().measured():
                yield
                clock.now += 1.0
                busy += 1.0

    pacer = Pacer(clock)
    await asyncio.gather(*(encoded_score([7], [scores(2000, 20)], pacer) for _ in range(4)))
    assert busy == 4 * math.ceil(2000 / (512 // 21))


async def test_prompt_logprobs_are_encoded_step_by_step(s: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a long prompt are short where streams run beside it."""
    made: list[int] = []
    make = logprob_messages.token_logprobs

    def counted(rows: list[Scores]) -> list[pb.TokenLogprobs]:
        made.append(sum(len(row.logprobs) for row in rows))
        return make(rows)

    monkeypatch.setattr(logprob_messages, "token_logprobs", counted)
    call, key = await s.start_call(text_request(output={"prompt_logprobs": 2}))
    steps = [scores(count, 2) for count in (100, 7, 300)]
    for first, step in zip((0, 100, 107), steps, strict=True):
        s.engine.scored(key, first, step)
    await until(lambda: made == [100, 7, 300])
    s.engine.tokens(key, [5])
    s.engine.tokens(key, [6])
    s.engine.finish_by(key, FinishReason.LENGTH)
    messages = [message async for message in call]
    having = [message for message in messages if message.prompt_logprobs]
    assert [(message.first_index, message.token_ids[:1]) for message in having] == [(0, [5])]
    assert list(having[0].prompt_logprobs) == make(steps)
    assert made == [100, 7, 300]


def test_an_encoded_response_is_sent_as_it_is() -> None:
    assert _serializer(pb.ScoreResponse.SerializeToString)(b"encoded") == b"encoded"


async def test_the_loop_is_free_between_texts() -> None:
    """Short texts are tokenized on the event loop: 128 of them take it 13 ms."""
    done = [0]
    most = 0

    async def encode(text: str) -> list[int]:
        nonlocal most
        done[0] += 1
        most = max(most, done[0])
        return [len(text)]

    async def free() -> None:
        while True:
            done[0] = 0
            await asyncio.sleep(0)

    ticker = asyncio.ensure_future(free())
    entries = [pb.Continuation(text="a" * (1 + number)) for number in range(128)]
    assert [list(await prompt_requests.tokens_of(entry, encode)) for entry in entries] == [[n + 1] for n in range(128)]
    ticker.cancel()
    assert most == 1


async def test_pause_equals_the_time_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = LoopPacer(clock)

    async def large(seconds: float) -> None:
        await pace.wait()
        with pace.measured():
            clock.now += seconds

    await asyncio.gather(large(0.004), large(0.001), large(0.002))
    assert clock.slept == [0.0, 0.004, 0.001]


@pytest.mark.parametrize("fails", [False, True], ids=["", "failed"])
def test_short_work_does_not_shorten_a_pause(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    clock = Clock(monkeypatch)
    pace = LoopPacer(clock)
    with contextlib.suppress(ValueError), pace.measured():
        clock.now += 0.5
        if fails:
            raise ValueError
    with pace.measured():
        clock.now += 0.01
    asyncio.run(pace.wait())
    assert clock.slept == [0.49]


async def test_large_tokenize_inputs_are_paced(s: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    original = s.service.pacer.wait

    async def wait() -> None:
        waits.append(None)
        await original()

    monkeypatch.setattr(s.service.pacer, "wait", wait)
    await s.stub.Tokenize(pb.TokenizeRequest(text="a"))
    assert not waits
    await s.stub.Tokenize(pb.TokenizeRequest(text="a" * 5000))
    assert len(waits) == 1
