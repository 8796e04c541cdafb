"""Model fingerprints: every answer names its model, and a request never runs on another model than it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.answers import answered, invalid_fields
from support.serving import HELLO, HELLO_IDS, TEMPLATE, Serving, error_of, serving, text_request, tokens_of
from support.session_driver import Caller, submit

from lineclear.errors import ModelChanged
from lineclear.model_files.fingerprint import prompt_digest
from lineclear.v1 import inference_pb2 as pb

SERVED = HELLO.model_fingerprint
OTHER = replace(HELLO, epoch=8, model_id="other", model_fingerprint="fedcba9876543210")


async def test_fingerprint_is_in_get_model_and_started(s: Serving) -> None:
    for fingerprint in (SERVED, OTHER.model_fingerprint):
        assert (await s.stub.GetModel(pb.GetModelRequest())).model_fingerprint == fingerprint
        started = (await answered(s, HELLO_IDS))[0].started
        assert started.model_fingerprint == fingerprint
        assert started.prompt_digest == prompt_digest(s.engine.submitted[0].prompt)
        s.engine.join(OTHER)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_fingerprint": OTHER.model_fingerprint},
        {"resume": {"token_ids": HELLO_IDS[:3], "model_fingerprint": OTHER.model_fingerprint}},
        # Complete except for its end, which needs no worker.
        {"resume": {"token_ids": HELLO_IDS[:4], "model_fingerprint": OTHER.model_fingerprint}},
    ],
)
async def test_request_for_another_fingerprint_is_rejected(s: Serving, fields: dict[str, Any]) -> None:
    error = await error_of(s.generate(text_request(sampling={"seed": 1, "max_tokens": 4}, **fields)))
    assert isinstance(error, ModelChanged)
    assert (error.code, error.reason) == ("ABORTED", "MODEL_CHANGED")
    assert error.metadata["model_fingerprint"] == SERVED
    assert error.metadata["expected_model_fingerprint"] == OTHER.model_fingerprint
    assert s.engine.submitted == []


async def test_model_name_of_a_request_is_checked(tmp_path: Path) -> None:
    async with serving(tmp_path, served_model_name="ours") as s:
        assert (await s.stub.GetModel(pb.GetModelRequest())).model_id == "ours"
        await answered(s, HELLO_IDS, text_request(model="ours"))
        error = await error_of(s.generate(text_request(model="test-model")))
        assert (error.code, error.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
        assert "ours" in str(error)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model_fingerprint": ""}, "model_fingerprint"),
        ({"model_fingerprint": "é" * 8}, "model_fingerprint"),
        ({"model_fingerprint": "a" * 65}, "model_fingerprint"),
        ({"resume": {"token_ids": [5]}}, "resume.model_fingerprint"),
        ({"resume": {"model_fingerprint": SERVED}, "model_fingerprint": "abc"}, "model_fingerprint"),
        ({"resume": {"model_fingerprint": SERVED, "prompt_digest": "a" * 65}}, "resume.prompt_digest"),
        ({"resume": {"model_fingerprint": SERVED, "chat_time_us": -1}}, "resume.chat_time_us"),
        ({"resume": {"model_fingerprint": SERVED, "chat_time_us": 2**63 - 1}}, "resume.chat_time_us"),
    ],
)
async def test_malformed_fingerprint_is_rejected(s: Serving, fields: dict[str, Any], field: str) -> None:
    assert await invalid_fields(s.generate(text_request(sampling={"seed": 1}, **fields))) == [field]


async def test_engine_gets_fingerprint_and_vocabulary(s: Serving) -> None:
    await answered(s, HELLO_IDS)
    await answered(s, HELLO_IDS, text_request(model_fingerprint=SERVED))
    plain, named = s.engine.submitted
    assert (plain.model_fingerprint, named.model_fingerprint) == ("", SERVED)
    assert plain.vocabulary == (HELLO.vocab_size, HELLO.eos_token_ids)


async def test_resumed_chat_uses_the_same_time(tmp_path: Path) -> None:
    """The template prints the time to the microsecond, so rendering it again would change the prompt."""
    template = "{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}" + TEMPLATE
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with serving(tmp_path, template=template) as s:
        request = pb.GenerateRequest(chat=chat, sampling={"seed": 1, "max_tokens": len(HELLO_IDS)})
        started = (await answered(s, HELLO_IDS, request))[0].started
        assert started.chat_time_us
        request.resume.token_ids[:] = HELLO_IDS[:2]
        for name in ("model_fingerprint", "prompt_digest", "chat_time_us"):
            setattr(request.resume, name, getattr(started, name))
        rest = [response async for response in s.generate(request)]
        assert tokens_of(rest) == HELLO_IDS[2:]
        assert rest[0].started.chat_time_us == started.chat_time_us
        whole, resumed = s.engine.submitted
        assert whole.prompt == resumed.prompt
        # Without the time the template renders another prompt, which the server detects.
        request.resume.chat_time_us = 0
        error = await error_of(s.generate(request))
        assert error.reason == "MODEL_CHANGED"
        assert "the prompt has other tokens on this server" in str(error)


async def test_open_session_uses_the_new_models_bounds(s: Serving) -> None:
    caller = Caller(s)
    await caller.call.wait_for_connection()
    s.engine.join(replace(OTHER, vocab_size=300, max_model_len=32, eos_token_ids=(9,)))
    fields = [{"model_fingerprint": SERVED}, {"sampling": {"max_tokens": 40}}, {"stop": {"token_ids": [400]}}, {}]
    await caller.send(*(submit(handle, text_request("hi", **each)) for handle, each in enumerate(fields)))
    await s.engine.next_request()
    await caller.until(lambda: len(caller.failed) == 3)
    assert [caller.failed[handle].reason for handle in range(3)] == [
        *("MODEL_CHANGED", "PROMPT_TOO_LONG", "TOKEN_OUT_OF_VOCABULARY")
    ]
    (request,) = s.engine.submitted
    assert request.eos_ids == {9}
