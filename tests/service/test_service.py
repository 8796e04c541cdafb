"""Calls as a client makes them: what comes back, in which order, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import grpc.aio
import pytest
from service.serving import (
    BOUND_SECONDS,
    EOS,
    HELLO,
    TOKENIZER,
    Serving,
    read_all,
    run,
    serving,
    text_of,
    text_request,
    tokens_of,
    until,
)

from lineclear.scheduler.scheduling.events import FinishReason
from lineclear.scheduler.text.detokenizer import decode
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2
from lineclear.wire.types import Logprobs

HELLO_IDS = TOKENIZER.encode_sealed("Hello, how are you?")


# --- a stream --------------------------------------------------------------------------------------------------------


def test_an_answer_from_start_to_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            call = s.generate(text_request("The quick", request_id="mine", sampling={"seed": 2**64 - 1}))
            key = await s.engine.next_request()
            s.engine.start(key, cached_tokens=2)
            started = await call.read()
            assert started.started == pb.Started(
                request_id="mine",
                prompt_tokens=len(TOKENIZER.encode("The quick")),
                cached_tokens=2,
                seed=2**64 - 1,
                slot=3,
                step=12,
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
            assert finished.reason == pb.FINISH_REASON_STOP_EOS
            assert finished.matched_token_id == EOS
            assert not finished.HasField("matched_stop_string")
            assert finished.usage == pb.Usage(
                prompt_tokens=started.started.prompt_tokens, completion_tokens=len(HELLO_IDS) + 1, cached_tokens=2
            )
            timings = finished.timings
            spans = [d.ToNanoseconds() for d in (timings.queue, timings.first_token, timings.decode, timings.total)]
            assert all(span >= 0 for span in spans)
            assert spans[0] <= spans[1] <= spans[3]
            assert await call.code() is grpc.StatusCode.OK
            await s.idle()
            assert s.engine.cancelled == []

    run(scenario())


def test_unread_tokens_travel_in_one_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            call = s.generate()
            key = await s.engine.next_request()
            s.engine.start(key)
            for token in HELLO_IDS:  # all before the loop runs once
                s.engine.tokens(key, [token])
            s.engine.finish_by(key, FinishReason.LENGTH)
            responses = await read_all(call)
            assert len(responses) == 1
            assert tokens_of(responses) == HELLO_IDS

    run(scenario())


def test_only_what_was_asked_for_is_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: HELLO_IDS
            plain = await read_all(s.generate())
            assert text_of(plain) == "Hello, how are you?"
            assert not any(r.logprobs or r.token_times_us for r in plain)
            bare = await read_all(s.generate(text_request(output={"omit_text": True})))
            assert (text_of(bare), tokens_of(bare)) == ("", HELLO_IDS)
            timed = await read_all(s.generate(text_request(output={"token_timings": True})))
            times = [t for r in timed for t in r.token_times_us]
            assert len(times) == len(HELLO_IDS)
            assert times == sorted(times)
            assert s.engine.submitted[0].sampling.logprobs == -1

    run(scenario())


def test_logprobs_travel_with_their_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            call = s.generate(text_request(output={"logprobs": True, "top_logprobs": 2}))
            key = await s.engine.next_request()
            assert s.engine.requests[key].sampling.logprobs == 2
            s.engine.start(key)
            s.engine.tokens(key, [40, 41], [Logprobs(-0.5, ((40, -0.5), (9, -2.0))), Logprobs(-1.5, ())])
            s.engine.finish_by(key, FinishReason.LENGTH)
            entries = [entry for r in await read_all(call) for entry in r.logprobs]
            assert [e.logprob for e in entries] == [-0.5, -1.5]
            assert [(t.token_id, t.logprob) for t in entries[0].top] == [(40, -0.5), (9, -2.0)]

    run(scenario())


def test_special_tokens_are_text_only_when_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: [*HELLO_IDS, EOS]
            assert text_of(await read_all(s.generate())) == "Hello, how are you?"
            kept = text_request(output={"keep_special_tokens": True})
            assert text_of(await read_all(s.generate(kept))) == "Hello, how are you?</s>"

    run(scenario())


# --- stop strings ----------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_answer_and_the_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            call = s.generate(text_request(stop={"strings": [" are"]}))
            key = await s.engine.next_request()
            s.engine.start(key)
            for token in HELLO_IDS:  # the engine runs ahead of the text
                s.engine.tokens(key, [token])
            responses = await read_all(call)
            assert text_of(responses) == "Hello, how"
            count = s.engine.stopped[0][1]
            assert " are" in decode(TOKENIZER, HELLO_IDS[:count], keep_special=False)
            assert " are" not in decode(TOKENIZER, HELLO_IDS[: count - 1], keep_special=False)
            assert tokens_of(responses) == HELLO_IDS[:count]
            finished = responses[-1].finished
            assert finished.reason == pb.FINISH_REASON_STOP_STRING
            assert finished.matched_stop_string == " are"
            assert finished.usage.completion_tokens == count
            assert s.engine.stopped == [(key, count)]

    run(scenario())


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP_EOS])
def test_a_stop_string_counts_also_when_the_engine_was_faster(tmp_path: Path, reason: FinishReason) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            call = s.generate(text_request(stop={"strings": ["Hello"], "include_stop_string": True}))
            key = await s.engine.next_request()
            s.engine.start(key)
            s.engine.tokens(key, HELLO_IDS)
            s.engine.finish_by(key, reason, EOS)
            responses = await read_all(call)
            assert text_of(responses) == "Hello"
            finished = responses[-1].finished
            assert finished.reason == pb.FINISH_REASON_STOP_STRING
            assert not finished.HasField("matched_token_id")
            assert finished.usage.completion_tokens == len(tokens_of(responses)) < len(HELLO_IDS)

    run(scenario())


def test_stop_strings_work_without_text(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: HELLO_IDS
            request = text_request(stop={"strings": [" how"]}, output={"omit_text": True})
            responses = await read_all(s.generate(request))
            assert text_of(responses) == ""
            assert responses[-1].finished.reason == pb.FINISH_REASON_STOP_STRING

    run(scenario())


def test_the_beginning_of_a_stop_string_is_sent_in_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: HELLO_IDS
            responses = await read_all(s.generate(text_request(stop={"strings": ["you? And"]})))
            assert text_of(responses) == "Hello, how are you?"
            assert responses[-1].finished.reason == pb.FINISH_REASON_LENGTH

    run(scenario())


def test_an_unfinished_character_becomes_a_replacement_in_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            half = TOKENIZER.encode_sealed("é😀")[:-1]
            s.engine.answer = lambda request: half
            assert text_of(await read_all(s.generate())) == "é\ufffd"

    run(scenario())


def test_a_stop_token_ends_without_text(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            stop = HELLO_IDS[-1]
            call = s.generate(text_request(stop={"token_ids": [stop]}))
            key = await s.engine.next_request()
            request = s.engine.requests[key]
            assert request.stop_ids == {stop}
            assert request.sampling.stop_ids == tuple(sorted((stop, EOS)))
            s.engine.start(key)
            s.engine.tokens(key, HELLO_IDS)
            s.engine.finish_by(key, FinishReason.STOP_TOKEN, stop)
            responses = await read_all(call)
            assert tokens_of(responses) == HELLO_IDS
            assert text_of(responses) == decode(TOKENIZER, HELLO_IDS[:-1], keep_special=False)
            assert responses[-1].finished.matched_token_id == stop

    run(scenario())


# --- what reaches the engine -----------------------------------------------------------------------------------------


def test_prompts_of_every_kind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
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

    run(scenario())


def test_defaults_come_from_the_request_then_the_model_then_the_schema(tmp_path: Path) -> None:
    config = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 3.0, "repetition_penalty": True}

    async def scenario() -> None:
        async with serving(tmp_path, model_defaults=config) as s:
            s.engine.answer = lambda request: []
            await read_all(s.generate(text_request(sampling={"temperature": 0.0})))
            await read_all(s.generate(text_request(sampling={"top_k": 0, "seed": 0})))
            asked, other = (request.sampling for request in s.engine.submitted)
            assert (asked.temperature, asked.top_p, asked.top_k) == (0.0, 0.25, 7)
            assert (other.temperature, other.top_k, other.seed) == (0.5, 0, 0)
            assert (other.min_p, other.repetition_penalty) == (0.0, 1.0)  # out of bounds, no number: as if not there
            assert asked.stop_ids == (EOS,)
            assert s.engine.submitted[0].max_tokens == 128 - len(TOKENIZER.encode("quick"))

    run(scenario())


def test_the_models_defaults_can_be_switched_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, model_defaults={"temperature": 0.5}, generation_config=False) as s:
            s.engine.answer = lambda request: []
            await read_all(s.generate())
            assert s.engine.submitted[0].sampling.temperature == 1.0

    run(scenario())


def test_seeds_are_random_and_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: []
            told = [(await read_all(s.generate()))[0].started.seed for _ in range(2)]
            assert told == [request.sampling.seed for request in s.engine.submitted]
            assert told[0] != told[1]

    run(scenario())


def test_the_deadline_is_the_calls_on_the_monotonic_clock(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, default_deadline_seconds=50.0) as s:
            s.engine.answer = lambda request: []
            begin = monotonic()
            await read_all(s.generate(timeout=1000.0))
            await read_all(s.generate())
            end = monotonic()
            given, default = (request.deadline for request in s.engine.submitted)
            assert given is not None
            assert default is not None
            assert begin + 990 < given <= end + 1011  # gRPC sends timeouts rounded up by as much as a hundredth
            assert begin + 50 <= default <= end + 50

    run(scenario())


def test_ignore_eos_leaves_only_the_requests_own_stop_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: []
            request = text_request(sampling={"ignore_eos": True}, stop={"token_ids": [9]})
            await read_all(s.generate(request))
            assert s.engine.submitted[0].eos_ids == frozenset()
            assert s.engine.submitted[0].sampling.stop_ids == (9,)

    run(scenario())


def test_a_request_id_may_be_used_again_at_once(tmp_path: Path) -> None:
    """The engine's last words about the first request must not reach the second."""

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            first = s.generate(text_request(request_id="same"))
            key = await s.engine.next_request()
            s.engine.start(key)
            await first.read()
            del s.engine.requests[key]  # the engine's Failed(Cancelled) is still under way
            first.cancel()
            await s.idle()
            second = s.generate(text_request(request_id="same"))
            other = await s.engine.next_request(2)
            assert other != key
            s.engine.tokens(key, [5])
            s.engine.start(other)
            s.engine.tokens(other, HELLO_IDS)
            s.engine.finish_by(other, FinishReason.LENGTH)
            responses = await read_all(second)
            assert tokens_of(responses) == HELLO_IDS
            assert responses[0].started.request_id == "same"

    run(scenario())


# --- coming and going ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["queued", "started", "streaming", "stop string found"])
def test_hanging_up_cancels(tmp_path: Path, phase: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            call = s.generate(text_request(stop={"strings": ["Hello"]} if phase == "stop string found" else None))
            key = await s.engine.next_request()
            if phase == "stop string found":
                s.engine.finish = lambda key, count: s.engine.stopped.append((key, count))  # type: ignore[method-assign]
            if phase != "queued":
                s.engine.start(key)
                await call.read()
            if phase in ("streaming", "stop string found"):
                s.engine.tokens(key, HELLO_IDS)
                await call.read()
            call.cancel()
            await s.idle()
            assert s.engine.cancelled == [key]

    run(scenario())


def test_a_client_that_vanishes_cancels(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            channel = grpc.aio.insecure_channel(s.server.address)
            call = channel.unary_stream(
                "/lineclear.v1.InferenceService/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )(text_request())
            key = await s.engine.next_request()
            await channel.close()
            await s.idle()
            assert s.engine.cancelled == [key]
            assert call.done()

    run(scenario())


def test_many_streams_and_a_fifth_of_them_hangs_up(tmp_path: Path) -> None:
    """64 at once, each with its own text; those that stay get it whole, and nothing of any stays behind."""

    async def scenario() -> None:
        async with serving(tmp_path, max_batch_size=64) as s:
            await read_all_of_one(s)
            before = len(asyncio.all_tasks())
            chance = random.Random(5)
            words = [f"{'Hello, how are you? ' * 2}{n}" for n in range(64)]
            answers = [TOKENIZER.encode_sealed(word) for word in words]
            leavers = set(chance.sample(range(64), 13))

            async def client(number: int) -> None:
                call = s.generate(text_request(request_id=f"r{number}"))
                if number not in leavers:
                    responses = await read_all(call)
                    assert tokens_of(responses) == answers[number]
                    assert text_of(responses) == words[number]
                    return
                for _ in range(chance.randrange(3)):
                    await call.read()
                call.cancel()

            async def engine() -> None:
                sent = {}
                while len(sent) < 64 or s.engine.requests:
                    await asyncio.sleep(0)
                    for request in s.engine.submitted:
                        key = request.request_id
                        number = int(key[1:].partition("~")[0])
                        if key not in sent:
                            sent[key] = 0
                            s.engine.start(key)
                        if key not in s.engine.requests:
                            continue
                        take = chance.randrange(3)
                        if take and chance.random() < 0.5:
                            s.engine.tokens(key, answers[number][sent[key] : sent[key] + take])
                            sent[key] += take
                        if sent[key] >= len(answers[number]):
                            s.engine.finish_by(key, FinishReason.LENGTH)

            feeding = asyncio.create_task(engine())
            await asyncio.gather(*(client(n) for n in range(64)))
            # Those that hung up before their request was read never came to the engine.
            feeding.cancel()
            await s.idle()
            await until(lambda: len(asyncio.all_tasks()) <= before)
            assert s.service.streams.num_waiting == 0
            cancelled = {int(key[1:].partition("~")[0]) for key in s.engine.cancelled}
            assert cancelled <= leavers
            stats = await s.stub.GetStats(pb.GetStatsRequest())
            assert stats.gauges.streams_open == 0

    async def read_all_of_one(s: Serving) -> None:
        s.engine.answer = lambda request: HELLO_IDS
        await read_all(s.generate())
        s.engine.answer = None
        s.engine.submitted.clear()

    run(scenario())


def test_requests_survive_the_worker_and_new_ones_are_taken_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            old = s.generate()
            key = await s.engine.next_request()
            s.engine.start(key)
            s.engine.tokens(key, HELLO_IDS[:1])
            await old.read()
            s.engine.lose()
            await until(lambda: not s.server.health.is_serving(""))
            new = s.generate()
            other = await s.engine.next_request(2)
            s.engine.join(replace(HELLO, epoch=8))
            await until(lambda: s.server.health.is_serving(""))
            s.engine.tokens(key, HELLO_IDS[1:])
            s.engine.finish_by(key, FinishReason.LENGTH)
            s.engine.start(other)
            s.engine.finish_by(other, FinishReason.LENGTH)
            rest = [r async for r in _responses(old)]
            assert [t for r in rest for t in r.token_ids][-len(HELLO_IDS) + 1 :] == HELLO_IDS[1:]
            await read_all(new)

    run(scenario())


async def _responses(call: Any) -> Any:
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


# --- the other calls -------------------------------------------------------------------------------------------------


def test_tokenize_and_detokenize_are_what_generate_does(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, joined=False) as s:
            tokenized = await s.stub.Tokenize(pb.TokenizeRequest(text="a <|im_end|> b"))
            assert list(tokenized.token_ids) == TOKENIZER.encode("a <|im_end|> b")
            chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
            ids = list((await s.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids)
            text = await s.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, keep_special_tokens=True))
            assert text.text == "<|im_start|>user\nhi<|im_end|>\n"
            text = await s.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
            assert text.text == "user\nhi\n"
            empty = await s.stub.Detokenize(pb.DetokenizeRequest())
            assert empty.text == ""

    run(scenario())


def test_the_model_and_its_limits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_batch_size=4, target_batch_tokens=1000, served_name="named") as s:
            model = await s.stub.GetModel(pb.GetModelRequest())
            assert (model.model_id, model.family, model.context_length) == ("named", "llama", 128)
            assert (model.vocab_size, list(model.eos_token_ids)) == (512, [EOS])
            assert model.has_chat_template
            assert (model.limits.max_batch_size, model.limits.target_batch_tokens) == (4, 256)
            assert model.limits.num_blocks == 64
            assert model.server_version

    run(scenario())


def test_statistics_count_what_happened(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, order="shortest") as s:
            empty = await s.stub.GetStats(pb.GetStatsRequest())
            assert empty.total_seconds == pb.Quantiles()
            s.engine.answer = lambda request: HELLO_IDS
            for _ in range(3):
                await read_all(s.generate())
            stats = await s.stub.GetStats(pb.GetStatsRequest())
            assert stats.total_seconds.count == 3
            assert 0 < stats.total_seconds.p50 <= stats.total_seconds.p99 <= stats.total_seconds.max
            assert stats.first_token_seconds.count == stats.inter_token_seconds.count == stats.total_seconds.count
            assert stats.output_tokens_per_second > 0
            assert stats.worker.joined
            assert stats.worker.pid == HELLO.pid
            assert (stats.order, stats.batching_strategy) == ("shortest", "continuous")
            assert stats.gauges.tasks > 0

    run(scenario())


def test_a_small_request_is_not_held_up_by_a_large_one(tmp_path: Path) -> None:
    """Large texts are tokenized elsewhere: while one is, another call gets its answer."""
    import threading

    release, entered = threading.Event(), threading.Event()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

        def encode(self, text: str) -> list[int]:
            if len(text) > 2000:
                entered.set()
                release.wait(BOUND_SECONDS)
                return [5]
            return TOKENIZER.encode(text)

    async def scenario() -> None:
        async with serving(tmp_path, tokenizer=Slow()) as s:
            s.engine.answer = lambda request: HELLO_IDS
            large = s.generate(text_request("x" * 5000))
            await until(entered.is_set)
            assert tokens_of(await read_all(s.generate())) == HELLO_IDS
            release.set()
            await read_all(large)

    run(scenario())


def test_sampling_reaches_the_engine_unchanged(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: []
            params = sampling_pb2.SamplingParams(
                temperature=0.5,
                top_k=512,
                top_p=1.0,
                min_p=0.25,
                repetition_penalty=1.5,
                presence_penalty=-2.0,
                frequency_penalty=2.0,
                logit_bias=[sampling_pb2.LogitBias(token_id=511, bias=-100.0)],
                allowed_token_ids=[1, 2, 3],
                banned_token_ids=[3],
                seed=9,
                min_tokens=2,
                max_tokens=3,
            )
            await read_all(s.generate(text_request(sampling=params, priority=255)))
            request = s.engine.submitted[0]
            sampling = request.sampling
            assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 512, 1.0, 0.25)
            assert sampling.repetition_penalty == 1.5
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2.0, 2.0)
            assert sampling.logit_bias == ((511, -100.0),)
            assert (sampling.allowed_ids, sampling.banned_ids) == ((1, 2, 3), (3,))
            assert (sampling.seed, sampling.min_tokens, request.max_tokens, request.priority) == (9, 2, 3, 255)

    run(scenario())
