"""Requests and answers of any size: an oversized request fails alone, and unread answers arrive in several messages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.serving import HELLO_IDS, error_of, read_all, serving, text_of, text_request, tokens_of, until
from support.session_driver import Caller, submit

from lineclear.api_limits import MAX_PIECE_BYTES
from lineclear.errors import DeadlineExceeded
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.grpc_api import error_interceptor
from lineclear.scheduler.requests.submitted_answer import SubmittedAnswer
from lineclear.scheduler.security.identity import ANONYMOUS
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Logprobs

TOP = Logprobs(-1.5, tuple((token, -2.5) for token in range(400, 420)))
LARGEST = MAX_PIECE_BYTES + 64 * 1024
TOKENS = HELLO_IDS * (20_000 // len(HELLO_IDS))
"""With TOP, more bytes than gRPC accepts in one message."""
UNREAD = len(TOKENS)
TEXT = "Hello, how are you?" * (UNREAD // len(HELLO_IDS))


@pytest.fixture(autouse=True)
def _no_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineclear.scheduler.requests.output_stream.MAX_UNREAD_BYTES", 2**30)


async def test_unread_answer_arrives_in_several_messages(tmp_path: Path) -> None:
    async with serving(tmp_path, max_unread_tokens=UNREAD) as s:
        call, key = await s.start_call(text_request(output={"logprobs": True, "top_logprobs": 20}))
        # In one step, as after a pause of the reader.
        s.engine.tokens(key, TOKENS, [TOP] * UNREAD)
        s.engine.finish_by(key, FinishReason.LENGTH)
        responses = await read_all(call)
        assert max(response.ByteSize() for response in responses) <= LARGEST
        assert tokens_of(responses) == TOKENS
        assert text_of(responses) == TEXT
        assert [len(r.logprobs) for r in responses] == [len(r.token_ids) for r in responses]


@pytest.mark.parametrize("output", [{"logprobs": True, "top_logprobs": 20}, {}], ids=["logprobs", "plain"])
async def test_unread_session_loses_no_request(tmp_path: Path, output: dict[str, Any]) -> None:
    async with serving(tmp_path, max_unread_tokens=UNREAD) as s:
        caller, count = Caller(s), 3
        await caller.send(*(submit(n, text_request(output=output)) for n in range(count)))
        await until(lambda: len(s.engine.submitted) == count)
        keys = [r.request_id for r in s.engine.submitted]
        for key in keys:
            s.engine.start(key)
        await caller.until(lambda: len(caller.started) == count)
        for key in keys:
            s.engine.tokens(key, TOKENS, [TOP] * UNREAD if output else ())
        # More for some, so that truncated answers are not the last to be written.
        for key in keys[:2]:
            s.engine.finish_by(key, FinishReason.LENGTH)
        await caller.until(lambda: len(caller.finished) == 2)
        for key in keys[2:]:
            s.engine.finish_by(key, FinishReason.LENGTH)
        await caller.until(lambda: len(caller.finished) == count)
        assert max(message.ByteSize() for message in caller.messages) <= LARGEST
        assert all(caller.tokens[n] == TOKENS for n in range(count))
        assert all(caller.text[n] == TEXT for n in range(count))
        await s.idle()


async def test_session_delivers_tokens_before_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path, max_unread_tokens=UNREAD) as s:
        caller = Caller(s)
        await caller.send(submit(1), submit(2))
        await until(lambda: len(s.engine.submitted) == 2)
        keys = [r.request_id for r in s.engine.submitted]
        for key in keys:
            s.engine.start(key)
            s.engine.tokens(key, [40] * UNREAD, [TOP] * UNREAD)
            s.engine.fail(key, DeadlineExceeded("late"))
        await caller.until(lambda: len(caller.failed) == 2)
        assert {handle: len(caller.tokens[handle]) for handle in (1, 2)} == {1: UNREAD, 2: UNREAD}
        assert max(message.ByteSize() for message in caller.messages) <= LARGEST


async def test_kept_answer_is_read_in_several_messages() -> None:
    """Tokens of 5,000 characters: a message of the largest number of tokens would have 5 MB."""
    outputs = (SimpleNamespace(index=0, num_resumed=0, is_parsed=False),)
    validated = SimpleNamespace(wants_text=True)
    request: Any = SimpleNamespace(
        validated=validated, call=SimpleNamespace(caller=ANONYMOUS, tenant=""), request_id="x", outputs=outputs
    )
    request.call_key = lambda output: ""

    answer = SubmittedAnswer(request)
    answer.add(pb.GenerateResponse(token_ids=range(2000)), ["x" * 5000] * 2000)
    answer.add(pb.GenerateResponse(finished=pb.Finished(), first_index=2000), [])
    messages = [message async for message in answer.read(0)]
    assert max(message.ByteSize() for message in messages) <= LARGEST
    assert [token for message in messages for token in message.token_ids] == list(range(2000))
    assert sum(len(message.text) for message in messages) == 2000 * 5000


@pytest.mark.parametrize("max_prompt_bytes", [5 * 2**18, 8192])
async def test_text_of_max_prompt_bytes_is_accepted(tmp_path: Path, max_prompt_bytes: int) -> None:
    """With the default limits for messages."""

    async with serving(tmp_path, max_prompt_bytes=max_prompt_bytes) as s:
        caller = Caller(s)
        longest = text_request(("quick " * max_prompt_bytes)[:max_prompt_bytes])
        errors = [await error_of(s.generate(longest))]
        await caller.send(submit(1, longest))
        await caller.until(lambda: caller.failed)
        assert [error.reason for error in (*errors, caller.failed[1])] == ["PROMPT_TOO_LONG"] * 2
        error = await error_of(s.generate(text_request("x" * (max_prompt_bytes + 1))))
        assert "max_prompt_bytes" in str(error) or str(max_prompt_bytes) in str(error)
        assert error.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("size", [1.1, 1.9])
async def test_a_request_over_the_limit_fails_alone(tmp_path: Path, size: float) -> None:
    limit = 64 * 1024
    async with serving(tmp_path, max_message_bytes=limit) as s:
        large = text_request("x" * round(limit * size))
        caller = Caller(s)
        assert dict(await caller.call.initial_metadata())["lineclear-max-request-bytes"] == str(limit)
        await caller.send(submit(1), submit(2, large), submit(3))
        await caller.until(lambda: caller.failed)
        assert {handle: failure.reason for handle, failure in caller.failed.items()} == {2: "REQUEST_TOO_LARGE"}
        await until(lambda: len(s.engine.submitted) == 2)
        for key in [r.request_id for r in s.engine.submitted]:
            s.engine.start(key)
            s.engine.tokens(key, HELLO_IDS)
            s.engine.finish_by(key, FinishReason.LENGTH)
        await caller.until(lambda: len(caller.finished) == 2)
        for call in (s.generate(large), s.stub.Submit(pb.SubmitRequest(request=large))):
            error = await error_of(call)
            assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "REQUEST_TOO_LARGE")
            assert error.metadata == {"request_bytes": str(large.ByteSize()), "limit": str(limit)}


async def test_unary_response_over_the_limit_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_interceptor, "MAX_MESSAGE_BYTES", 1000)

    async with serving(tmp_path) as s:
        error = await error_of(s.stub.Tokenize(pb.TokenizeRequest(text="a b " * 1000)))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "RESPONSE_TOO_LARGE")
        assert error.metadata["limit"] == "1000"
        assert (await s.stub.Tokenize(pb.TokenizeRequest(text="a"))).token_ids
