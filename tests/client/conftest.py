"""A scripted gRPC server, and one interface for both clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from support.time_limits import PATIENCE_SECONDS

from lineclear.client import AsyncClient, Client
from lineclear.errors import LineclearError, QueueFull, UnknownRequest
from lineclear.status_codec import TRAILER, to_status
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc as pb_grpc

Script = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]
Step = pb.GenerateResponse | LineclearError | tuple[grpc.StatusCode, str] | Callable[[grpc.ServicerContext], object]
"""A part of a scripted call: a response, an error or a status that ends the call, or a function to run."""
SessionScript = Callable[[Iterator[pb.SessionRequest], grpc.ServicerContext], Iterator[pb.SessionResponse]]


def started(**fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.Started(request_id="r", **fields))


def tokens(first_index: int, *ids: int, text: str = "", **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(first_index=first_index, token_ids=ids, text=text, **fields)


def finished(first_index: int, **fields: Any) -> pb.GenerateResponse:
    fields.setdefault("finish_reason", pb.FINISH_REASON_LENGTH)
    return pb.GenerateResponse(first_index=first_index, finished=pb.Finished(**fields))


def echo(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """The prompt again, a word and a token at a time."""
    text = request.chat.messages[-1].content if request.HasField("chat") else request.text
    words = text.split()
    yield started(prompt_tokens=len(words))
    for index, word in enumerate(words):
        yield tokens(index, index + 100, text=word if index == 0 else f" {word}")
    yield finished(len(words), usage=pb.Usage(prompt_tokens=len(words), completion_tokens=len(words)))


class ScriptedServer(pb_grpc.InferenceServiceServicer):
    """Runs `script` for every Generate and records the requests.

    `failures` are the errors of the next calls, `refused` those of prompts. `session` runs for every Session; without
    one the server has no room for a Session.
    """

    def __init__(self, address: str, credentials: grpc.ServerCredentials | None = None) -> None:
        self.script: Script = echo
        self.session: SessionScript | None = None
        self.failures: list[LineclearError] = []
        self.refused: dict[str, LineclearError] = {}
        self.requests: list[pb.GenerateRequest] = []
        self.submitted: dict[str, pb.GenerateRequest] = {}
        self.metadata: list[dict[str, Any]] = []
        self.remaining_seconds: list[float | None] = []
        self.ended = threading.Event()  # a call of Generate ended, however it did
        self.health_answers: list[bytes | grpc.StatusCode] = [b"\x08\x01"]  # the last one stays
        self.health_asked: list[bytes] = []
        self.max_batch_size = 0
        self.open = 0
        self.most_open = 0
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        check = grpc.unary_unary_rpc_method_handler(self._check)  # bytes in, bytes out
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),)
        )
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        self.target = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait(PATIENCE_SECONDS)

    def stop_soon(self, context: grpc.ServicerContext) -> None:
        threading.Thread(target=self.stop).start()
        self.wait_for_end(context)

    def play(self, *calls: Sequence[Step]) -> None:
        """Answer each call of Generate and Attach with the next of `calls`, and any further call with the last one."""
        remaining = list(calls)

        def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
            for step in remaining.pop(0) if len(remaining) > 1 else remaining[0]:
                if isinstance(step, pb.GenerateResponse):
                    yield step
                elif isinstance(step, LineclearError):
                    self.fail(context, step)
                elif isinstance(step, tuple):
                    context.abort(*step)
                else:
                    step(context)

        self.script = script

    def fail(self, context: grpc.ServicerContext, error: LineclearError) -> None:
        context.set_trailing_metadata(((TRAILER, to_status(error).SerializeToString()),))
        context.abort(grpc.StatusCode[error.code], str(error))

    def wait_for_end(self, context: grpc.ServicerContext) -> None:
        """Until this very call is over: cancelled, in these tests."""
        ended = threading.Event()
        if context.add_callback(ended.set):
            assert ended.wait(PATIENCE_SECONDS)

    def hold(self) -> None:
        """Answer with one token, and then with nothing until the call ends."""
        self.play([started(), tokens(0, 1, text="a"), self.wait_for_end])

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        with self._lock:
            self.requests.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            self.remaining_seconds.append(context.time_remaining())
            failure = self.refused.get(request.text) or (self.failures.pop(0) if self.failures else None)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        if not context.add_callback(self.ended.set):
            self.ended.set()
        try:
            if failure is not None:
                self.fail(context, failure)
            yield from self.script(request, context)
        finally:
            with self._lock:
                self.open -= 1

    def Session(
        self, orders: Iterator[pb.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.SessionResponse]:
        if self.session is None:
            self.fail(context, QueueFull("no session is free", retry_after_seconds=1.0))
        yield from self.session(orders, context)

    def Submit(self, request: pb.SubmitRequest, context: grpc.ServicerContext) -> pb.SubmitResponse:
        self.submitted[request.request.request_id] = request.request
        return pb.SubmitResponse(request_id=request.request.request_id)

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> Iterator[pb.AttachResponse]:
        for response in self.script(self._of(request.request_id, context), context):
            if response.HasField("started") or response.first_index >= request.from_index:
                yield pb.AttachResponse(response=response)

    def GetResult(self, request: pb.GetResultRequest, context: grpc.ServicerContext) -> pb.GetResultResponse:
        found = pb.GetResultResponse(state=pb.RESULT_STATE_RUNNING)
        for response in self.script(self._of(request.request_id, context), context):
            found.response.text += response.text
            found.response.token_ids.extend(response.token_ids)
        return found

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelResponse:
        return pb.CancelResponse(found=self.submitted.pop(request.request_id, None) is not None)

    def _of(self, request_id: str, context: grpc.ServicerContext) -> pb.GenerateRequest:
        if request_id not in self.submitted:
            self.fail(context, UnknownRequest("not here"))
        return self.submitted[request_id]

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        text = request.chat.messages[0].content if request.HasField("chat") else request.text
        return pb.TokenizeResponse(token_ids=text.encode())

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode() + "!" * request.keep_special_tokens)

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:
        return pb.GetModelResponse(
            model_id="tiny",
            context_length=512,
            eos_token_ids=[2, 7],
            limits=pb.Limits(num_blocks=99, max_batch_size=self.max_batch_size),
        )

    def GetStats(self, request: pb.GetStatsRequest, context: grpc.ServicerContext) -> pb.GetStatsResponse:
        answer = pb.GetStatsResponse(
            counters=pb.Counters(requests_finished=17),
            gauges=pb.Gauges(num_requests_running=3, draining=True),
            request_queue_time_seconds=pb.Quantiles(p50=0.25, count=8),
            server_version="9.9",
            workers=[pb.WorkerStats(weight_bytes=221 << 20, kv_cache_bytes=3 << 30, load_seconds=4.25)],
        )
        answer.uptime.FromMilliseconds(1500)
        return answer

    def _check(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.health_asked.append(request)
        answer = self.health_answers.pop(0) if len(self.health_answers) > 1 else self.health_answers[0]
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, "no health today")
        assert isinstance(answer, bytes)
        return answer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer("127.0.0.1:0")
    yield server
    server.stop()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Either:
    """Both clients with one interface: `generate(...)` and the others return or raise what the client does.

    Each call makes a new client.
    """

    def __init__(self, kind: str, target: str, **settings: Any) -> None:
        self.kind = kind
        self.target = target
        self.settings: dict[str, Any] = {"max_attempts": 1} | settings

    def with_settings(self, **settings: Any) -> Either:
        return Either(self.kind, self.target, **(self.settings | settings))

    def run(self, act: Callable[[Any], Any]) -> Any:
        """Return or raise what `act` does with a new client. What it returns of an AsyncClient is awaited."""
        if self.kind == "sync":
            with Client(self.target, **self.settings) as client:
                return act(client)

        async def run() -> Any:
            async with AsyncClient(self.target, **self.settings) as client:
                return await act(client)

        return asyncio.run(run())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(lambda client: getattr(client, name)(*args, **kwargs))

    def read(self, *args: Any, take: int | None = None, **kwargs: Any) -> tuple[list[Any], Any]:
        """The deltas of a stream, at most `take`, and the stream after its block."""
        deltas: list[Any] = []

        def see(delta: Any) -> bool:
            deltas.append(delta)
            return len(deltas) == take

        return deltas, self.each("stream", see, *args, **kwargs)

    def each(self, name: str, see: Callable[[Any], object], *args: Any, **kwargs: Any) -> Any:
        """Call `see` with each item of a stream or a batch until it returns True. Returns the stream or batch."""
        if self.kind == "sync":
            with Client(self.target, **self.settings) as client:
                items = getattr(client, name)(*args, **kwargs)
                with items if name == "stream" else contextlib.nullcontext():
                    for item in items:
                        if see(item) is True:
                            break
                self.after_block()
                return items

        async def run() -> Any:
            async with AsyncClient(self.target, **self.settings) as client:
                items = getattr(client, name)(*args, **kwargs)
                async with items if name == "stream" else contextlib.nullcontext():
                    async for item in items:
                        if see(item) is True:
                            break
                await asyncio.to_thread(self.after_block)
                return items

        return asyncio.run(run())

    def after_block(self) -> None:
        """Called by `each` between leaving the stream's block and closing the client; a test may replace it."""


@pytest.fixture
def cli(server: Any) -> Any:
    from typer.testing import CliRunner, Result  # here: the other tests do without the packages of the command

    from lineclear.cli.app import app

    def invoke(*arguments: str, input: str | None = None) -> Result:
        environment = {"LINECLEAR_TARGET": server.target, "COLUMNS": "120", "NO_COLOR": "1"}
        result = CliRunner().invoke(app, list(arguments), input=input, env=environment, prog_name="lineclear")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture(params=["sync", "asyncio"])
def client(request: pytest.FixtureRequest, server: ScriptedServer) -> Either:
    return Either(request.param, server.target)
