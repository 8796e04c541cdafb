"""lineclear.v1.InferenceService: map calls to requests, and output to responses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import structlog
from google.protobuf.message import Message
from prometheus_client.core import Metric

from lineclear.errors import (
    LineclearError,
    ServerDraining,
    ShutdownInterrupted,
    Unauthenticated,
    UnknownRequest,
)
from lineclear.scheduler.core.events import Event, StepTokens
from lineclear.scheduler.engine.engine_stats import EngineSnapshot, WantedWorker, WorkerStatus
from lineclear.scheduler.grpc_api.error_interceptor import incident
from lineclear.scheduler.grpc_api.response_writer import Context, ResponseWriter
from lineclear.scheduler.metrics import families
from lineclear.scheduler.requests import prompt_requests, status_messages
from lineclear.scheduler.requests.adapter_use import adapter_use
from lineclear.scheduler.requests.adapters import AdapterEngine, Adapters
from lineclear.scheduler.requests.admission import Admission, has_request, note_request
from lineclear.scheduler.requests.grammar_pool import GrammarPool
from lineclear.scheduler.requests.loop_pacer import SMALL_BYTES, LoopPacer
from lineclear.scheduler.requests.output_length import OutputLengths, load_estimator
from lineclear.scheduler.requests.output_router import OutputRouter
from lineclear.scheduler.requests.output_stream import Canceller
from lineclear.scheduler.requests.queue_limits import QueueLimiter
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.requests.request_stats import ServerStats
from lineclear.scheduler.requests.responses import read_answer
from lineclear.scheduler.requests.served_model import ServedModel
from lineclear.scheduler.requests.services import Call, RequestServices, Submitter
from lineclear.scheduler.requests.session import Session, session_headers
from lineclear.scheduler.requests.submitted_requests import SubmittedRequests
from lineclear.scheduler.requests.tokenizer_pool import TokenizerPool
from lineclear.scheduler.requests.validate import request as validation
from lineclear.scheduler.requests.validate.request import ModelBounds
from lineclear.scheduler.requests.validate.sampling import model_defaults
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.tls import ServerCertificates
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.parsed_answer import AnswerParsers
from lineclear.scheduler.text.parser_choice import choose_parsers
from lineclear.scheduler.text.template_renderer import ChatTemplate
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.status_codec import to_status
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc

log = structlog.get_logger()

NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
VERSION = version("lineclear")
_BYTES_PER_TOKEN = 8  # bounds Detokenize by max_prompt_bytes, also without a worker
_SLICE_TOKENS = 16_384  # of a response of Tokenize: converted in 0.3 ms
_FRESH_SECONDS = 0.5
_NEVER_SECONDS = 10 * 365 * 86_400.0


class EngineApi(Submitter, Canceller, AdapterEngine, Protocol):
    """The engine methods that the service uses."""

    def drain(self) -> None:
        """Reject new requests."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Return counters and gauges of a moment ago."""
        ...

    def fresh_snapshot(self) -> Future[EngineSnapshot]:
        """Return counters and gauges of this moment."""
        ...

    @property
    def worker_status(self) -> WorkerStatus:
        """Which worker is joined."""
        ...


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The handlers, on the event loop that runs when it is created.

    The engine's thread calls `publish`. `on_worker` is called on the loop when a worker joins or is lost,
    `on_fatal` after an event that could not be delivered.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        engine: EngineApi,
        tokenizer: Tokenizer,
        chat: ChatTemplate | None = None,
        generation_config: Mapping[str, Any] | None = None,
        model: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model` is the directory with the tokenizer."""
        self.on_worker: Callable[[WorkerStatus], None] = lambda status: None
        self.on_fatal: Callable[[BaseException], None] = lambda error: None
        self.wanted_workers: Callable[[], Sequence[WantedWorker]] = tuple
        """The workers that the server keeps running, for the statistics."""
        self.certificate: ServerCertificates | None = None
        """The certificate of the listeners, for the metrics."""
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._drain_ends_at: float | None = None
        self._sessions: set[Session] = set()
        self._pacer = LoopPacer(clock)
        self._stats = ServerStats(clock())
        self._incident = partial(incident, f"/{NAME}: a request")
        self.tokenizers = TokenizerPool(tokenizer, chat, settings, self._pacer)
        self.grammars = GrammarPool(model if tokenizer.has_byte_tokens else None, settings)
        self._parsers = _parsers(settings, chat)
        defaults = model_defaults(generation_config or {}) if settings.use_generation_config else {}
        self._model = ServedModel(settings, engine, defaults, tokenizer.vocab_size)
        self.quota = QueueLimiter(settings, clock)
        self.quota.predicted_wait = lambda: engine.snapshot().core.predicted_wait_seconds
        self.streams = OutputRouter(engine, settings.max_unread_tokens, self._on_worker_change, self._incident)
        self.adapters = Adapters(settings, engine, clock, model)
        services = RequestServices(
            settings=settings,
            tokenizers=self.tokenizers,
            grammars=self.grammars,
            parsers=self._parsers,
            streams=self.streams,
            engine=engine,
            lengths=OutputLengths(load_estimator(settings.output_length_estimator)),
            stats=self._stats,
            incident=self._incident,
            clock=clock,
        )
        self.requests = Admission(services, self.quota, self._pacer, self.adapters)
        self._submitted = SubmittedRequests(settings, self.quota.retry_after_seconds)

    def adapter_failed(self, key: bytes, problem: str) -> None:
        """Forget an adapter that a worker cannot load. Called by the engine's thread."""
        self._loop.call_soon_threadsafe(self.adapters.failed, key, problem)

    @property
    def settings(self) -> SchedulerSettings:
        """The settings in force."""
        return self._settings

    @property
    def num_slots(self) -> int | None:
        """Slots of the joined worker; None without one."""
        hello = self._engine.worker_status.hello
        return None if hello is None else hello.num_slots

    def follow(self, settings: SchedulerSettings) -> None:
        """Follow changed scheduling settings."""
        self._settings = settings
        self.quota.settings = settings

    async def prepare(self) -> None:
        """Start the processes that render chat templates."""
        await self.tokenizers.prepare()

    def publish(self, events: Sequence[Event]) -> None:
        """Deliver events of the engine. Thread-safe; does not wait."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, list(events), self._clock())
        except RuntimeError:  # the loop is closed
            if not self._is_closed:
                raise

    # --- shutdown ----------------------------------------------------------------------------------------------------

    def refuse(self, error: Callable[[], LineclearError]) -> None:
        """Reject new requests with `error()`: the server shuts down, or will get no worker."""
        self._model.reject(error)
        for session in self._sessions:
            session.drain(error())

    async def drain(self, timeout_seconds: float) -> None:
        """Reject new requests, wait for those in progress, and end the rest with ShutdownInterrupted."""
        self.refuse(lambda: ServerDraining("the server is shutting down", retry_after_seconds=1.0))
        self._engine.drain()
        self._drain_ends_at = self._clock() + timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.streams.wait_until_idle()
        except TimeoutError:
            self.fail_all(shutdown_interrupted)

    @property
    def drain_remaining_seconds(self) -> float | None:
        """Time until the drain ends the remaining requests; None without a drain."""
        return None if self._drain_ends_at is None else max(0.0, self._drain_ends_at - self._clock())

    def fail_all(self, error: Callable[[RequestContext], LineclearError]) -> None:
        """Cancel every request. Each client gets the error after the tokens before it."""
        for request in self.requests:
            request.cancel(error(request))

    def close(self) -> None:
        """Stop threads and processes. No call may be in progress."""
        self._is_closed = True
        self.tokenizers.close()
        self.grammars.close()

    def _dispatch(self, events: Sequence[Event], at: float) -> None:
        try:
            count = sum(len(event.tokens) for event in events if isinstance(event, StepTokens))
            if count:
                self._stats.add_tokens(count, at)
            self.streams.dispatch(events, at)
        except Exception as error:  # the loop would only log it, and streams would wait forever
            self.on_fatal(error)

    def _on_worker_change(self, joined: bool) -> None:
        if joined:
            self._model.bounds()
        self.on_worker(self._engine.worker_status)

    # --- Generate and Session ----------------------------------------------------------------------------------------

    async def Generate(  # type: ignore[override]  # writes to the context instead of returning an iterator
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Stream the answer to one request. A hang-up cancels it."""
        live = self.requests.admit(request, await self._call(request, context))
        async with self._response_writer(context) as writer:
            with live:
                await live.submit(request)
                while not live.is_closed:
                    await live.wait()
                    for response, _, error in read_answer(live):
                        if error is not None:
                            raise error
                        await writer.write(response)

    async def Session(  # type: ignore[override]  # writes to the context instead of returning an iterator
        self, orders: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        """Process the commands of one client and stream the output of all its requests, until it closes its side."""
        remaining = context.time_remaining()
        caller = identity.caller(context)
        tenant = identity.tenant(caller, context)
        identity.set_flow(tenant, context)  # inherited by the tasks of the session
        is_valid, is_in_time = identity.validity(), identity.certificate_validity(context)

        def require() -> ModelBounds:
            if not is_valid():
                error = Unauthenticated("the token of this Session is no longer valid")
                session.drain(error)
                raise error
            if not is_in_time():
                error = Unauthenticated("the client certificate of this Session has expired")
                session.drain(error)
                raise error
            return self._model.require()

        session = Session(
            self.requests,
            caller,
            tenant,
            require,
            self._incident,
            self._clock,
            deadline=None if remaining is None else self._clock() + remaining,
        )
        writer = self._response_writer(context)
        # Clients wait for the headers before they send commands.
        await writer.send_headers(session_headers(self._settings.max_request_bytes))
        if (rejection := self._model.rejection()) is not None:
            session.drain(rejection)
        self._sessions.add(session)
        reader = asyncio.ensure_future(session.run(orders))
        age_timer = self._drain_at_max_age(session.drain)
        try:
            while (message := await session.next_response()) is not None:
                await writer.write(message)
        finally:
            self._sessions.discard(session)
            reader.cancel()
            age_timer.cancel()
            session.close()

    def _drain_at_max_age(self, drain: Callable[[LineclearError], None]) -> asyncio.Handle:
        """Drain a session when it reaches the maximum age of a connection."""
        seconds = self._settings.max_connection_age_seconds
        error = ServerDraining(
            "the Session has reached its maximum age (--max-connection-age-seconds); open another one",
            retry_after_seconds=0.0,
        )
        return self._loop.call_later(seconds or _NEVER_SECONDS, drain, error)

    # --- submitted requests ------------------------------------------------------------------------------------------

    async def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.SubmitResponse:
        """Start a request whose answer is kept for Attach and GetResult."""
        seconds = validation.seconds(request.timeout, "timeout") if request.HasField("timeout") else None
        call = (await self._call(request.request, context))._replace(seconds=seconds)
        self._submitted.check_unused(call.caller, request.request.request_id)  # no await between this and `admit`
        with self.requests.admit(request.request, call) as live:
            admission = live.outputs[0].admission()
            await live.submit(request.request)
            answer = self._submitted.add(live, live.max_tokens)
        await admission
        if answer.error is not None and not answer.has_started:
            self._submitted.remove(answer)
            raise answer.error
        return pb.SubmitResponse(request_id=live.request_id, queued=answer.queued)

    async def Attach(  # type: ignore[override]  # writes to the context instead of returning an iterator
        self, request: pb.AttachRequest, context: Context
    ) -> None:
        """Stream an answer from an index on."""
        answer = self._submitted.find(identity.caller(context), request.request_id)
        messages = answer.read(request.from_index, *request.more_from_indexes)
        note_request()
        async with self._response_writer(context) as writer:
            async for message in messages:
                await writer.write(pb.AttachResponse(response=message))

    async def GetResult(self, request: pb.GetResultRequest, context: Context) -> pb.GetResultResponse:
        """Return the answer so far."""
        answer = self._submitted.find(identity.caller(context), request.request_id)
        error = None if answer.error is None else to_status(answer.error)
        first, *others = answer.outputs
        return pb.GetResultResponse(
            state=answer.state, response=first.whole(), error=error, more_outputs=[output.whole() for output in others]
        )

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Cancel a live request of this caller, or remove its ended answer. An unknown one is no error."""
        caller = identity.caller(context)
        with contextlib.suppress(UnknownRequest):
            answer = self._submitted.find(caller, request.request_id)
            if answer.has_ended and not request.HasField("index"):
                self._submitted.remove(answer)
                return pb.CancelResponse(found=True)
        index = request.index if request.HasField("index") else None
        return pb.CancelResponse(found=self.requests.cancel(caller, request.request_id, index))

    async def _call(self, message: Message, context: Context) -> Call:
        """Return the call of a request once the request may be validated. Admit it at once."""
        # Read once: gRPC computes it from the wall clock, which may jump.
        remaining = context.time_remaining()
        caller = identity.caller(context)
        tenant = identity.tenant(caller, context)
        identity.set_flow(tenant, context)
        arrival = await self.requests.pace(message)
        return Call(self._model.require(), caller, tenant, arrival, remaining)

    def _response_writer(self, context: Context) -> ResponseWriter:
        return ResponseWriter(context, self._settings.stall_timeout_seconds)

    # --- scores and vectors ------------------------------------------------------------------------------------------

    async def Score(  # type: ignore[override]  # returns the encoded response
        self, request: pb.ScoreRequest, context: Context
    ) -> bytes:
        """Return the log-probabilities of continuations of a prompt. A hang-up cancels their requests."""
        call = await self._call(request, context)
        return await prompt_requests.score(request, self.requests, self.tokenizers, call)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Return the vectors of inputs. A hang-up cancels their requests."""
        call = await self._call(request, context)
        return await prompt_requests.embed(request, self.requests, self.tokenizers, call)

    # --- text and tokens ---------------------------------------------------------------------------------------------

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Return the token ids of a text or a conversation, as Generate computes them."""
        if request.ByteSize() > SMALL_BYTES:
            await self._pacer.wait()
        with self._pacer.measured():
            validation.check_tokenize(request, self._settings.max_prompt_bytes, self._settings.max_chat_messages)
        identity.set_flow(identity.tenant(identity.caller(context), context), context)
        if request.WhichOneof("input") == "chat":
            ids = await self.tokenizers.encode_chat(request.chat)
        else:
            ids = await self.tokenizers.encode(request.text)
        response = pb.TokenizeResponse()
        for start in range(0, len(ids), _SLICE_TOKENS):
            response.token_ids.extend(ids[start : start + _SLICE_TOKENS])
            if start + _SLICE_TOKENS < len(ids):
                await asyncio.sleep(0)  # streams are served in between
        return response

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Return the text of tokens, as Generate sends it."""
        bounds = self._model.bounds()
        vocab_size = self.tokenizers.tokenizer.vocab_size if bounds is None else bounds.vocab_size
        limit = max(self._settings.max_prompt_bytes // _BYTES_PER_TOKEN, 0 if bounds is None else bounds.context_length)
        validation.check_detokenize(request, limit)
        identity.set_flow(identity.tenant(identity.caller(context), context), context)
        text = await self.tokenizers.decode(
            request.token_ids, keep_special=request.keep_special_tokens, vocab_size=vocab_size
        )
        return pb.DetokenizeResponse(text=text)

    # --- GetModel and GetStats ---------------------------------------------------------------------------------------

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describe the served model. Fails before the first worker has joined."""
        return status_messages.model(
            self._settings,
            self._model.require_hello(),
            num_slots=self._engine.snapshot().core.num_slots,
            has_chat_template=self.tokenizers.has_chat_template,
            has_structured_output=self.grammars.is_available,
            parsers=self._parsers,
            version=VERSION,
            adapters=self.adapters.all(),
        )

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """Return counters and gauges; for one tenant of several, without figures about the other tenants."""
        stats = await self._status()
        sees_all = self._settings.admin_listen or self._settings.share_stats_across_tenants
        return (
            stats if sees_all or identity.caller(context) == identity.ANONYMOUS else status_messages.for_tenant(stats)
        )

    def count_rejected(self, reason: str) -> None:
        """Count the error of this task's call, unless it has had a request: the end of that is counted."""
        if not has_request():
            self.requests.count_rejected(reason)

    async def metrics(self) -> list[Metric]:
        """Return the figures of GetStats as Prometheus metrics."""
        expires_at = self.certificate.expires_at.timestamp() if self.certificate is not None else None
        adapters = adapter_use(self._settings.max_loras, self.requests)
        return list(families(await self._status(), self._stats, certificate_expires_at=expires_at, adapters=adapters))

    async def _status(self) -> pb.GetStatsResponse:
        try:
            snapshot = await asyncio.wait_for(asyncio.wrap_future(self._engine.fresh_snapshot()), _FRESH_SECONDS)
        except TimeoutError:  # the engine is stuck
            snapshot = self._engine.snapshot()
        return status_messages.stats(
            self._settings,
            snapshot,
            self._stats,
            self._clock(),
            num_admitted=self.quota.num_admitted,
            wanted=self.wanted_workers(),
            shares=self.requests.fairness.shares(),
            num_beams_running=sum(request.answer.num_running_beams for request in self.requests),
            open_streams=len(self.requests),
            asyncio_tasks=len(asyncio.all_tasks()),
            num_adapters=len(self.adapters.all()),
            version=VERSION,
        )


def _parsers(settings: SchedulerSettings, chat: ChatTemplate | None) -> AnswerParsers:
    """Return the parsers of answers to conversations, and log them if there is a chat template."""
    found = choose_parsers(settings.tool_call_parser, settings.reasoning_parser, None if chat is None else chat.source)
    if chat is not None:
        log.info("answer_parsers", tool_calls=found.tool_calls or "none", reasoning=found.reasoning or "none")
    return found


def shutdown_interrupted(request: RequestContext) -> ShutdownInterrupted:
    """Return the error for a request that the server does not finish; its metadata lets another server resume it."""
    seed = request.validated.sampling.seed
    return ShutdownInterrupted(
        "the server shut down before the answer was complete; send the request to another server",
        retry_after_seconds=1.0,
        metadata={"next_index": str(request.outputs[0].num_received), "seed": str(seed)},
    )
