"""Run the real service and listeners in this process, over a fake engine that the test controls."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import grpc.aio
from support.events import step_tokens
from support.small_tokenizers import byte_level, definition
from support.waiting import until

from lineclear.errors import Cancelled, LineclearError, ServerDraining
from lineclear.scheduler.core.events import (
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    QueuePosition,
    RequestStats,
    Scored,
    Started,
    StepTokens,
    WorkerJoined,
    WorkerLost,
)
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.engine.engine_stats import EngineSnapshot, WorkerStatus
from lineclear.scheduler.grpc_api.server import Server
from lineclear.scheduler.observe.scheduler_state import TakenState
from lineclear.scheduler.observe.step_feed import StepFeed
from lineclear.scheduler.observe.step_history import StepHistory
from lineclear.scheduler.requests.request_manager import RequestManager
from lineclear.scheduler.requests.services import RequestServices
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.template_renderer import ChatTemplate
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.status_codec import TRAILER, from_trailer
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc, steps_pb2
from lineclear.wire.messages import Hello, Logprobs, Profiled, Scores

BOUND_SECONDS = 60.0
"""How long a test waits for an event that must happen."""

EOS = 1
HELLO = Hello(
    epoch=7,
    num_blocks=64,
    block_size=16,
    num_slots=8,
    max_model_len=128,
    vocab_size=512,
    eos_token_ids=(EOS,),
    max_step_tokens=256,
    model_id="test-model",
    family="llama",
    dtype="float32",
    device="cpu",
    attention_backend="toy",
    forward_pass="modules",
    forward_pass_reason="it is a toy",
    pid=4711,
    torch_version="0",
    transformers_version="0",
    model_fingerprint="0123456789abcdef",
)
TOKENIZER = Tokenizer(definition(byte_level()))
HELLO_IDS = TOKENIZER.encode_sealed("Hello, how are you?")
SMILE = "Hello, how are you? 😀"
"""Tokens of a text whose last character has several tokens."""
SMILE_IDS = TOKENIZER.encode_sealed(SMILE)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


class FakeEngine:
    """An engine that emits events at the call of the test, or computes the whole answer at once with `answer`.

    Records the calls of the service: `requests` by key, `cancelled`, `stopped` (key, num_tokens), `is_draining`.
    """

    def __init__(self, publish: Callable[[Sequence[Event]], None]) -> None:
        self.requests: dict[str, Request] = {}
        self.submitted: list[Request] = []
        self.prepared: list[str] = []
        self.cancelled: list[str] = []
        self.stopped: list[tuple[str, int]] = []
        self.is_draining = False
        self.answer: Callable[[Request], Sequence[int]] | None = None
        self.refusal: LineclearError | None = None
        self.position: QueuePosition | None = None
        self.predicted_wait: float | None = None
        self.worker_status = WorkerStatus()
        self._publish = publish
        self._records: dict[str, RequestStats] = {}
        self._core = Scheduler(CoreLimits())

    # --- called by the service ---

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self._submit(request)

    def _submit(self, request: Request) -> None:
        self.submitted.append(request)
        self._records[request.request_id] = RequestStats(monotonic(), len(request.prompt), len(request.output))
        if self.is_draining or self.refusal is not None:
            self.requests[request.request_id] = request
            self.fail(request.request_id, self.refusal or ServerDraining("no"))
            return
        self.requests[request.request_id] = request
        self._publish([Admitted(request.request_id, self.position if request.wants_position else None)])
        if self.answer is not None:
            self.start(request.request_id)
            tokens = list(self.answer(request))[len(request.output) :]
            for token in tokens:
                self.tokens(request.request_id, [token])
            self.finish_by(request.request_id, *_end(request, tokens))

    def prepare_grammar(self, grammar: str, done: Callable[[], None]) -> None:
        self.prepared.append(grammar)
        done()

    def cancel(self, request_id: str, error: LineclearError | None = None) -> None:
        self.cancelled.append(request_id)
        if request_id in self.requests:
            self.fail(request_id, error or Cancelled("cancelled"))

    def finish(self, request_id: str, num_tokens: int) -> None:
        self.stopped.append((request_id, num_tokens))
        if request_id in self.requests:
            record = self._records[request_id]
            self._records[request_id] = replace(record, completion_tokens=num_tokens)
            self.finish_by(request_id, FinishReason.STOP_STRING)

    def drain(self) -> None:
        self.is_draining = True

    def load_adapter(self, key: bytes, path: str) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def unload_adapter(self, key: bytes) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(0)
        return done

    def snapshot(self) -> EngineSnapshot:
        core = replace(self._core.snapshot(), predicted_wait_seconds=self.predicted_wait)
        return EngineSnapshot(core, self.worker_status)

    def fresh_snapshot(self) -> Future[EngineSnapshot]:
        taken: Future[EngineSnapshot] = Future()
        taken.set_result(self.snapshot())
        return taken

    # --- called by the test ---

    async def next_request(self, number: int = 1) -> str:
        """Wait for the number-th request and return its key."""
        await until(lambda: len(self.submitted) >= number)
        return self.submitted[number - 1].request_id

    def join(self, hello: Hello = HELLO) -> None:
        self.worker_status = WorkerStatus(hello, hello, num_joins=1)
        self._publish([WorkerJoined(hello.epoch)])

    def lose(self) -> None:
        self.worker_status = replace(self.worker_status, hello=None)
        self._publish([WorkerLost(HELLO.epoch)])

    def start(self, key: str, cached_tokens: int = 0) -> None:
        self._records[key] = replace(self._records[key], started_at=monotonic(), cached_tokens=cached_tokens)
        hello = self.worker_status.hello
        fingerprint = "" if hello is None else hello.model_fingerprint
        self._publish([Started(key, 3, 12, cached_tokens, fingerprint)])

    def tokens(self, key: str, tokens: Sequence[int], logprobs: Sequence[Logprobs] = ()) -> None:
        self._publish([self._ready(key, tokens, logprobs)])

    def scored(self, key: str, first_position: int, scores: Scores) -> None:
        self._publish([Scored(key, first_position, scores)])

    def step(self, tokens: dict[str, list[int]]) -> None:
        self._publish([self._ready(key, ids, ()) for key, ids in tokens.items()])

    def _ready(self, key: str, tokens: Sequence[int], logprobs: Sequence[Logprobs]) -> StepTokens:
        record, now = self._records[key], monotonic()
        event = step_tokens(key, record.completion_tokens, tokens, logprobs)
        self._records[key] = replace(
            record,
            completion_tokens=record.completion_tokens + len(tokens),
            first_token_at=record.first_token_at or now,
            last_token_at=now,
        )
        return event

    def finish_by(self, key: str, reason: FinishReason, matched_token_id: int | None = None) -> None:
        if self.requests.pop(key, None) is not None:
            self._publish([Finished(key, reason, matched_token_id, self._end(key))])

    def fail(self, key: str, error: LineclearError) -> None:
        if self.requests.pop(key, None) is not None:
            self._publish([Failed(key, error, self._end(key))])

    def _end(self, key: str) -> RequestStats:
        return replace(self._records[key], ended_at=monotonic())


def _end(request: Request, tokens: Sequence[int]) -> tuple[FinishReason, int | None]:
    """Return why an answer with these last tokens is finished."""
    if tokens and tokens[-1] in request.sampling.stop_ids:
        return (FinishReason.STOP_EOS if tokens[-1] in request.eos_ids else FinishReason.STOP_TOKEN), tokens[-1]
    return FinishReason.LENGTH, None


class FakeOperations:
    """Operations that record their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failure: LineclearError | None = None
        self.history = StepHistory()
        self.steps = StepFeed(self.history, lambda call: call(), self._state, max_watchers=2)

    def _state(self) -> TakenState:
        return TakenState(steps_pb2.SchedulerState())

    def shut_down(self) -> None:
        self.calls.append("shut_down")

    async def dump_recording(self) -> Path:
        self.calls.append("dump")
        if self.failure is not None:
            raise self.failure
        return Path("recordings/flight-0.jsonl")

    async def restart_workers(self) -> list[int]:
        self.calls.append("restart")
        if self.failure is not None:
            raise self.failure
        return [12, 13]

    def flush_prefix_cache(self) -> None:
        self.calls.append("flush")

    async def switch_scheduling(self, settings: SchedulerSettings) -> None:
        self.calls.append(f"switch to {settings.scheduling_policy}")

    async def profile(self, num_steps: int, worker: int, seconds: float) -> Profiled:
        self.calls.append(f"profile {num_steps} {worker} {seconds:g}")
        if self.failure is not None:
            raise self.failure
        return Profiled(1, num_steps, b"trace")

    def set_log_level(self, level: str) -> str:
        self.calls.append(level)
        return "info"


class Serving:
    """A server that listens, its engine and a client."""

    def __init__(
        self, manager: RequestManager, server: Server, engine: FakeEngine, operations: FakeOperations, channel: Any
    ) -> None:
        self.manager, self.service = manager, manager.services
        self.server, self.engine, self.channel = server, engine, channel
        self.operations = operations
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)

    def stub_of(self, channel: Any) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(channel)

    def generate(self, request: pb.GenerateRequest | None = None, **options: Any) -> Any:
        return self.stub.Generate(request or text_request(), **options)

    async def start_call(self, request: pb.GenerateRequest | None = None, *, cached_tokens: int = 0) -> tuple[Any, str]:
        """Start a first call, wait for its first message, and return the call and the engine's key."""
        call = self.generate(request)
        key = await self.engine.next_request()
        self.engine.start(key, cached_tokens)
        return call, key

    async def idle(self) -> None:
        await until(lambda: len(self.service.streams) == 0)


def text_request(text: str = "quick", **fields: Any) -> pb.GenerateRequest:
    """Return the smallest valid request."""
    return pb.GenerateRequest(text=text, **fields)


@contextlib.asynccontextmanager
async def serving(
    path: Path,
    *,
    joined: bool = True,
    template: str | None = TEMPLATE,
    model_defaults: dict[str, Any] | None = None,
    tokenizer: Any = TOKENIZER,
    model: Path | None = None,
    plaintext: bool = True,
    **settings: Any,
) -> AsyncIterator[Serving]:
    """Run a server with a joined worker on a Unix socket below `path`, with a channel to it if that is `plaintext`."""
    chosen = SchedulerSettings(**{"model": "m", "listen": f"unix:{path}/s", **settings})
    chat = None if template is None else ChatTemplate(template, tokenizer.seal, {})
    engine = FakeEngine(lambda events: services.streams.publish(events))
    services = RequestServices(chosen, engine, tokenizer, chat, model_defaults, model)
    manager = RequestManager(services)
    operations = FakeOperations()
    server = Server(manager, operations)
    services.on_worker = server.set_worker
    await server.start()
    if joined:
        engine.join()
        await until(lambda: server.health.is_serving("readiness"))
    channel = grpc.aio.insecure_channel(server.address if plaintext else f"unix:{path}/nobody")
    try:
        yield Serving(manager, server, engine, operations, channel)
    finally:
        await channel.close()
        await server.stop(0)
        manager.close()


async def error_of(call: Any) -> LineclearError:
    """Return the error that ends `call`, as a client library raises it."""
    try:
        if hasattr(call, "read"):
            while (await call.read()) is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        trailers = dict(error.trailing_metadata() or ())
        return from_trailer(error.code().name, error.details() or "", trailers.get(TRAILER))
    raise AssertionError("the call went well")


async def read_all(call: Any, first_index: int = 0) -> list[pb.GenerateResponse]:
    """Read every response of a Generate, or of an Attach from `first_index`; check for gaps and a normal end."""
    responses: list[pb.GenerateResponse] = []
    expected = first_index
    while (message := await call.read()) is not grpc.aio.EOF:
        response = message.response if isinstance(message, pb.AttachResponse) else message
        assert response.first_index == expected
        expected += len(response.token_ids)
        responses.append(response)
    assert [r.HasField("started") for r in responses] == [True] + [False] * (len(responses) - 1)
    assert [r.HasField("finished") for r in responses] == [False] * (len(responses) - 1) + [True]
    return responses


def tokens_of(responses: Sequence[pb.GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.token_ids]


def text_of(responses: Sequence[pb.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)
