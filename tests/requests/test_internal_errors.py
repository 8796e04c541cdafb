"""Internal errors: the caller gets an incident number, the log has the traceback, and neither has request content."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.answers import answered
from support.serving import BOUND_SECONDS, TOKENIZER, Serving, error_of, read_all, serving, text_request, tokens_of
from support.session_driver import Caller, submit

from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.requests import responses
from lineclear.scheduler.requests.output_stream import OutputChunk
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.v1 import inference_pb2 as pb

GENERATE = "/lineclear.v1.InferenceService/Generate"
MARKER = "open-sesame"


def failing_tokenizer(error: BaseException) -> Any:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

        def encode(self, text: str) -> list[int]:
            raise error

    return Failing()


@pytest.mark.parametrize("rpc", ["Generate", "Tokenize"])
async def test_bug_returns_an_incident_number_only(tmp_path: Path, rpc: str) -> None:
    async with serving(tmp_path, tokenizer=failing_tokenizer(RuntimeError(f"cannot encode {MARKER}"))) as s:
        with capture_logs() as logs:
            tokenize = pb.TokenizeRequest(text=MARKER)
            call = s.generate(text_request(MARKER)) if rpc == "Generate" else s.stub.Tokenize(tokenize)
            error = await error_of(call)
            await s.idle()
        assert (error.code, error.reason) == ("INTERNAL", "INTERNAL_ERROR")
        assert MARKER not in str(error)
        assert "RuntimeError" not in str(error)
        incident = next(entry for entry in logs if entry["event"] == "internal_error")
        assert incident["incident_id"] == error.metadata["incident_id"]
        assert incident["error"] == "RuntimeError"
        assert any(Path(__file__).name in frame for frame in incident["location"])
        assert MARKER not in str(logs)


BAD_TOKEN = 99


def break_at_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make text handling fail on a certain token."""
    push = AnswerText.push

    def broken(self: AnswerText, token_id: int) -> str:
        if token_id == BAD_TOKEN:
            raise RuntimeError(MARKER)
        return push(self, token_id)

    monkeypatch.setattr(AnswerText, "push", broken)


async def test_bug_in_one_answer_ends_that_request_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_at_a_token(monkeypatch)
    async with serving(tmp_path) as s:
        fatal: list[BaseException] = []
        s.manager.services.streams.on_fatal = fatal.append
        calls = []
        for number in (1, 2, 3):
            call = s.generate()
            calls.append((call, await s.engine.next_request(number)))
            s.engine.start(calls[-1][1])
        with capture_logs() as logs:
            s.engine.step({calls[0][1]: [5], calls[1][1]: [BAD_TOKEN], calls[2][1]: [7]})
            error = await error_of(calls[1][0])
        assert error.reason == "INTERNAL_ERROR"
        assert MARKER not in str(logs) + str(error)
        incident = next(entry for entry in logs if entry["event"] == "internal_error")
        assert incident["incident_id"] == error.metadata["incident_id"]
        for call, key in (calls[0], calls[2]):
            s.engine.step({key: [8]})
            s.engine.finish_by(key, FinishReason.LENGTH)
            assert len(tokens_of(await read_all(call))) == 2
        assert set(s.engine.cancelled) == {calls[1][1]}
        assert fatal == []


@pytest.mark.parametrize("where", ["text", "message"])
async def test_bug_in_one_session_request_ends_that_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "text":
        break_at_a_token(monkeypatch)
    else:
        response = responses.response

        def broken(chunk: OutputChunk, *rest: Any) -> Any:
            if BAD_TOKEN in chunk.token_ids:
                raise RuntimeError(MARKER)
            return response(chunk, *rest)

        monkeypatch.setattr(responses, "response", broken)
    async with serving(tmp_path) as s:
        caller = Caller(s)
        s.engine.answer = lambda request: [5, BAD_TOKEN if request.sampling.seed == 2 else 6]
        for handle in (1, 2, 3):
            await caller.send(submit(handle, text_request(sampling={"seed": handle, "max_tokens": 2})))
        await caller.until(lambda: len(caller.finished) + len(caller.failed) == 3)
        assert sorted(caller.finished) == [1, 3]
        assert caller.failed[2].reason == "INTERNAL_ERROR"


async def test_accidentally_cancelled_handler_sends_a_status(tmp_path: Path) -> None:
    """gRPC sends no status for a handler that ends with CancelledError: its caller would wait forever."""
    async with serving(tmp_path, tokenizer=failing_tokenizer(asyncio.CancelledError())) as s:
        async with asyncio.timeout(BOUND_SECONDS):
            assert (await error_of(s.generate())).reason == "INTERNAL_ERROR"


async def test_cancelled_call_is_no_incident(s: Serving) -> None:
    """Found by the campaign of damaged requests: gRPC does not always report a cancellation by the caller."""
    request = text_request().SerializeToString()
    with capture_logs() as logs:
        for number in range(1, 101):
            call = s.channel.stream_stream(GENERATE)()
            await call.write(request)
            await call.done_writing()
            s.engine.start(await s.engine.next_request(number))
            if number % 2:
                await call.read()
            call.cancel()
        await s.idle()
    assert [entry for entry in logs if entry["event"] == "internal_error"] == []


async def test_prompts_and_answers_are_not_logged(s: Serving) -> None:
    ids = TOKENIZER.encode_sealed(MARKER)
    with capture_logs() as logs:
        await answered(s, ids, text_request(MARKER))
        await error_of(s.generate(text_request(MARKER, request_id=MARKER + " ")))
        await error_of(s.generate(text_request(MARKER, stop={"strings": [MARKER * 20]})))
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="bad", content=MARKER)])
        await error_of(s.generate(pb.GenerateRequest(chat=chat)))
        await s.idle()
    ended = [entry for entry in logs if entry["event"] == "request_ended"]
    assert [entry["outcome"] for entry in ended] == ["length", "invalid_request"]
    assert (ended[0]["tokens"], ended[0]["prompt_tokens"]) == (len(ids), len(TOKENIZER.encode(MARKER)))
    assert MARKER not in str(logs)
    assert str(ids) not in str(logs)
