"""The request that the engine gets for a call: prompt, parameters, seed, deadline and stop tokens."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
from google.protobuf.duration_pb2 import Duration
from support.answers import answered, engine_request, invalid_fields
from support.serving import (
    EOS,
    HELLO,
    HELLO_IDS,
    TOKENIZER,
    Serving,
    error_of,
    read_all,
    serving,
    text_of,
    text_request,
    tokens_of,
)
from support.session_driver import Caller

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

CHAT = pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi<|im_end|>")]))


async def test_prompts_of_every_kind(s: Serving) -> None:
    for text in ("a <|im_end|>", "quick brown fox " * 6):
        assert list((await engine_request(s, text_request(text))).prompt) == TOKENIZER.encode(text)
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 0, 511]))
    assert (await engine_request(s, ids)).prompt == (5, 0, 511)
    sealed = TOKENIZER.seal("<|im_start|>") + "user\nhi<|im_end|>" + TOKENIZER.seal("<|im_end|>") + "\n"
    assert list((await engine_request(s, CHAT)).prompt) == TOKENIZER.encode_sealed(sealed)


async def test_lists_and_lengths_reach_the_engine_unchanged(s: Serving) -> None:
    params = sampling_pb2.SamplingParams(
        logit_bias=[sampling_pb2.LogitBias(token_id=511, bias=-100.0)],
        allowed_token_ids=[1, 2, 3],
        banned_token_ids=[3],
        seed=9,
        min_tokens=2,
        max_tokens=3,
    )
    request = await engine_request(s, text_request(sampling=params, priority=255))
    sampling = request.sampling
    assert sampling.logit_bias == ((511, -100.0),)
    assert (sampling.allowed_ids, sampling.banned_ids) == ((1, 2, 3), (3,))
    assert (sampling.seed, sampling.min_tokens, request.max_tokens, request.priority) == (9, 2, 3, 255)


async def test_defaults_of_request_precede_model_and_schema(tmp_path: Path) -> None:
    config = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 3.0, "repetition_penalty": True}
    async with serving(tmp_path, model_defaults=config) as s:
        request = await engine_request(s, text_request(sampling={"temperature": 0.0}))
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.25, 7)
        assert (sampling.stop_ids, request.max_tokens) == ((EOS,), 128 - len(TOKENIZER.encode("quick")))
        sampling = (await engine_request(s, text_request(sampling={"top_k": 0, "seed": 0}))).sampling
        assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 0, 0)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.0, 1.0)  # out of bounds or not a number: ignored
    async with serving(tmp_path, model_defaults=config, use_generation_config=False) as s:
        assert (await engine_request(s)).sampling.temperature == 1.0


async def test_seeds_are_random_and_returned(s: Serving) -> None:
    seeds = [(await answered(s, []))[0].started.seed for _ in range(2)]
    assert seeds == [request.sampling.seed for request in s.engine.submitted]
    assert seeds[0] != seeds[1]


async def test_deadline_is_the_calls_on_the_monotonic_clock(tmp_path: Path) -> None:
    async with serving(tmp_path, default_deadline_seconds=50.0) as s:
        s.engine.answer = lambda request: []
        started_at = monotonic()
        await read_all(s.generate(timeout=1000.0))
        await read_all(s.generate())
        end = monotonic()
        explicit, default = (request.deadline or 0.0 for request in s.engine.submitted)
        assert started_at + 990 < explicit <= end + 1011  # gRPC rounds timeouts up by up to one percent
        assert started_at + 50 <= default <= end + 50


async def test_far_deadline_is_reduced_to_the_maximum(tmp_path: Path) -> None:
    """That of the call, and the longest timeout of a message."""
    async with serving(tmp_path, max_deadline_seconds=1000.0) as s:
        s.engine.answer = lambda request: []
        started_at = monotonic()
        await read_all(s.generate(timeout=300 * 86_400.0))
        longest = Duration(seconds=315_576_000_000, nanos=999_999_999)
        await s.stub.Submit(pb.SubmitRequest(request=text_request(), timeout=longest))
        for request in s.engine.submitted:
            assert started_at + 990 < (request.deadline or 0.0) <= monotonic() + 1000


MALFORMED = [(2**62, 0), (-(2**62), 0), (315_576_000_001, 0), (1, 1_000_000_000), (1, -1), (-1, 1), (0, -(2**31))]


@pytest.mark.parametrize(("seconds", "nanos"), MALFORMED)
async def test_invalid_timeout_is_rejected_by_field(s: Serving, seconds: int, nanos: int) -> None:
    timeout = Duration(seconds=seconds, nanos=nanos)
    assert await invalid_fields(s.stub.Submit(pb.SubmitRequest(request=text_request(), timeout=timeout))) == ["timeout"]
    caller = Caller(s)
    submit = pb.SubmitCommand(handle=1, request=text_request(), timeout=timeout)
    await caller.send(pb.SessionRequest(submits=[submit]))
    await caller.until(lambda: caller.failed)
    assert caller.failed[1].violations[0].field == "timeout"
    assert s.engine.submitted == []


@pytest.mark.parametrize("seconds", [0, -1, -315_576_000_000])
async def test_passed_timeout_is_deadline_exceeded(s: Serving, seconds: int) -> None:
    await s.stub.Submit(pb.SubmitRequest(request=text_request(), timeout=Duration(seconds=seconds)))
    (request,) = s.engine.submitted
    assert request.deadline is not None
    assert request.deadline <= monotonic()  # the core fails it in its next step


async def test_ignore_eos_keeps_the_requests_stop_tokens(s: Serving) -> None:
    request = await engine_request(s, text_request(sampling={"ignore_eos": True}, stop={"token_ids": [9]}))
    assert (request.eos_ids, request.sampling.stop_ids) == (frozenset(), (9,))


async def test_own_eos_tokens_replace_the_models(s: Serving) -> None:
    own = text_request(stop={"token_ids": [7], "eos_token_ids": [9]})
    responses = await answered(s, [HELLO_IDS[0], EOS, 9], own)
    request = s.engine.submitted[0]
    assert (request.eos_ids, request.stop_ids, request.sampling.stop_ids) == ({9}, {7}, (7, 9))
    finished = responses[-1].finished
    assert (finished.finish_reason, finished.matched_token_id) == (pb.FINISH_REASON_STOP_EOS, 9)
    assert (tokens_of(responses), text_of(responses)) == ([HELLO_IDS[0], EOS, 9], "He")


@pytest.mark.parametrize(("asked", "found"), [(None, 0), (3, 3), (1000, 9)])
async def test_expected_tokens_are_at_most_max_tokens(s: Serving, asked: int | None, found: int) -> None:
    request = text_request(expected_tokens=asked, sampling={"max_tokens": 9})
    assert (await engine_request(s, request)).expected_tokens == found


async def test_resumed_answer_is_expected_to_grow(s: Serving) -> None:
    resume = pb.Resume(token_ids=[5, 6, 7], model_fingerprint=HELLO.model_fingerprint)
    greedy = {"max_tokens": 9, "temperature": 0.0}
    await answered(s, [5, 6, 7, 8], text_request(expected_tokens=2, sampling=greedy, resume=resume), 3)
    assert s.engine.submitted[0].expected_tokens == 4


async def test_prompt_is_truncated_from_the_left(s: Serving) -> None:
    async def prompt(request: pb.GenerateRequest, count: int) -> list[int]:
        request.truncate_prompt_tokens = count
        return list((await engine_request(s, request)).prompt)

    whole = TOKENIZER.encode("The quick brown fox")
    for count in (1, 3, len(whole), 100):
        assert await prompt(text_request("The quick brown fox"), count) == whole[-count:]
    long = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[i % 500 for i in range(1000)]))  # beyond the context
    assert await prompt(long, 9) == list(range(491, 500))
    assert len(await prompt(pb.GenerateRequest(chat=CHAT.chat), 2)) == 2
    long.truncate_prompt_tokens = 500
    assert (await error_of(s.generate(long))).reason == "PROMPT_TOO_LONG"


@pytest.mark.parametrize(("method", "found"), [("prompt_lookup", [6, 0, 4, 6]), ("none", [0, 0, 0, 0])])
async def test_drafts_are_limited_by_the_server_and_the_request(tmp_path: Path, method: str, found: list[int]) -> None:
    async with serving(tmp_path, speculative_method=method, num_speculative_tokens=6) as s:
        requests = [text_request(num_speculative_tokens=most) for most in (None, 0, 4, 1000)]
        assert [(await engine_request(s, request)).max_drafts for request in requests] == found
