"""The request that the engine gets for a call: prompt, parameters, seed, deadline and stop tokens."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import pytest
from google.protobuf.duration_pb2 import Duration
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


async def test_prompts_of_every_kind(s: Serving) -> None:
    s.engine.answer = lambda request: []
    long = "quick brown fox " * 6
    await read_all(s.generate(text_request("a <|im_end|>")))
    await read_all(s.generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 0, 511]))))
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi<|im_end|>")])
    await read_all(s.generate(pb.GenerateRequest(chat=chat)))
    await read_all(s.generate(text_request(long)))
    prompts = [request.prompt for request in s.engine.submitted]
    assert list(prompts[0]) == TOKENIZER.encode("a <|im_end|>")
    assert prompts[1] == (5, 0, 511)
    sealed = TOKENIZER.seal("<|im_start|>") + "user\nhi<|im_end|>" + TOKENIZER.seal("<|im_end|>") + "\n"
    assert list(prompts[2]) == TOKENIZER.encode_sealed(sealed)
    assert list(prompts[3]) == TOKENIZER.encode(long)


async def test_lists_and_lengths_reach_the_engine_unchanged(s: Serving) -> None:
    s.engine.answer = lambda request: []
    params = sampling_pb2.SamplingParams(
        logit_bias=[sampling_pb2.LogitBias(token_id=511, bias=-100.0)],
        allowed_token_ids=[1, 2, 3],
        banned_token_ids=[3],
        seed=9,
        min_tokens=2,
        max_tokens=3,
    )
    await read_all(s.generate(text_request(sampling=params, priority=255)))
    (request,) = s.engine.submitted
    sampling = request.sampling
    assert sampling.logit_bias == ((511, -100.0),)
    assert (sampling.allowed_ids, sampling.banned_ids) == ((1, 2, 3), (3,))
    assert (sampling.seed, sampling.min_tokens, request.max_tokens, request.priority) == (9, 2, 3, 255)


async def test_defaults_of_request_precede_model_and_schema(tmp_path: Path) -> None:
    config = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 3.0, "repetition_penalty": True}

    async with serving(tmp_path, model_defaults=config) as s:
        s.engine.answer = lambda request: []
        await read_all(s.generate(text_request(sampling={"temperature": 0.0})))
        await read_all(s.generate(text_request(sampling={"top_k": 0, "seed": 0})))
        requested, other = (request.sampling for request in s.engine.submitted)
        assert (requested.temperature, requested.top_p, requested.top_k) == (0.0, 0.25, 7)
        assert (other.temperature, other.top_k, other.seed) == (0.5, 0, 0)
        assert (other.min_p, other.repetition_penalty) == (0.0, 1.0)  # out of bounds or not a number: ignored
        assert requested.stop_ids == (EOS,)
        assert s.engine.submitted[0].max_tokens == 128 - len(TOKENIZER.encode("quick"))


async def test_model_defaults_can_be_disabled(tmp_path: Path) -> None:
    async with serving(tmp_path, model_defaults={"temperature": 0.5}, use_generation_config=False) as s:
        s.engine.answer = lambda request: []
        await read_all(s.generate())
        assert s.engine.submitted[0].sampling.temperature == 1.0


async def test_seeds_are_random_and_returned(s: Serving) -> None:
    s.engine.answer = lambda request: []
    seeds = [(await read_all(s.generate()))[0].started.seed for _ in range(2)]
    assert seeds == [request.sampling.seed for request in s.engine.submitted]
    assert seeds[0] != seeds[1]


async def test_deadline_is_the_calls_on_the_monotonic_clock(tmp_path: Path) -> None:
    async with serving(tmp_path, default_deadline_seconds=50.0) as s:
        s.engine.answer = lambda request: []
        started_at = monotonic()
        await read_all(s.generate(timeout=1000.0))
        await read_all(s.generate())
        end = monotonic()
        explicit, default = (request.deadline for request in s.engine.submitted)
        assert explicit is not None
        assert default is not None
        assert started_at + 990 < explicit <= end + 1011  # gRPC rounds timeouts up by up to one percent
        assert started_at + 50 <= default <= end + 50


async def test_far_deadline_is_reduced_to_the_maximum(tmp_path: Path) -> None:
    async with serving(tmp_path, max_deadline_seconds=1000.0) as s:
        s.engine.answer = lambda request: []
        started_at = monotonic()
        await read_all(s.generate(timeout=300 * 86_400.0))
        (request,) = s.engine.submitted
        assert request.deadline is not None
        assert started_at + 990 < request.deadline <= monotonic() + 1000


MALFORMED = [(2**62, 0), (-(2**62), 0), (315_576_000_001, 0), (1, 1_000_000_000), (1, -1), (-1, 1), (0, -(2**31))]


@pytest.mark.parametrize(("seconds", "nanos"), MALFORMED)
async def test_invalid_timeout_is_rejected_by_field(s: Serving, seconds: int, nanos: int) -> None:
    timeout = Duration(seconds=seconds, nanos=nanos)
    error = await error_of(s.stub.Submit(pb.SubmitRequest(request=text_request(), timeout=timeout)))
    assert (error.code, error.violations[0].field) == ("INVALID_ARGUMENT", "timeout")
    caller = Caller(s)
    submit = pb.SubmitCommand(handle=1, request=text_request(), timeout=timeout)
    await caller.send(pb.SessionRequest(submits=[submit]))
    while not caller.failed:
        assert await caller.read()
    assert caller.failed[1].violations[0].field == "timeout"
    assert s.engine.submitted == []


@pytest.mark.parametrize("seconds", [0, -1, -315_576_000_000])
async def test_passed_timeout_is_deadline_exceeded(s: Serving, seconds: int) -> None:
    await s.stub.Submit(pb.SubmitRequest(request=text_request(), timeout=Duration(seconds=seconds)))
    (request,) = s.engine.submitted
    assert request.deadline is not None
    assert request.deadline <= monotonic()  # the core fails it in its next step


async def test_longest_duration_counts_as_the_longest_deadline(tmp_path: Path) -> None:
    async with serving(tmp_path, max_deadline_seconds=1000.0) as s:
        longest = Duration(seconds=315_576_000_000, nanos=999_999_999)
        await s.stub.Submit(pb.SubmitRequest(request=text_request(), timeout=longest))
        (request,) = s.engine.submitted
        assert request.deadline is not None
        assert request.deadline <= monotonic() + 1000


async def test_ignore_eos_keeps_the_requests_stop_tokens(s: Serving) -> None:
    s.engine.answer = lambda request: []
    request = text_request(sampling={"ignore_eos": True}, stop={"token_ids": [9]})
    await read_all(s.generate(request))
    assert s.engine.submitted[0].eos_ids == frozenset()
    assert s.engine.submitted[0].sampling.stop_ids == (9,)


async def test_own_eos_tokens_replace_the_models(s: Serving) -> None:
    s.engine.answer = lambda request: [HELLO_IDS[0], EOS, 9]
    responses = await read_all(s.generate(text_request(stop={"token_ids": [7], "eos_token_ids": [9]})))
    request = s.engine.submitted[0]
    assert (request.eos_ids, request.stop_ids) == (frozenset({9}), frozenset({7}))
    assert request.sampling.stop_ids == (7, 9)
    finished = responses[-1].finished
    assert (finished.finish_reason, finished.matched_token_id) == (pb.FINISH_REASON_STOP_EOS, 9)
    assert tokens_of(responses) == [HELLO_IDS[0], EOS, 9]
    assert text_of(responses) == "He"


async def test_expected_tokens_are_at_most_max_tokens(s: Serving) -> None:
    s.engine.answer = lambda request: []
    for expected in (None, 3, 1000):
        await read_all(s.generate(text_request(expected_tokens=expected, sampling={"max_tokens": 9})))
    assert [request.expected_tokens for request in s.engine.submitted] == [0, 3, 9]


async def test_resumed_answer_is_expected_to_grow(s: Serving) -> None:
    s.engine.answer = lambda request: [5, 6, 7, 8]
    resume = pb.Resume(token_ids=[5, 6, 7], model_fingerprint=HELLO.model_fingerprint)
    greedy = {"max_tokens": 9, "temperature": 0.0}
    await read_all(s.generate(text_request(expected_tokens=2, sampling=greedy, resume=resume)), 3)
    assert s.engine.submitted[0].expected_tokens == 4


async def test_prompt_is_truncated_from_the_left(s: Serving) -> None:
    s.engine.answer = lambda request: []
    whole = TOKENIZER.encode("The quick brown fox")
    long_ids = [i % 500 for i in range(1000)]  # beyond the context
    for count in (1, 3, len(whole), 100):
        await read_all(s.generate(text_request("The quick brown fox", truncate_prompt_tokens=count)))
    await read_all(s.generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=long_ids), truncate_prompt_tokens=9)))
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    await read_all(s.generate(pb.GenerateRequest(chat=chat, truncate_prompt_tokens=2)))
    prompts = [list(request.prompt) for request in s.engine.submitted]
    assert prompts[:5] == [whole[-1:], whole[-3:], whole, whole, long_ids[-9:]]
    assert len(prompts[5]) == 2
    error = await error_of(
        s.generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=long_ids), truncate_prompt_tokens=500))
    )
    assert error.reason == "PROMPT_TOO_LONG"


async def test_drafts_are_limited_by_the_server_and_the_request(tmp_path: Path) -> None:
    for method, found in (("prompt_lookup", [6, 0, 4, 6]), ("none", [0, 0, 0, 0])):
        async with serving(tmp_path, speculative_method=method, num_speculative_tokens=6) as s:
            s.engine.answer = lambda request: []
            for most in (None, 0, 4, 1000):
                await read_all(s.generate(text_request(num_speculative_tokens=most)))
            assert [request.max_drafts for request in s.engine.submitted] == found
