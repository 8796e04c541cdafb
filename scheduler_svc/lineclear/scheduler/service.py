"""lineclear.v1.InferenceService: from a call to a request, and from what the engine says to responses.

Decides the order of admission (what costs nothing is refused first), whose clock a deadline is on, and that whatever
happens to a call, its request ends with it. What a valid request is, is `validation`'s; what may be sent when,
`streams`'; what an exception becomes, `interceptor`'s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc.aio
import structlog
from google.protobuf.duration_pb2 import Duration

from lineclear.errors import (
    Drained,
    Draining,
    LineclearError,
    QueueFull,
    SlowConsumer,
    Starting,
)
from lineclear.scheduler import identity, validation
from lineclear.scheduler.chat import ChatTemplate, Turn, no_chat_template
from lineclear.scheduler.core import CoreSnapshot
from lineclear.scheduler.engine import EngineSnapshot
from lineclear.scheduler.events import Event, FinishReason, TokensReady
from lineclear.scheduler.sequence import Request
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.stats import Durations, Quantiles, Stats, durations, quantiles
from lineclear.scheduler.streams import Delivery, End, Mailbox, Streams
from lineclear.scheduler.text import AnswerText, decode
from lineclear.scheduler.tokenizer import Tokenizer
from lineclear.scheduler.validation import Bounds, Checked
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc
from lineclear.wire.types import Hello, Logprobs

log = structlog.get_logger()

NAME: str = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
VERSION = version("lineclear")

DEMO_NAME = "lineclear-demo"
_INLINE_BYTES = 1024  # a smaller text is tokenized sooner than a thread would begin
_REASONS = {
    FinishReason.STOP_EOS: pb.FINISH_REASON_STOP_EOS,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}

T = TypeVar("T")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class EngineApi(Protocol):
    """What the service needs of the engine."""

    def submit(self, request: Request) -> None:
        """Queue a request; the outcome is an event."""
        ...

    def cancel(self, request_id: str, error: LineclearError | None = None) -> None:
        """End a request without an answer."""
        ...

    def finish(self, request_id: str, num_tokens: int) -> None:
        """Complete a request after its first `num_tokens` output tokens."""
        ...

    def drain(self) -> None:
        """Take no new requests."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Counters and gauges."""
        ...

    @property
    def worker(self) -> Hello | None:
        """The Hello of the joined worker."""
        ...


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """The handlers. On one event loop, which must be running when it is made.

    `publish` is for the engine's thread. `on_worker` is called on the loop when a worker has joined (True) or is lost,
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
        self.on_worker: Callable[[bool], None] = lambda joined: None
        self.on_fatal: Callable[[BaseException], None] = lambda error: None
        self._settings = settings
        self._tokenizer = tokenizer
        self._chat = chat
        self._defaults = validation.sampling_defaults(generation_config or {})
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._stats = Stats(clock())
        self._threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
        self._num_tokenizing = 0
        self._hello: Hello | None = None  # of the last worker: its successor will be the same
        self._bounds: Bounds | None = None
        self._refusal: Callable[[], LineclearError] | None = None
        self._is_closed = False

    def attach(self, engine: EngineApi) -> None:
        """Begin to use the engine. Once, before the first call."""
        self._engine = engine
        self.streams = Streams(engine, self._settings.max_unread_tokens, self._worker_changed)

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

    async def drain(self, timeout_seconds: float) -> None:
        """Take no new requests, wait for those in progress, and end what is left with Drained."""
        self.refuse(lambda: Draining("the server is shutting down", retry_after_seconds=1.0))
        self._engine.drain()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.streams.wait_until_idle()
        except TimeoutError:
            self.fail_all(drained)

    def fail_all(self, error: Callable[[Mailbox], LineclearError]) -> None:
        """End every stream. The errors are sent as soon as their readers take them."""
        for mailbox in self.streams:
            mailbox.fail(error(mailbox))

    def close(self) -> None:
        """Let go of the threads. No call may be in progress."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _dispatch(self, events: Sequence[Event], at: float) -> None:
        try:
            count = sum(len(event.tokens) for event in events if isinstance(event, TokensReady))
            if count:
                self._stats.add_tokens(count, at)
            self.streams.dispatch(events, at)
        except Exception as error:  # or the loop would log it and go on, and streams would wait for ever
            self.on_fatal(error)

    def _worker_changed(self, joined: bool) -> None:
        if joined:
            self._know_worker()
        self.on_worker(joined)

    def _know_worker(self) -> Bounds | None:
        """The figures that requests are held to; those of the last worker while there is none."""
        hello = self._engine.worker
        if hello is not None and hello is not self._hello:
            self._hello = hello
            self._bounds = Bounds(
                context_length=hello.max_model_len,
                vocab_size=hello.vocab_size,
                max_prompt_bytes=self._settings.max_prompt_bytes,
                default_max_tokens=self._settings.default_max_tokens,
                eos_ids=frozenset(hello.eos_token_ids),
                defaults=self._defaults if self._settings.generation_config else {},
            )
            if self._tokenizer.vocab_size > hello.vocab_size:
                log.warning(
                    "tokenizer_larger_than_model", tokens=self._tokenizer.vocab_size, vocabulary=hello.vocab_size
                )
        return self._bounds

    def _require_worker(self) -> Bounds:
        if self._refusal is not None:
            raise self._refusal()
        bounds = self._know_worker()
        if bounds is None:
            raise Starting("no worker has joined yet; the model may still be loading", retry_after_seconds=1.0)
        return bounds

    # --- Generate ----------------------------------------------------------------------------------------------------

    async def Generate(  # type: ignore[override]  # writes to the context instead of returning an iterator
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Admit, relay what comes, and cancel what is left when the caller is gone."""
        arrival = self._clock()
        # Read once: gRPC computes it from the wall clock, which may jump.
        remaining = context.time_remaining()
        if remaining is None:
            remaining = self._settings.default_deadline_seconds
        bounds = self._require_worker()
        checked = validation.check(request, bounds)
        self._refuse_if_full()
        mailbox = self.streams.open(checked.label, self._answer_text(checked))
        outcome = "cancelled"
        try:
            prompt = await self._prompt(request)
            core_request = validation.resolve(checked, mailbox.key, prompt, arrival + remaining, bounds)
            core_request = dataclasses.replace(core_request, cache_salt=self._salt(request, context))
            self._engine.submit(core_request)
            end = await self._relay(mailbox, core_request, checked, arrival, context)
            outcome = end.reason.name.lower()
        except LineclearError as error:
            outcome = error.reason.lower()
            raise
        except Exception:
            outcome = "internal"
            raise
        finally:
            self.streams.close(mailbox)
            _log_end(mailbox, outcome, arrival, self._clock())

    def _refuse_if_full(self) -> None:
        waiting, limit = self.streams.num_waiting, self._settings.max_queue_size
        if waiting >= limit:
            raise QueueFull(
                f"{waiting} requests are waiting, the limit is {limit}; retry later",
                retry_after_seconds=1.0,
                metadata={"waiting": str(waiting), "limit": str(limit)},
            )

    def _answer_text(self, checked: Checked) -> AnswerText | None:
        if not checked.wants_text and checked.stops is None:
            return None
        return AnswerText(
            self._tokenizer,
            stops=checked.stops,
            include_stop_string=checked.include_stop_string,
            min_tokens=checked.sampling.min_tokens,
            silent_ids=checked.stop_ids,
            keep_special=checked.keep_special,
        )

    def _salt(self, request: pb.GenerateRequest, context: Context) -> bytes:
        """Which cached prefixes the request may share: its tenant's, or those with the caller's own salt among them."""
        tenant = identity.ANONYMOUS if self._settings.share_prefixes else identity.caller(context)
        return identity.cache_salt(tenant, request.cache_salt)

    async def _prompt(self, request: pb.GenerateRequest) -> Sequence[int]:
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return request.token_ids.ids
        return await (self._encode_chat(request.chat) if kind == "chat" else self._encode_text(request.text))

    async def _relay(
        self, mailbox: Mailbox, request: Request, checked: Checked, arrival: float, context: Context
    ) -> End:
        while True:
            delivery = await mailbox.take()
            response = _response(delivery, mailbox, request, checked, arrival)
            if delivery.end is not None:
                now = self._clock()
                spent = durations(delivery.end.record, arrival, delivery.end.completion_tokens, now)
                self._stats.add_finished(spent)
                response.finished.CopyFrom(_finished(delivery.end, spent))
            await self._write(response, context)
            if delivery.end is not None:
                return delivery.end

    async def _write(self, response: pb.GenerateResponse, context: Context) -> None:
        limit = self._settings.stall_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                await context.write(response)
        except TimeoutError:
            raise SlowConsumer(
                f"the stream took no message for {limit:g} s", metadata={"stall_timeout_seconds": f"{limit:g}"}
            ) from None

    # --- text and tokens ---------------------------------------------------------------------------------------------

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """The ids that Generate would make of the same text or conversation."""
        validation.check_tokenize(request, self._settings.max_prompt_bytes)
        if request.WhichOneof("input") == "chat":
            ids = await self._encode_chat(request.chat)
        else:
            ids = await self._encode_text(request.text)
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """The text that Generate would send with the same tokens."""
        bounds = self._know_worker()
        vocab_size = self._tokenizer.vocab_size if bounds is None else bounds.vocab_size
        # A token has at least one byte, so a longer list could be no prompt and no answer of ours.
        validation.check_detokenize(request, vocab_size, self._settings.max_prompt_bytes)
        ids, keep_special = request.token_ids, request.keep_special_tokens
        work = lambda: decode(self._tokenizer, ids, keep_special=keep_special)  # noqa: E731
        return pb.DetokenizeResponse(text=await self._off_loop(work, 8 * len(ids)))

    async def _encode_text(self, text: str) -> list[int]:
        return await self._off_loop(lambda: self._tokenizer.encode(text), len(text))

    async def _encode_chat(self, chat: pb.ChatMessages) -> list[int]:
        template = self._chat
        if template is None:
            raise no_chat_template()
        validation.check_roles(chat, template.knows_role)
        turns = [Turn(message.role, message.content) for message in chat.messages]
        opens_answer = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        return await self._off_loop(
            lambda: self._tokenizer.encode_sealed(template.render(turns, add_generation_prompt=opens_answer)),
            sum(len(turn.content) for turn in turns),
        )

    async def _off_loop(self, work: Callable[[], T], size: int) -> T:
        """The result of `work`, which is about `size` bytes of it; done in a thread where it would hold up others."""
        if size <= _INLINE_BYTES:
            return work()
        if self._num_tokenizing >= self._settings.max_tokenizing:
            raise QueueFull(
                f"{self._num_tokenizing} inputs are being tokenized, which is the limit; retry later",
                retry_after_seconds=1.0,
                metadata={"limit": str(self._settings.max_tokenizing)},
            )
        self._num_tokenizing += 1
        future = self._loop.run_in_executor(self._threads, work)
        future.add_done_callback(self._tokenized)
        # A caller who hangs up does not stop the thread, so the place stays taken until that is done.
        return await asyncio.shield(future)

    def _tokenized(self, future: asyncio.Future[Any]) -> None:
        self._num_tokenizing -= 1
        if not future.cancelled():
            future.exception()  # its caller may be gone, then nobody else asks

    # --- GetModel and GetStats ---------------------------------------------------------------------------------------

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """What is served, once a worker has said so."""
        if self._know_worker() is None:
            self._require_worker()
        hello, settings = self._hello, self._settings
        assert hello is not None
        limits = pb.Limits(
            max_batch_size=min(settings.max_batch_size, hello.num_slots),
            target_batch_tokens=min(settings.target_batch_tokens, hello.max_step_tokens),
            max_queue_size=settings.max_queue_size,
            max_queue_tokens=settings.max_queue_tokens,
            block_size_tokens=hello.block_size,
            num_blocks=hello.num_blocks,
            pipeline_depth=settings.pipeline_depth,
            default_max_tokens=settings.default_max_tokens,
            max_prompt_bytes=settings.max_prompt_bytes,
        )
        return pb.GetModelResponse(
            model_id=settings.served_name or (DEMO_NAME if settings.demo else hello.model_id),
            family=hello.family,
            context_length=hello.max_model_len,
            vocab_size=hello.vocab_size,
            eos_token_ids=hello.eos_token_ids,
            dtype=hello.dtype,
            device=hello.device,
            has_chat_template=self._chat is not None,
            attention_backend=hello.attention_backend,
            limits=limits,
            server_version=VERSION,
        )

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        """The engine's figures and ours."""
        now, snapshot, stats = self._clock(), self._engine.snapshot(), self._stats
        return pb.GetStatsResponse(
            uptime=_duration(stats.uptime_seconds(now)),
            totals=_totals(snapshot.core),
            gauges=_gauges(snapshot.core, len(self.streams), len(asyncio.all_tasks())),
            queue_seconds=_quantiles(stats.window("queue")),
            first_token_seconds=_quantiles(stats.window("first_token")),
            inter_token_seconds=_quantiles(stats.window("inter_token")),
            total_seconds=_quantiles(stats.window("total")),
            step_seconds=_quantiles(quantiles(step.step_seconds for step in snapshot.step_times)),
            output_tokens_per_second=stats.tokens_per_second(now),
            worker=_worker_status(snapshot),
            batching_strategy=self._settings.batching_strategy,
            order=self._settings.order,
            server_version=VERSION,
        )


# --- responses -------------------------------------------------------------------------------------------------------


def _response(
    delivery: Delivery, mailbox: Mailbox, request: Request, checked: Checked, arrival: float
) -> pb.GenerateResponse:
    response = pb.GenerateResponse(first_index=delivery.first_index, token_ids=delivery.token_ids)
    if checked.wants_text:
        response.text = delivery.text
    if delivery.logprobs:
        response.logprobs.extend(map(_logprobs, delivery.logprobs))
    if checked.token_timings:
        response.token_times_us.extend(max(0, round((at - arrival) * 1e6)) for at in delivery.times)
    if delivery.started is not None:
        response.started.request_id = mailbox.label
        response.started.prompt_tokens = len(request.prompt)
        response.started.cached_tokens = delivery.started.cached_tokens
        response.started.seed = request.sampling.seed
        response.started.slot = delivery.started.slot
        response.started.step = delivery.started.step
    return response


def _logprobs(of_token: Logprobs) -> pb.TokenLogprobs:
    top = [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in of_token.top]
    return pb.TokenLogprobs(logprob=of_token.logprob, top=top)


def _finished(end: End, spent: Durations) -> pb.Finished:
    record = end.record
    return pb.Finished(
        reason=_REASONS[end.reason],
        matched_stop_string=end.matched_stop_string,
        matched_token_id=end.matched_token_id,
        usage=pb.Usage(
            prompt_tokens=record.prompt_tokens,
            completion_tokens=end.completion_tokens,
            cached_tokens=record.cached_tokens,
            recomputed_tokens=record.recomputed_tokens,
        ),
        timings=pb.Timings(
            queue=_duration(spent.queue),
            first_token=_duration(spent.first_token),
            decode=_duration(spent.decode),
            total=_duration(spent.total),
            preemptions=record.preemptions,
            recoveries=record.recoveries,
            last_step=record.last_step,
        ),
    )


def _totals(core: CoreSnapshot) -> pb.Totals:
    counters = core.counters
    names = [field.name for field in dataclasses.fields(counters) if field.name in pb.Totals.DESCRIPTOR.fields_by_name]
    totals = pb.Totals(**{name: getattr(counters, name) for name in names})
    totals.prefix_hit_rate = counters.cached_tokens / max(1, counters.looked_up_tokens)
    totals.mean_batch_size = counters.rows / max(1, counters.steps)
    return totals


def _gauges(core: CoreSnapshot, streams_open: int, tasks: int) -> pb.Gauges:
    return pb.Gauges(
        requests_waiting=core.requests_waiting,
        tokens_waiting=core.tokens_waiting,
        requests_running=core.requests_running,
        steps_in_flight=core.steps_in_flight,
        blocks_total=core.blocks_total,
        blocks_used=core.blocks_used,
        blocks_cached=core.blocks_cached,
        streams_open=streams_open,
        tasks=tasks,
        draining=core.draining,
    )


def _worker_status(snapshot: EngineSnapshot) -> pb.WorkerStatus:
    base, per_token, per_kv_token = snapshot.core.step_model
    hello = snapshot.hello
    status = pb.WorkerStatus(
        joined=hello is not None,
        incarnation=snapshot.incarnation,
        step_base_seconds=base,
        step_seconds_per_token=per_token,
        step_seconds_per_kv_token=per_kv_token,
    )
    if hello is not None:
        status.pid, status.device, status.dtype = hello.pid, hello.device, hello.dtype
        status.attention_backend = hello.attention_backend
        status.torch_version, status.transformers_version = hello.torch_version, hello.transformers_version
    return status


def _quantiles(of_window: Quantiles) -> pb.Quantiles:
    return pb.Quantiles(**dataclasses.asdict(of_window))


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration


# --- errors and logs -------------------------------------------------------------------------------------------------


def drained(mailbox: Mailbox) -> Drained:
    """The error for a request that the server leaves behind."""
    return Drained(
        "the server shut down before the answer was complete; send the request again, elsewhere",
        retry_after_seconds=1.0,
        metadata={"completion_tokens": str(mailbox.num_received)},
    )


def _log_end(mailbox: Mailbox, outcome: str, arrival: float, now: float) -> None:
    record = mailbox.record
    fields: dict[str, Any] = {"request_id": mailbox.label, "outcome": outcome, "tokens": mailbox.num_received}
    if record is not None:
        spent = durations(record, arrival, mailbox.num_received, now)
        fields |= {f"{name}_seconds": round(value, 6) for name, value in spent._asdict().items() if value is not None}
        fields |= {
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "recomputed_tokens": record.recomputed_tokens,
            "preemptions": record.preemptions,
            "recoveries": record.recoveries,
        }
    else:
        fields["total_seconds"] = round(now - arrival, 6)
    log.info("request_ended", **fields)
