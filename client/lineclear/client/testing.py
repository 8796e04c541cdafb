"""A transport without a server, for the tests of code that uses a client.

    from lineclear.client import Client
    from lineclear.client.testing import Answer, FakeTransport
    from lineclear.errors import QueueFull

    fake = FakeTransport({
        "Say hello": "Hello there!",
        "Flaky": [QueueFull("full", retry_after_seconds=0.0), "second time lucky"],
        "Slow": Answer(pieces=("tick ", "tock"), delay_seconds=0.5),
    })
    client = Client(transport=fake)
    assert client.generate("Say hello").text == "Hello there!"
    assert fake.requests[0].message.text == "Say hello"

An `AsyncClient` takes the same object. The tokens of the fake are the bytes of the text. The script finds chat messages
by the content of the last one, and token ids by their text.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

from lineclear.api_limits import output_seed
from lineclear.errors import Cancelled, DeadlineExceeded, InvalidRequest, LineclearError, UnknownRequest
from lineclear.status_codec import to_status
from lineclear.v1 import inference_pb2 as pb

from . import rpc_methods
from .chat_messages import ToolCall
from .concurrency import AsyncEvent, Event
from .results import FinishReason, HealthStatus
from .rpc_methods import AsyncCall, Call, Method, Pairs

Req = TypeVar("Req")
Res = TypeVar("Res")


@dataclass(frozen=True, slots=True)
class Answer:
    """A scripted answer: the words of `text` as pieces, or `pieces`, with `delay_seconds` before each.

    `reasoning` comes before them and `tool_calls` after them, as a server with parsers sends these. With calls, the
    finish reason STOP_EOS becomes TOOL_CALLS.

    With `error` the call fails after the pieces. If its code is UNAVAILABLE the client resumes, and the call succeeds.
    """

    text: str = ""
    pieces: Sequence[str] | None = None
    tool_calls: Sequence[ToolCall] = ()
    reasoning: str = ""
    finish_reason: FinishReason = FinishReason.STOP_EOS
    matched_stop: str | None = None
    delay_seconds: float = 0.0
    error: LineclearError | None = None

    def parts(self) -> list[str]:
        if self.pieces is not None:
            return list(self.pieces)
        return [part for part in self.text.replace(" ", " \0").split("\0") if part]


# Each call takes the first entry of a list; the last entry stays.
Reply: TypeAlias = str | Answer | LineclearError
Script: TypeAlias = Reply | Sequence[Reply]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a client. `message` is the protobuf request."""

    path: str
    message: Any
    timeout_seconds: float | None
    metadata: tuple[tuple[str, str | bytes], ...]


class FakeTransport:
    """Answers the calls of `Client(transport=...)` and `AsyncClient(transport=...)` from a script.

    `script`: a mapping of prompt texts to replies, a function of the GenerateRequest, or one reply for every prompt. A
    prompt without a reply raises InvalidRequest. Assign to `model`, `stats` and `health` what these calls return.
    """

    target = "unix:fake"

    def __init__(self, script: Script | Mapping[str, Script] | Callable[[pb.GenerateRequest], Reply] = "") -> None:
        self.model = pb.GetModelResponse(model_id="fake", family="fake", context_length=4096, vocab_size=256)
        self.stats = pb.GetStatsResponse(server_version="fake")
        self.health = HealthStatus.SERVING
        self.closed = False
        self.cancelled = 0  # number of calls cancelled before their end
        self._calls: list[RecordedCall] = []
        self._submitted: dict[str, tuple[pb.GenerateRequest, Reply]] = {}
        self._lock = threading.Lock()
        self._function = script if callable(script) else None
        self._default: deque[Reply] | None = None
        self._replies: dict[str, deque[Reply]] = {}
        if isinstance(script, Mapping):
            self._replies = {prompt: _queue(replies) for prompt, replies in script.items()}
        elif self._function is None:
            self._default = _queue(cast("Script", script))

    @property
    def requests(self) -> list[RecordedCall]:
        """The calls of Generate so far, with every retry."""
        return [call for call in self.calls if call.path == rpc_methods.GENERATE.path]

    @property
    def calls(self) -> list[RecordedCall]:
        """All calls so far."""
        with self._lock:
            return list(self._calls)

    # -- Transport

    def unary(self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs) -> Res:
        self._record(method, request, timeout_seconds, metadata)
        return cast("Res", self._unary_answer(method.path, request))

    def stream(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Call[Res]:
        script = self._begin(method, request, timeout_seconds, metadata)
        return cast("Call[Res]", _FakeCall(script, timeout_seconds, self._count_cancelled, Event()))

    def close(self) -> None:
        self.closed = True

    # -- AsyncTransport

    async def unary_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Res:
        await asyncio.sleep(0)  # other tasks run, as during a real call
        return self.unary(method, request, timeout_seconds=timeout_seconds, metadata=metadata)

    def stream_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> AsyncCall[Res]:
        script = self._begin(method, request, timeout_seconds, metadata)
        return cast("AsyncCall[Res]", _FakeCall(script, timeout_seconds, self._count_cancelled, AsyncEvent()))

    async def close_async(self) -> None:
        self.close()

    # -- the script

    def _begin(
        self, method: Method[Any, Any], request: Any, timeout_seconds: float | None, metadata: Pairs
    ) -> Iterator[pb.GenerateResponse | float]:
        self._record(method, request, timeout_seconds, metadata)
        with self._lock:
            number = len(self._calls)
        if not isinstance(request, pb.AttachRequest):
            return _played(self._reply(request), request, number)
        with self._lock:
            kept = self._submitted.get(request.request_id)
        if kept is None:
            raise UnknownRequest("nothing was submitted under this request_id")
        again = pb.GenerateRequest()
        again.CopyFrom(kept[0])
        if request.from_index:
            again.resume.token_ids.extend([0] * request.from_index)
        return _played(kept[1], again, number)

    def _record(self, method: Method[Any, Any], request: Any, timeout_seconds: float | None, metadata: Pairs) -> None:
        if self.closed:
            raise RuntimeError("the client is closed")
        method.encode(request)  # raises if the message cannot be sent
        with self._lock:
            self._calls.append(RecordedCall(method.path, request, timeout_seconds, tuple(metadata)))

    def _reply(self, request: pb.GenerateRequest) -> Reply:
        if self._function is not None:
            return self._function(request)
        with self._lock:
            replies = self._default if self._default is not None else self._replies.get(prompt_text(request))
            if replies is None:
                return InvalidRequest("the script of the FakeTransport has no reply to this prompt")
            return replies.popleft() if len(replies) > 1 else replies[0]

    def _unary_answer(self, path: str, request: Any) -> Any:
        if path == rpc_methods.SCORE.path:
            return _scored(request)
        if path == rpc_methods.EMBED.path:
            return _embedded(request)
        if path == rpc_methods.TOKENIZE.path:
            return pb.TokenizeResponse(token_ids=_tokens(prompt_text(request)))
        if path == rpc_methods.DETOKENIZE.path:
            return pb.DetokenizeResponse(text=bytes(request.token_ids).decode(errors="replace"))
        if path == rpc_methods.SUBMIT.path:
            kept = (request.request, self._reply(request.request))
            with self._lock:
                self._submitted[request.request.request_id] = kept
            return pb.SubmitResponse(request_id=request.request.request_id)
        if path == rpc_methods.CANCEL.path:
            with self._lock:
                return pb.CancelResponse(found=self._submitted.pop(request.request_id, None) is not None)
        if path == rpc_methods.GET_RESULT.path:
            return self._result(request.request_id)
        answers = {rpc_methods.GET_MODEL.path: self.model, rpc_methods.GET_STATS.path: self.stats}
        return self.health if path == rpc_methods.HEALTH.path else answers[path]

    def _result(self, request_id: str) -> pb.GetResultResponse:
        """Return the result of a submitted request, which is complete at once."""
        with self._lock:
            kept = self._submitted.get(request_id)
        if kept is None:
            raise UnknownRequest("nothing was submitted under this request_id")
        found = pb.GetResultResponse(state=pb.RESULT_STATE_FINISHED)
        try:
            for step in _played(kept[1], kept[0], 0):
                if isinstance(step, pb.GenerateResponse):
                    found.response.text += step.text
                    found.response.token_ids.extend(step.token_ids)
                    found.response.reasoning += step.reasoning
                    found.response.tool_calls.extend(step.tool_calls)
        except LineclearError as error:
            found.state = pb.RESULT_STATE_FAILED
            found.error.CopyFrom(to_status(error))
        return found

    def _count_cancelled(self) -> None:
        with self._lock:
            self.cancelled += 1


def prompt_text(request: pb.GenerateRequest | pb.TokenizeRequest) -> str:
    """Return the text by which the script finds a prompt."""
    if request.HasField("chat"):
        return request.chat.messages[-1].content if request.chat.messages else ""
    if isinstance(request, pb.GenerateRequest) and request.HasField("token_ids"):
        return bytes(token % 256 for token in request.token_ids.ids).decode(errors="replace")
    return request.text


def _scored(request: pb.ScoreRequest) -> pb.ScoreResponse:
    """Return scores by which a shorter continuation is more probable."""
    response = pb.ScoreResponse(prompt_tokens=len(_tokens(request.text)))
    for entry in request.continuations:
        ids = list(entry.token_ids.ids) or _tokens(entry.text)
        logprobs = [pb.TokenLogprobs(logprob=-1.0) for _ in ids]
        response.scores.add(token_ids=ids, logprobs=logprobs, total_logprob=-float(len(ids)))
    return response


def _embedded(request: pb.EmbedRequest) -> pb.EmbedResponse:
    """Return vectors of length 1 that depend on the input."""
    response = pb.EmbedResponse()
    for entry in request.inputs:
        ids = list(entry.token_ids.ids) or _tokens(entry.text)
        angle = float(sum(ids))
        response.embeddings.add(values=[math.cos(angle), math.sin(angle)], prompt_tokens=len(ids))
        response.prompt_tokens += len(ids)
    return response


def _queue(replies: Script) -> deque[Reply]:
    queue = deque([replies] if isinstance(replies, str | Answer | LineclearError) else replies)
    if not queue:
        raise ValueError("a list of replies has at least one")
    return queue


def _tokens(text: str) -> list[int]:
    return list(text.encode())


def _played(reply: Reply, request: pb.GenerateRequest, number: int) -> Iterator[pb.GenerateResponse | float]:
    """Yield the responses of a reply, and a number of seconds before each pause."""
    if isinstance(reply, LineclearError):
        raise reply
    answer = Answer(text=reply) if isinstance(reply, str) else reply
    prompt_tokens = len(_tokens(prompt_text(request)))
    request_id = request.request_id or f"fake-{number}"
    have = _received(request)
    for index in have:
        seed = output_seed(request.sampling.seed, index)
        num_outputs = max(request.sampling.n, 1)
        started = pb.Started(request_id=request_id, prompt_tokens=prompt_tokens, seed=seed, num_outputs=num_outputs)
        begin = pb.GenerateResponse(started=started, index=index)
        if request.output.echo and index == 0 and not have[0]:
            text = prompt_text(request)
            begin.prompt_echo.CopyFrom(pb.PromptEcho(text=text, token_ids=_tokens(text)))
        yield begin
    first_index = 0
    for part in _parts(answer):
        tokens = _tokens(part) if isinstance(part, str) else _tokens(part.reasoning or part.tool_calls[0].arguments)
        for index, num_received in have.items():
            if first_index >= num_received:
                yield answer.delay_seconds
                piece = _piece(request, part if isinstance(part, str) else "", tokens, first_index)
                if not isinstance(part, str):
                    piece.MergeFrom(part)
                piece.index = index
                yield piece
        first_index += len(tokens)
    if answer.error is not None and not request.HasField("resume"):
        raise answer.error
    for index in have:
        finished = pb.Finished(
            finish_reason=pb.FinishReason.Value(f"FINISH_REASON_{_reason(answer).upper()}"),
            matched_stop_string=answer.matched_stop,
            usage=pb.Usage(prompt_tokens=0 if index else prompt_tokens, completion_tokens=first_index),
        )
        yield pb.GenerateResponse(first_index=first_index, finished=finished, index=index)


def _received(request: pb.GenerateRequest) -> dict[int, int]:
    """Return how many tokens the caller has of each output that is not complete."""
    resume = request.resume
    if resume.outputs:
        return {i: len(output.token_ids) for i, output in enumerate(resume.outputs) if not output.is_complete}
    return {i: 0 if i else len(resume.token_ids) for i in range(max(request.sampling.n, 1))}


def _parts(answer: Answer) -> Iterator[str | pb.GenerateResponse]:
    """Yield the texts of an answer, and its reasoning and calls as responses."""
    if answer.reasoning:
        yield pb.GenerateResponse(reasoning=answer.reasoning)
    yield from answer.parts()
    for index, call in enumerate(answer.tool_calls):
        delta = pb.ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
        yield pb.GenerateResponse(tool_calls=[delta])


def _reason(answer: Answer) -> FinishReason:
    is_stop = answer.finish_reason is FinishReason.STOP_EOS
    return FinishReason.TOOL_CALLS if is_stop and answer.tool_calls else answer.finish_reason


def _piece(request: pb.GenerateRequest, text: str, tokens: list[int], first_index: int) -> pb.GenerateResponse:
    output = request.output
    piece = pb.GenerateResponse(first_index=first_index, token_ids=tokens, text="" if output.omit_text else text)
    if output.logprobs:
        tops, given = map(_zeros, (range(output.top_logprobs), output.logprob_token_ids))
        entry = pb.TokenLogprobs(logprob=0.0, top_logprobs=tops, token_id_logprobs=given)
        piece.logprobs.extend(entry for _ in tokens)
    if output.token_timings:
        piece.token_times_us.extend(range(first_index, first_index + len(tokens)))
    return piece


def _zeros(token_ids: Iterable[int]) -> list[pb.TopLogprob]:
    return [pb.TopLogprob(token_id=token_id, logprob=0.0) for token_id in token_ids]


class _FakeCall:
    """A running fake call of either client: its script, its deadline and whether it is cancelled."""

    def __init__(
        self,
        script: Iterator[Any],
        timeout_seconds: float | None,
        count_cancelled: Callable[[], None],
        stop: Event | AsyncEvent,
    ) -> None:
        self._script = script
        self._deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._count_cancelled = count_cancelled
        self._stop: Any = stop
        self._is_late = self._ended = False

    def __next__(self) -> pb.GenerateResponse:
        while isinstance(step := self._next(), float):
            self._stop.wait_for(self._bounded(step))
        if step is None:
            raise StopIteration
        return step

    async def __anext__(self) -> pb.GenerateResponse:
        await asyncio.sleep(0)  # other tasks run, as during a real call
        while isinstance(step := self._next(), float):
            await self._stop.wait_for(self._bounded(step))
        if step is None:
            raise StopAsyncIteration
        return step

    def cancel(self) -> None:
        if not self._ended and not self._stop.is_set():
            self._count_cancelled()
        self._stop.set()

    def _next(self) -> pb.GenerateResponse | float | None:
        """Return a response, seconds to wait, or None at the end."""
        if self._stop.is_set():
            raise Cancelled("the call was cancelled")
        try:
            if self._is_late:
                raise DeadlineExceeded("the deadline of the call passed before the answer was complete")
            return cast("pb.GenerateResponse | float", next(self._script))
        except StopIteration:
            self._ended = True
            return None
        except LineclearError:
            self._ended = True
            raise

    def _bounded(self, seconds: float) -> float:
        """Return the seconds to wait: at most until the deadline."""
        left = self._deadline - time.monotonic()
        self._is_late = seconds >= left
        return min(seconds, max(left, 0.0))
