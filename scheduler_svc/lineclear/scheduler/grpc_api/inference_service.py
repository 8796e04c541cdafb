"""lineclear.v1.InferenceService: from a call to a request, and from what the engine says to responses.

Decides whose clock a deadline is on, and what happens to calls when the server leaves. Who is let in, `admission`
decides; what may be sent when, `streams` and `session`; how it is sent, `outlet`; what it looks like, `responses`; what
an exception becomes, `interceptor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

import structlog
from prometheus_client.core import Metric

from lineclear.errors import (
    LineclearError,
    ServerDraining,
    ServerStarting,
    ShutdownInterrupted,
    Unauthenticated,
    UnknownRequest,
)
from lineclear.grpc_status import to_status
from lineclear.scheduler.core.events import Event, StepTokens
from lineclear.scheduler.engine.engine_stats import EngineSnapshot, WorkerStatus
from lineclear.scheduler.grpc_api.error_interceptor import incident
from lineclear.scheduler.grpc_api.response_writer import Context, ResponseWriter
from lineclear.scheduler.metrics import families
from lineclear.scheduler.requests import responses, status_messages, validation
from lineclear.scheduler.requests.admission import Admission, RequestContext, Submitter, outcome_of, was_let_in
from lineclear.scheduler.requests.detached import DetachedLimits, DetachedRequests
from lineclear.scheduler.requests.loop_pacer import SMALL_BYTES, LoopPacer
from lineclear.scheduler.requests.output_stream import Canceller, OutputRouter, OutputStream
from lineclear.scheduler.requests.queue_quota import QueueQuota, QuotaLimits
from lineclear.scheduler.requests.request_stats import ServerStats
from lineclear.scheduler.requests.sampling_ranges import model_defaults
from lineclear.scheduler.requests.session import Session, session_headers
from lineclear.scheduler.requests.tokenizer_pool import TextLimits, TokenizerPool
from lineclear.scheduler.requests.validation import ModelBounds
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.tls import ServerCertificates
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.chat_template import ChatTemplate
from lineclear.scheduler.text.tokenizer import Tokenizer
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc
from lineclear.wire.messages import Hello

log = structlog.get_logger()

NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
VERSION = version("lineclear")
_BYTES_PER_TOKEN = 8  # of Detokenize, so that it is bounded as Tokenize is, also without a worker

_NEVER_SECONDS = 10 * 365 * 86_400.0


class EngineApi(Submitter, Canceller, Protocol):
    """What the service needs of the engine, and those to whom it hands it on."""

    def drain(self) -> None:
        """Take no new requests."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Counters and gauges."""
        ...

    @property
    def worker_status(self) -> WorkerStatus:
        """Which worker is joined."""
        ...


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The handlers. On one event loop, which must be running when it is made.

    `publish` is for the engine's thread. `on_worker` is called on the loop when a worker has joined or is lost,
    `on_fatal` when an event could not be delivered: the streams cannot be trusted any more.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        tokenizer: Tokenizer,
        chat: ChatTemplate | None = None,
        generation_config: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_worker: Callable[[WorkerStatus], None] = lambda status: None
        self.on_fatal: Callable[[BaseException], None] = lambda error: None
        self.certificate: ServerCertificates | None = None
        """What the listeners present, for the metrics."""
        self._settings = settings
        self._pacer = LoopPacer(clock)
        self._prompts = TokenizerPool(tokenizer, chat, _text_limits(settings), self._pacer)
        self._defaults = model_defaults(generation_config or {})
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._stats = ServerStats(clock())
        self._quota = QueueQuota(_quota_limits(settings), clock)
        self._sessions: set[Session] = set()
        self._bounds: tuple[Hello, ModelBounds] | None = None  # computed once for each worker
        self._refusal: Callable[[], LineclearError] | None = None
        self._is_closed = False
        self._drain_ends_at: float | None = None

    def attach(self, engine: EngineApi) -> None:
        """Begin to use the engine. Once, before the first call."""
        self._engine = engine
        self.streams = OutputRouter(
            engine,
            self._settings.max_unread_tokens,
            self._settings.max_unread_bytes,
            self._on_worker_change,
            partial(incident, f"/{NAME}: a stream"),
        )
        self._admission = Admission(
            self._settings, self._prompts, self.streams, engine, self._quota, self._stats, self._pacer, self._clock
        )
        self._detached = DetachedRequests(
            self._admission,
            partial(incident, f"/{NAME}/Submit"),
            _detached_limits(self._settings),
        )

    async def prepare(self) -> None:
        """Have ready what the first conversation needs."""
        await self._prompts.prepare()

    def publish(self, events: Sequence[Event]) -> None:
        """Take events from the engine. Any thread; does not wait."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, list(events), self._clock())
        except RuntimeError:  # the loop is closed: nobody reads any more
            if not self._is_closed:
                raise

    # --- coming and going --------------------------------------------------------------------------------------------

    def refuse(self, error: Callable[[], LineclearError]) -> None:
        """Answer every further request with an error: the server is leaving, or has no worker and will get none."""
        self._refusal = error
        for session in self._sessions:
            session.drain(error())

    async def drain(self, timeout_seconds: float) -> None:
        """Take no new requests, wait for those in progress, and end what is left with Drained."""
        self.refuse(lambda: ServerDraining("the server is shutting down", retry_after_seconds=1.0))
        self._engine.drain()
        self._drain_ends_at = self._clock() + timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.streams.wait_until_idle()
        except TimeoutError:
            self.fail_all(drained)

    @property
    def drain_remaining_seconds(self) -> float | None:
        """Until what a drain has not finished is ended; None where none has begun."""
        return None if self._drain_ends_at is None else max(0.0, self._drain_ends_at - self._clock())

    def fail_all(self, error: Callable[[OutputStream], LineclearError]) -> None:
        """End every stream. The errors are sent as soon as their readers take them."""
        for mailbox in self.streams:
            mailbox.fail(error(mailbox))

    def close(self) -> None:
        """Let go of the threads. No call may be in progress."""
        self._is_closed = True
        self._prompts.close()

    def _dispatch(self, events: Sequence[Event], at: float) -> None:
        try:
            count = sum(len(event.tokens) for event in events if isinstance(event, StepTokens))
            if count:
                self._stats.add_tokens(count, at)
            self.streams.dispatch(events, at)
        except Exception as error:  # or the loop would log it and go on, and streams would wait for ever
            self.on_fatal(error)

    def _on_worker_change(self, joined: bool) -> None:
        if joined:
            self._model_bounds()
        self.on_worker(self._engine.worker_status)

    def _model_bounds(self) -> ModelBounds | None:
        """Return the limits of the joined worker's model, or of the worker before; None before the first one."""
        hello = self._engine.worker_status.last_hello
        if hello is None:
            return None
        if self._bounds is None or self._bounds[0] is not hello:
            self._bounds = hello, self._bounds_of(hello)
        return self._bounds[1]

    def _bounds_of(self, hello: Hello) -> ModelBounds:
        tokens = self._prompts.tokenizer.vocab_size
        if tokens > hello.vocab_size:
            log.warning("tokenizer_larger_than_model", tokens=tokens, vocabulary=hello.vocab_size)
        return ModelBounds(
            context_length=hello.max_model_len,
            vocab_size=hello.vocab_size,
            max_prompt_bytes=self._settings.max_prompt_bytes,
            default_max_tokens=self._settings.default_max_tokens,
            max_chat_messages=self._settings.max_chat_messages,
            eos_ids=frozenset(hello.eos_token_ids),
            defaults=self._defaults if self._settings.use_generation_config else {},
            model=status_messages.served_model_name(self._settings, hello),
            model_fingerprint=hello.model_fingerprint,
            vocabulary=(hello.vocab_size, hello.eos_token_ids),
        )

    def _require_worker(self) -> ModelBounds:
        if self._refusal is not None:
            raise self._refusal()
        bounds = self._model_bounds()
        if bounds is None:
            raise _no_worker_yet()
        return bounds

    # --- Generate and Session ----------------------------------------------------------------------------------------

    async def Generate(  # type: ignore[override]  # writes to the context instead of returning an iterator
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Admit, relay what comes, and cancel what is left when the caller is gone."""
        # Read once: gRPC computes it from the wall clock, which may jump.
        remaining = context.time_remaining()
        caller = identity.caller(context)
        tenant = identity.tenant(caller, context)
        identity.set_flow(tenant, context)
        await self._admission.pace(request)
        ticket = self._admission.open(request, self._require_worker(), caller, tenant, remaining)
        outcome = "cancelled"
        async with self._response_writer(context) as outlet:
            try:
                await self._admission.submit(ticket, request)
                outcome = await self._relay(ticket, outlet)
            except Exception as error:
                outcome = outcome_of(error)
                raise
            finally:
                self._admission.close(ticket, outcome)

    async def _relay(self, ticket: RequestContext, outlet: ResponseWriter) -> str:
        while True:
            delivery = await ticket.output.read()
            spent = None if delivery.end is None else self._admission.spent(ticket, delivery.end)
            await outlet.write(responses.response(delivery, ticket, spent))
            if delivery.end is not None:
                return delivery.end.reason.name.lower()

    async def Session(  # type: ignore[override]  # writes to the context instead of returning an iterator
        self, orders: AsyncIterator[pb.SessionRequest], context: Context
    ) -> None:
        """Obey one caller's orders and send what is new for any of its requests, until it ends its side."""
        remaining = context.time_remaining()
        caller = identity.caller(context)
        tenant = identity.tenant(caller, context)
        identity.set_flow(tenant, context)  # also for the tasks that the session begins
        is_valid, is_in_time = identity.validity(), identity.certificate_validity(context)

        def require() -> ModelBounds:
            if not is_valid():
                error = Unauthenticated("the token that this Session began with is not valid any more")
                session.drain(error)
                raise error
            if not is_in_time():
                error = Unauthenticated("the certificate that this Session began with has expired")
                session.drain(error)
                raise error
            return self._require_worker()

        session = Session(
            self._admission,
            caller,
            tenant,
            require,
            partial(incident, f"/{NAME}/Session"),
            self._clock,
            deadline=None if remaining is None else self._clock() + remaining,
            max_requests=self._settings.max_session_requests,
        )
        outlet = self._response_writer(context)
        # Callers wait for this sign that there is a Session here.
        await outlet.send_headers(session_headers(self._settings.max_request_bytes))
        if self._refusal is not None:
            session.drain(self._refusal())
        self._sessions.add(session)
        listening = asyncio.ensure_future(session.run(orders))
        ageing = self._age(session.drain)
        try:
            while (message := await session.next_response()) is not None:
                await outlet.write(message)
        finally:
            self._sessions.discard(session)
            listening.cancel()
            ageing.cancel()
            session.close()

    def _age(self, leave: Callable[[LineclearError], None]) -> asyncio.Handle:
        """Have a session leave when it is as old as a connection may become."""
        seconds = self._settings.max_connection_age_seconds
        error = ServerDraining(
            "the Session has reached its greatest age (--max-connection-age-seconds); open another one",
            retry_after_seconds=0.0,
        )
        return self._loop.call_later(seconds or _NEVER_SECONDS, leave, error)

    # --- answers left alone ------------------------------------------------------------------------------------------

    async def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.SubmitResponse:
        """Admit, and let go: what comes is kept."""
        caller = identity.caller(context)
        seconds = validation.seconds(request.timeout, "timeout") if request.HasField("timeout") else None
        tenant = identity.tenant(caller, context)
        identity.set_flow(tenant, context)
        await self._admission.pace(request.request)
        self._detached.refuse_duplicate(caller, request.request.request_id)  # nothing may happen before `open`
        ticket = self._admission.open(request.request, self._require_worker(), caller, tenant, seconds)
        try:
            await self._admission.submit(ticket, request.request)
            self._detached.add(ticket, ticket.max_tokens)
        except BaseException as error:
            self._admission.close(ticket, outcome_of(error))
            raise
        return pb.SubmitResponse(request_id=ticket.output.request_id)

    async def Attach(  # type: ignore[override]  # writes to the context instead of returning an iterator
        self, request: pb.AttachRequest, context: Context
    ) -> None:
        """All there is from an index on, and then what comes."""
        answer = self._detached.find(identity.caller(context), request.request_id)
        async with self._response_writer(context) as outlet:
            async for message in answer.read(request.from_index):
                await outlet.write(pb.AttachResponse(response=message))

    async def GetResult(self, request: pb.GetResultRequest, context: Context) -> pb.GetResultResponse:
        """All there is, at once."""
        answer = self._detached.find(identity.caller(context), request.request_id)
        error = None if answer.error is None else to_status(answer.error)
        return pb.GetResultResponse(state=answer.state, response=answer.whole(), error=error)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """End, or forget, a request of this caller. One that is not there is no error: it may just have ended."""
        caller = identity.caller(context)
        with contextlib.suppress(UnknownRequest):
            answer = self._detached.find(caller, request.request_id)
            if answer.is_over:
                self._detached.remove(answer)
                return pb.CancelResponse(found=True)
        return pb.CancelResponse(found=self._admission.cancel(caller, request.request_id))

    def _response_writer(self, context: Context) -> ResponseWriter:
        return ResponseWriter(context, self._settings.stall_timeout_seconds)

    # --- text and tokens ---------------------------------------------------------------------------------------------

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """The ids that Generate would make of the same text or conversation."""
        if request.ByteSize() > SMALL_BYTES:
            await self._pacer.wait()
        with self._pacer.measured():
            validation.check_tokenize(request, self._settings.max_prompt_bytes, self._settings.max_chat_messages)
        identity.set_flow(identity.tenant(identity.caller(context), context), context)
        if request.WhichOneof("input") == "chat":
            ids = await self._prompts.encode_chat(request.chat)
        else:
            ids = await self._prompts.encode(request.text)
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """The text that Generate would send with the same tokens."""
        bounds = self._model_bounds()
        vocab_size = self._prompts.tokenizer.vocab_size if bounds is None else bounds.vocab_size
        limit = max(self._settings.max_prompt_bytes // _BYTES_PER_TOKEN, 0 if bounds is None else bounds.context_length)
        validation.check_detokenize(request, limit)
        identity.set_flow(identity.tenant(identity.caller(context), context), context)
        text = await self._prompts.decode(
            request.token_ids, keep_special=request.keep_special_tokens, vocab_size=vocab_size
        )
        return pb.DetokenizeResponse(text=text)

    # --- GetModel and GetStats ---------------------------------------------------------------------------------------

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """What is served, once a worker has said so."""
        hello = self._engine.worker_status.last_hello
        if hello is None:
            raise self._refusal() if self._refusal is not None else _no_worker_yet()
        return status_messages.model(
            self._settings, hello, has_chat_template=self._prompts.has_chat_template, version=VERSION
        )

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """The engine's figures and ours; for one tenant of several, without what tells of the others' requests."""
        stats = self._status()
        sees_all = self._settings.admin_listen or self._settings.share_stats_across_tenants
        return (
            stats if sees_all or identity.caller(context) == identity.ANONYMOUS else status_messages.for_tenant(stats)
        )

    def count_rejected(self, reason: str) -> None:
        """Count the error that the call of this task ends with, unless it is the end of a request that was let in."""
        if not was_let_in():
            self._admission.count_rejected(reason)

    async def metrics(self) -> list[Metric]:
        """The same for Prometheus."""
        expires_at = self.certificate.expires_at.timestamp() if self.certificate is not None else None
        return list(families(self._status(), self._stats, certificate_expires_at=expires_at))

    def _status(self) -> pb.GetStatsResponse:
        return status_messages.stats(
            self._settings,
            self._engine.snapshot(),
            self._stats,
            self._clock(),
            num_refused=self._quota.num_refused,
            streams_open=len(self.streams),
            tasks=len(asyncio.all_tasks()),
            version=VERSION,
        )


def _no_worker_yet() -> ServerStarting:
    return ServerStarting("no worker has joined yet; the model may still be loading", retry_after_seconds=1.0)


def _text_limits(settings: SchedulerSettings) -> TextLimits:
    return TextLimits(
        threads=settings.tokenizer_threads,
        max_busy=settings.max_tokenizer_queue_size,
        max_conversations=settings.max_queue_size,
        template_processes=settings.chat_template_processes,
        template_seconds=settings.max_chat_template_seconds,
        max_prompt_bytes=settings.max_prompt_bytes,
    )


def _quota_limits(settings: SchedulerSettings) -> QuotaLimits:
    return QuotaLimits(
        requests=settings.max_queue_size,
        tokens=settings.max_queue_tokens,
        requests_per_tenant=settings.max_queue_size_per_tenant,
        tokens_per_tenant=settings.max_queue_tokens_per_tenant,
        reject_unmeetable_deadlines=settings.reject_unmeetable_deadlines,
    )


def _detached_limits(settings: SchedulerSettings) -> DetachedLimits:
    return DetachedLimits(
        answers=settings.max_detached,
        tokens=settings.max_detached_tokens,
        num_bytes=settings.max_detached_bytes,
        answers_per_tenant=settings.max_detached_per_tenant,
        ttl_seconds=settings.detached_ttl_seconds,
    )


def drained(mailbox: OutputStream) -> ShutdownInterrupted:
    """The error for a request that the server leaves behind; with it, any other server can go on."""
    return ShutdownInterrupted(
        "the server shut down before the answer was complete; send the request again, elsewhere",
        retry_after_seconds=1.0,
        metadata={"next_index": str(mailbox.num_received), "seed": str(mailbox.seed)},
    )
