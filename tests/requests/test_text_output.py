"""Contents of an answer: tokens, text, logprobs and times, and its end."""

from __future__ import annotations

from math import inf
from typing import Any

import grpc
import grpc.aio
import pytest
from support.answers import answered
from support.serving import EOS, HELLO, HELLO_IDS, TOKENIZER, Serving, read_all, text_of, text_request, tokens_of

from lineclear.model_files.fingerprint import prompt_digest
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.text.detokenizer import decode
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Logprobs


async def test_complete_answer(s: Serving) -> None:
    call, key = await s.start_call(
        text_request("The quick", request_id="mine", sampling={"seed": 2**64 - 1}), cached_tokens=2
    )
    started = await call.read()
    assert started.started == pb.Started(
        request_id="mine",
        prompt_tokens=len(TOKENIZER.encode("The quick")),
        cached_tokens=2,
        seed=2**64 - 1,
        slot=3,
        first_step=12,
        model_fingerprint=HELLO.model_fingerprint,
        prompt_digest=prompt_digest(TOKENIZER.encode("The quick")),
        timeout={"seconds": 600},
        num_outputs=1,
    )
    assert not started.token_ids
    assert not started.text
    s.engine.tokens(key, HELLO_IDS[:2])
    first = await call.read()
    assert (first.first_index, list(first.token_ids)) == (0, HELLO_IDS[:2])
    s.engine.tokens(key, [*HELLO_IDS[2:], EOS])
    s.engine.finish_by(key, FinishReason.STOP_EOS, EOS)
    rest = []
    while (response := await call.read()) is not grpc.aio.EOF:
        rest.append(response)
    assert first.text + text_of(rest) == "Hello, how are you?"
    finished = rest[-1].finished
    assert finished.finish_reason == pb.FINISH_REASON_STOP_EOS
    assert finished.matched_token_id == EOS
    assert not finished.HasField("matched_stop_string")
    assert finished.usage == pb.Usage(
        prompt_tokens=started.started.prompt_tokens, completion_tokens=len(HELLO_IDS) + 1, cached_tokens=2
    )
    timings = finished.timings
    spans = [
        d.ToNanoseconds()
        for d in (timings.queue_time, timings.time_to_first_token, timings.decode_time, timings.e2e_latency)
    ]
    assert all(span >= 0 for span in spans)
    assert spans[0] <= spans[1] <= spans[3]
    assert await call.code() is grpc.StatusCode.OK
    await s.idle()
    assert s.engine.cancelled == []


async def test_unread_tokens_travel_in_one_message(s: Serving) -> None:
    call, key = await s.start_call()
    for token in HELLO_IDS:  # all before the loop runs once
        s.engine.tokens(key, [token])
    s.engine.finish_by(key, FinishReason.LENGTH)
    responses = await read_all(call)
    assert len(responses) == 1
    assert tokens_of(responses) == HELLO_IDS


async def test_only_requested_fields_are_sent(s: Serving) -> None:
    plain = await answered(s, HELLO_IDS)
    assert text_of(plain) == "Hello, how are you?"
    assert not any(r.logprobs or r.token_times_us for r in plain)
    bare = await answered(s, HELLO_IDS, text_request(output={"omit_text": True}))
    assert (text_of(bare), tokens_of(bare)) == ("", HELLO_IDS)
    timed = await answered(s, HELLO_IDS, text_request(output={"token_timings": True}))
    times = [t for r in timed for t in r.token_times_us]
    assert (len(times), times) == (len(HELLO_IDS), sorted(times))
    assert s.engine.submitted[0].sampling.logprobs == -1


async def test_logprobs_travel_with_their_tokens(s: Serving) -> None:
    """Masked tokens are no candidates: their log-probability is -inf, which is no value of JSON."""
    call, key = await s.start_call(text_request(output={"logprobs": True, "top_logprobs": 2}))
    assert s.engine.requests[key].sampling.logprobs == 2
    top = (((40, -0.5), (9, -2.0)), (), ((40, 0.0), (1, -inf)))
    s.engine.tokens(key, [40, 41, 40], [Logprobs(x, y) for x, y in zip((-0.5, -1.5, 0.0), top, strict=True)])
    s.engine.finish_by(key, FinishReason.LENGTH)
    entries = [entry for r in await read_all(call) for entry in r.logprobs]
    assert [e.logprob for e in entries] == [-0.5, -1.5, 0.0]
    shown = [[(t.token_id, t.logprob) for t in entry.top_logprobs] for entry in entries]
    assert shown == [[(40, -0.5), (9, -2.0)], [], [(40, 0.0)]]


@pytest.mark.parametrize(
    ("ids", "fields", "text"),
    [
        ([*HELLO_IDS, EOS], {}, "Hello, how are you?"),
        ([*HELLO_IDS, EOS], {"output": {"keep_special_tokens": True}}, "Hello, how are you?</s>"),
        (HELLO_IDS, {"stop": {"strings": ["you? And"]}}, "Hello, how are you?"),
        (TOKENIZER.encode_sealed("é😀")[:-1], {}, "é\ufffd"),
    ],
    ids=["special token", "kept special token", "begun stop string", "unfinished character"],
)
async def test_text_at_the_end_of_an_answer(s: Serving, ids: list[int], fields: dict[str, Any], text: str) -> None:
    responses = await answered(s, ids, text_request(**fields))
    assert text_of(responses) == text
    assert responses[-1].finished.finish_reason != pb.FINISH_REASON_STOP_STRING


@pytest.mark.parametrize("omit_text", [False, True])
async def test_stop_string_ends_answer_and_computation(s: Serving, omit_text: bool) -> None:
    call, key = await s.start_call(text_request(stop={"strings": [" are"]}, output={"omit_text": omit_text}))
    for token in HELLO_IDS:  # the engine is ahead of the text
        s.engine.tokens(key, [token])
    responses = await read_all(call)
    assert text_of(responses) == ("" if omit_text else "Hello, how")
    count = s.engine.stopped[0][1]
    assert " are" in decode(TOKENIZER, HELLO_IDS[:count], keep_special=False)
    assert " are" not in decode(TOKENIZER, HELLO_IDS[: count - 1], keep_special=False)
    assert tokens_of(responses) == HELLO_IDS[:count]
    finished = responses[-1].finished
    assert finished.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert finished.matched_stop_string == " are"
    assert finished.usage.completion_tokens == count
    assert s.engine.stopped == [(key, count)]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP_EOS])
async def test_stop_string_wins_over_a_later_engine_end(s: Serving, reason: FinishReason) -> None:
    call, key = await s.start_call(text_request(stop={"strings": ["Hello"], "include_stop_string": True}))
    s.engine.tokens(key, HELLO_IDS)
    s.engine.finish_by(key, reason, EOS)
    responses = await read_all(call)
    assert text_of(responses) == "Hello"
    finished = responses[-1].finished
    assert finished.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert not finished.HasField("matched_token_id")
    assert finished.usage.completion_tokens == len(tokens_of(responses)) < len(HELLO_IDS)
