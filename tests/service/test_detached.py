"""Answers nobody listens to: made all the same, kept within bounds, read from any index, seen by their caller alone."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from service.serving import BOUND_SECONDS, TOKENIZER, Serving, error_of, run, serving, text_request, until

from lineclear.errors import NonFiniteLogits
from lineclear.scheduler.access.identity import ANONYMOUS, Identity
from lineclear.scheduler.scheduling.events import FinishReason
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.types import Logprobs

IDS = TOKENIZER.encode_sealed("Hello, how are you? 😀")
TEXT = "Hello, how are you? 😀"


async def submit(s: Serving, request: pb.GenerateRequest | None = None, **options: Any) -> str:
    answer = await s.stub.Submit(pb.SubmitRequest(request=request or text_request()), **options)
    return str(answer.request_id)


async def result(s: Serving, request_id: str) -> pb.GetResultResponse:
    found: pb.GetResultResponse = await s.stub.GetResult(pb.GetResultRequest(request_id=request_id))
    return found


def attach(s: Serving, request_id: str, from_index: int = 0) -> Any:
    return s.stub.Attach(pb.AttachRequest(request_id=request_id, from_index=from_index))


async def everything(call: Any, from_index: int = 0) -> tuple[list[int], str, list[pb.GenerateResponse]]:
    tokens: list[int] = []
    text = ""
    messages = []
    async with asyncio.timeout(BOUND_SECONDS):
        async for message in call:
            response = message.response
            assert response.first_index == from_index + len(tokens)
            tokens += response.token_ids
            text += response.text
            messages.append(response)
    assert [m.HasField("started") for m in messages] == [True] + [False] * (len(messages) - 1)
    assert [m.HasField("finished") for m in messages] == [False] * (len(messages) - 1) + [True]
    return tokens, text, messages


def cancel(s: Serving, request_id: str) -> Any:
    return s.stub.Cancel(pb.CancelRequest(request_id=request_id))


def test_an_answer_is_made_without_anybody_and_read_from_every_index(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            name = await submit(s, text_request(request_id="mine"))
            assert name == "mine"
            key = await s.engine.next_request()
            assert (await result(s, name)).state == pb.RESULT_STATE_WAITING
            early = asyncio.ensure_future(everything(attach(s, name)))
            s.engine.start(key)
            s.engine.tokens(key, IDS[:4])
            await until(lambda: s.service._detached.find(ANONYMOUS, name).next_index == 4)
            now = await result(s, name)
            assert (now.state, list(now.response.token_ids)) == (pb.RESULT_STATE_RUNNING, IDS[:4])
            late = asyncio.ensure_future(everything(attach(s, name, 2), 2))
            for token in IDS[4:]:
                s.engine.tokens(key, [token])
            s.engine.finish_by(key, FinishReason.LENGTH)
            assert (await early)[:2] == (IDS, TEXT)
            assert (await late)[0] == IDS[2:]
            text_of_first = [text for *_, text in [(await everything(attach(s, name, n), n))[:2] for n in (0, 3)]]
            for have in range(len(IDS) + 1):
                tokens, text, _ = await everything(attach(s, name, have), have)
                assert tokens == IDS[have:]
                assert TEXT.endswith(text)
            assert text_of_first[0] == TEXT
            last = await result(s, name)
            assert last.state == pb.RESULT_STATE_FINISHED
            assert (last.response.text, list(last.response.token_ids)) == (TEXT, IDS)
            assert last.response.finished.usage.completion_tokens == len(IDS)
            assert last.response.started.request_id == "mine"
            await s.idle()

    run(scenario())


def test_text_that_was_held_back_comes_with_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: IDS
            name = await submit(s, text_request(stop={"strings": ["😀😀"]}))
            await s.idle()
            assert (await result(s, name)).response.text == TEXT
            assert (await everything(attach(s, name)))[1] == TEXT
            assert (await everything(attach(s, name, len(IDS)), len(IDS)))[1] == "😀"

    run(scenario())


def test_a_long_answer_comes_in_several_messages(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_unread_tokens=10_000) as s:
            s.engine.answer = lambda request: [5] * 2500
            name = await submit(s)
            await s.idle()
            tokens, _, messages = await everything(attach(s, name))
            assert tokens == [5] * 2500
            assert [len(m.token_ids) for m in messages] == [1024, 1024, 452]

    run(scenario())


def test_logprobs_and_times_stay_with_their_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            options = pb.OutputOptions(logprobs=True, token_timings=True)
            name = await submit(s, text_request(output=options))
            key = await s.engine.next_request()
            s.engine.start(key)
            s.engine.tokens(key, IDS[:3], [Logprobs(-1.0), Logprobs(-2.0), Logprobs(-3.0)])
            s.engine.finish_by(key, FinishReason.LENGTH)
            await s.idle()
            _, _, (message,) = await everything(attach(s, name, 1), 1)
            assert [entry.logprob for entry in message.logprobs] == [-2.0, -3.0]
            assert len(message.token_times_us) == 2
            assert not (await result(s, name)).response.logprobs

    run(scenario())


def test_how_it_failed_is_kept_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            name = await submit(s)
            key = await s.engine.next_request()
            s.engine.start(key)
            s.engine.tokens(key, IDS[:2])
            s.engine.fail(key, NonFiniteLogits("nan"))
            await s.idle()
            found = await result(s, name)
            assert (found.state, found.failure.reason) == (pb.RESULT_STATE_FAILED, "NON_FINITE_LOGITS")
            assert list(found.response.token_ids) == IDS[:2]
            call = attach(s, name)
            assert list((await call.read()).response.token_ids) == IDS[:2]
            assert (await error_of(call)).reason == "NON_FINITE_LOGITS"

    run(scenario())


def test_a_listener_who_leaves_changes_nothing_and_cancel_ends_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            name = await submit(s)
            key = await s.engine.next_request()
            s.engine.start(key)
            call = attach(s, name)
            await call.read()
            call.cancel()
            generating = s.generate(text_request(request_id="live"))
            await s.engine.next_request(2)
            assert s.engine.cancelled == []
            assert (await cancel(s, name)).found
            assert (await cancel(s, "live")).found
            assert not (await cancel(s, "nobody")).found
            assert (await error_of(generating)).reason == "CANCELLED"
            await s.idle()
            assert sorted(s.engine.cancelled) == sorted(r.request_id for r in s.engine.submitted)
            assert (await result(s, name)).failure.reason == "CANCELLED"
            assert (await cancel(s, name)).found  # forgotten
            for call in (s.stub.GetResult(pb.GetResultRequest(request_id=name)), attach(s, name)):
                assert (await error_of(call)).reason == "UNKNOWN_REQUEST"

    run(scenario())


def test_from_an_index_that_is_not_there_nobody_can_listen(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: IDS
            name = await submit(s)
            await s.idle()
            error = await error_of(attach(s, name, len(IDS) + 1))
            assert [v.field for v in error.violations] == ["from_index"]

    run(scenario())


def test_the_one_that_ended_longest_ago_makes_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_detached=3, max_detached_tokens=60) as s:
            s.engine.answer = lambda request: [5] * 10
            small = {"sampling": {"max_tokens": 15}}  # of which the answer needs ten
            names = [await submit(s, text_request(**small)) for _ in range(4)]
            assert (await error_of(s.stub.GetResult(pb.GetResultRequest(request_id=names[0])))).code == "NOT_FOUND"
            for name in names[1:]:
                assert (await result(s, name)).state == pb.RESULT_STATE_FINISHED
            # 30 tokens are kept; 45 more need the room of two of the three.
            s.engine.answer = None
            await submit(s, text_request(sampling={"max_tokens": 45}))
            assert len(s.service._detached) == 2
            assert s.service._detached.num_tokens == 55
            # What is in progress is never pushed out.
            error = await error_of(s.stub.Submit(pb.SubmitRequest(request=text_request(sampling={"max_tokens": 20}))))
            assert (error.reason, error.metadata["limit_tokens"]) == ("QUEUE_FULL", "60")
            assert error.retry_after_seconds is not None
            await until(lambda: len(s.service.streams) == 1)  # the one refused is gone from the engine too

    run(scenario())


def test_an_answer_is_forgotten_in_time_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, detached_ttl_seconds=0.2) as s:
            s.engine.answer = lambda request: IDS
            name = await submit(s)
            await s.idle()
            kept = weakref.ref(s.service._detached.find(ANONYMOUS, name))
            await until(lambda: len(s.service._detached) == 0)
            assert s.service._detached.num_tokens == 0
            gc.collect()
            assert kept() is None

    run(scenario())


def test_an_answer_that_was_forgotten_early_is_not_kept_by_its_timer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: IDS
            name = await submit(s)
            await s.idle()
            kept = weakref.ref(s.service._detached.find(ANONYMOUS, name))
            await cancel(s, name)
            gc.collect()
            assert kept() is None

    run(scenario())


def test_other_callers_see_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lineclear.scheduler.access import identity

    def caller(context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
        return Identity(str(dict(context.invocation_metadata() or ()).get("who", "")), "token")

    monkeypatch.setattr(identity, "caller", caller)

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            name = await submit(s, metadata=(("who", "alice"),))
            bob = {"metadata": (("who", "bob"),)}
            for call in (
                s.stub.GetResult(pb.GetResultRequest(request_id=name), **bob),
                s.stub.Attach(pb.AttachRequest(request_id=name), **bob),
            ):
                assert (await error_of(call)).code == "NOT_FOUND"
            assert not (await s.stub.Cancel(pb.CancelRequest(request_id=name), **bob)).found
            assert s.engine.cancelled == []
            assert (await s.stub.Cancel(pb.CancelRequest(request_id=name), metadata=(("who", "alice"),))).found

    run(scenario())


def test_a_name_is_taken_while_its_answer_is_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            s.engine.answer = lambda request: IDS
            await submit(s, text_request(request_id="a"))
            await s.idle()
            again = s.stub.Submit(pb.SubmitRequest(request=text_request(request_id="a")))
            assert (await error_of(again)).reason == "DUPLICATE_REQUEST"

    run(scenario())


def test_a_drain_ends_it_with_what_another_server_needs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            name = await submit(s)
            key = await s.engine.next_request()
            s.engine.start(key)
            s.engine.tokens(key, IDS[:2])
            call = attach(s, name)
            assert (await call.read()).response.HasField("started")
            await until(lambda: s.service._detached.find(ANONYMOUS, name).next_index == 2)
            await s.service.drain(timeout_seconds=0)
            error = await error_of(call)
            assert (error.reason, error.metadata["next_index"]) == ("DRAINED", "2")
            assert (await result(s, name)).failure.reason == "DRAINED"

    run(scenario())
