"""Every way a call can fail, as a client receives it: code, reason, figures and whether to retry."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from support.serving import BOUND_SECONDS, TOKENIZER, Serving, error_of, read_all, serving, text_request, until

from lineclear import errors
from lineclear.scheduler.requests.validate import request as validation
from lineclear.v1 import inference_pb2 as pb


async def test_before_a_worker_joined(tmp_path: Path) -> None:
    async with serving(tmp_path, joined=False) as s:
        for call in (s.generate(), s.stub.GetModel(pb.GetModelRequest())):
            error = await error_of(call)
            assert (error.code, error.reason) == ("UNAVAILABLE", "SERVER_STARTING")
            assert error.retry_after_seconds is not None
        s.engine.join()
        await until(lambda: s.server.health.is_serving("readiness"))
        s.engine.answer = lambda request: []
        await read_all(s.generate())


async def test_without_any_further_worker(s: Serving) -> None:
    s.manager.refuse(lambda: errors.WorkerUnavailable("gave up"))
    assert (await error_of(s.generate())).reason == "WORKER_UNAVAILABLE"


async def test_large_texts_are_limited_and_delay_no_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large texts are tokenized in threads."""
    release, entered = threading.Event(), threading.Event()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

        def encode(self, text: str) -> list[int]:
            if len(text) < 2000:
                return TOKENIZER.encode(text)
            entered.set()
            release.wait(BOUND_SECONDS)
            return [5]

    monkeypatch.setattr("lineclear.scheduler.requests.tokenizer_pool._MAX_BUSY", 1)
    async with serving(tmp_path, tokenizer=Slow()) as s:
        s.engine.answer = lambda request: []
        first = s.generate(text_request("x" * 2000))
        await until(entered.is_set)
        await read_all(s.generate())
        assert (await error_of(s.generate(text_request("x" * 2000)))).reason == "QUEUE_FULL"
        first.cancel()
        await s.idle()
        # The caller cancelled, but the thread still works, so its place is not free.
        assert (await error_of(s.generate(text_request("x" * 2000)))).reason == "QUEUE_FULL"
        release.set()
        async with asyncio.timeout(BOUND_SECONDS):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await read_all(s.generate(text_request("x" * 2000)))
                    break


async def test_a_conversation_for_a_model_without_a_template(tmp_path: Path) -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])

    async with serving(tmp_path, template=None) as s:
        for call in (s.generate(pb.GenerateRequest(chat=chat)), s.stub.Tokenize(pb.TokenizeRequest(chat=chat))):
            error = await error_of(call)
            assert (error.code, error.reason) == ("FAILED_PRECONDITION", "NO_CHAT_TEMPLATE")
        assert not (await s.stub.GetModel(pb.GetModelRequest())).has_chat_template


async def test_a_role_that_the_template_does_not_know(tmp_path: Path) -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="im_start", content="hi")])

    async with serving(tmp_path) as s:
        error = await error_of(s.generate(pb.GenerateRequest(chat=chat)))
        assert [v.field for v in error.violations] == ["chat.messages[0].role"]


async def test_the_deadline_of_the_call(s: Serving) -> None:
    call = s.generate(timeout=0.05)
    assert (await error_of(call)).code == "DEADLINE_EXCEEDED"
    await s.idle()
    assert s.engine.cancelled == [request.request_id for request in s.engine.submitted]


async def test_every_error_class_round_trips(s: Serving) -> None:
    """Every error class of the engine reaches the client as the same class."""
    raised = [kind for kind in errors.tree() if kind not in (errors.LineclearError, errors.UnknownStatus)]
    for number, kind in enumerate(raised, 1):
        call = s.generate()
        key = await s.engine.next_request(number)
        s.engine.fail(key, kind("a sentence", retry_after_seconds=0.25, metadata={"figure": "7"}))
        received = await error_of(call)
        assert type(received) is kind
        assert (received.code, received.reason) == (kind.code, kind.reason)
        assert (str(received), received.metadata, received.retry_after_seconds) == ("a sentence", {"figure": "7"}, 0.25)


@pytest.mark.parametrize("broken", [False, True], ids=["refused", "incident"])
async def test_error_frees_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """Otherwise one caller of large requests fills the memory before the garbage collector runs."""

    def num_messages() -> int:
        return sum(isinstance(o, pb.DetokenizeRequest | pb.GenerateRequest) for o in gc.get_objects())

    def bug(*_: Any) -> None:
        raise RuntimeError

    ids = [5] * 70_000
    messages = {  # in bytes, so that all request messages in this process belong to the server
        "Detokenize": pb.DetokenizeRequest(token_ids=ids).SerializeToString(),
        "Generate": pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids)).SerializeToString(),
    }

    async with serving(tmp_path) as s:

        async def refused() -> None:
            for method, request in messages.items():
                error = await error_of(s.channel.unary_unary(f"/lineclear.v1.InferenceService/{method}")(request))
                assert error.code == ("INTERNAL" if broken else "INVALID_ARGUMENT")

        if broken:
            monkeypatch.setattr(validation, "check", bug)
            monkeypatch.setattr(validation, "check_detokenize", bug)
        await refused()
        gc.collect()
        gc.disable()
        try:
            before = num_messages()
            for _ in range(5):
                await refused()
            await until(lambda: num_messages() <= before)
        finally:
            gc.enable()
