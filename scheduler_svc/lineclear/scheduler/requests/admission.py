"""Admit requests: validate them, reserve a place in the queue, and open their output.

Small requests are validated before the quota check, large ones after it, so that a full queue costs little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from google.protobuf.message import Message

from lineclear.errors import DuplicateRequest, LineclearError, RequestTooLarge
from lineclear.scheduler.requests import model_identity, responses, validation
from lineclear.scheduler.requests.adapters import Adapters, LoadedAdapter
from lineclear.scheduler.requests.fairness import FairnessWindow
from lineclear.scheduler.requests.grammar_pool import GrammarPool
from lineclear.scheduler.requests.loop_pacer import SMALL_BYTES, LoopPacer
from lineclear.scheduler.requests.output_length import OutputLengths
from lineclear.scheduler.requests.output_router import OutputRouter
from lineclear.scheduler.requests.output_stream import OutputStream
from lineclear.scheduler.requests.queue_limits import NoPlace, QueueLimiter, QueuePlace
from lineclear.scheduler.requests.request_context import Asks, RequestContext, RequestServices, Submitter
from lineclear.scheduler.requests.request_stats import ServerStats
from lineclear.scheduler.requests.tokenizer_pool import TokenizerPool
from lineclear.scheduler.requests.validation import ModelBounds, ValidatedRequest
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import Identity
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.scheduler.text.parsed_answer import AnswerParsers, ParsedAnswerText
from lineclear.v1 import inference_pb2 as pb

_has_request: ContextVar[bool | None] = ContextVar("has_request", default=None)


def has_request() -> bool | None:
    """Whether the call of this task has had a live request. None: it does not ask for one."""
    return _has_request.get()


def note_request() -> None:
    """Note that the call of this task has a request, whose end is counted: an error of the call is not."""
    _has_request.set(True)


class Admission:
    """Admits requests, and finds live ones by caller and request_id. On one event loop."""

    def __init__(
        self,
        settings: SchedulerSettings,
        tokenizers: TokenizerPool,
        grammars: GrammarPool,
        streams: OutputRouter,
        engine: Submitter,
        lengths: OutputLengths,
        quota: QueueLimiter,
        stats: ServerStats,
        pacer: LoopPacer,
        incident: Callable[[BaseException], LineclearError],
        clock: Callable[[], float],
        adapters: Adapters,
        parsers: AnswerParsers,
    ) -> None:
        self._parsers = parsers
        self._settings = settings
        self._quota = quota
        self.pacer = pacer
        """Spaces large pieces of work on the event loop."""
        self._adapters = adapters
        max_drafts = settings.num_speculative_tokens if settings.speculative_method != "none" else 0
        self._services = RequestServices(
            *(tokenizers, grammars, parsers, streams, engine, lengths, stats, incident, clock, max_drafts),
            live={},
            on_close=self._on_close,
        )
        self.fairness = FairnessWindow(quota.tenants, self._services.live.values, settings.weights, clock)
        """How equally tenants are served."""

    def __len__(self) -> int:
        """Return the number of live requests."""
        return len(self._services.live)

    def __iter__(self) -> Iterator[RequestContext]:
        """Iterate over a copy of the live requests, so that the caller may close them."""
        return iter(list(self._services.live.values()))

    def admit(
        self,
        message: pb.GenerateRequest,
        bounds: ModelBounds,
        caller: Identity,
        tenant: str,
        arrival: float,
        seconds: float | None,
        asks: Asks | None = None,
    ) -> RequestContext:
        """Admit a request whose deadline is `seconds` (None: the default) after `arrival`. Raises why it is rejected.

        With `asks` it has no output.
        """
        num_bytes = message.ByteSize()
        if num_bytes > self._settings.max_request_bytes:
            raise _too_large(num_bytes, self._settings.max_request_bytes)
        seconds = self._settings.default_deadline_seconds if seconds is None else seconds
        seconds = min(seconds, self._settings.max_deadline_seconds)
        validated = validation.check(message, bounds) if num_bytes <= SMALL_BYTES else None
        place = self._quota.reserve(tenant)
        try:
            if validated is None:
                with self.pacer.measured():
                    validated = validation.check(message, bounds)
            adapter = self._adapters.acquire(message.adapter) if message.HasField("adapter") else None
            try:
                model_identity.check_model(message, validated, bounds, adapter)
                times = arrival, arrival + seconds
                request = self._open(message, validated, place, bounds, caller, tenant, *times, adapter, asks)
            except BaseException:
                if adapter is not None:
                    self._adapters.release(adapter)
                raise
        except BaseException:
            place.release(started=False)
            raise
        note_request()
        return request

    async def pace(self, message: Message) -> float:
        """Wait until a large request may be validated. Return its arrival. Await it first, and right before `admit`."""
        arrival = self._services.clock()
        if not _has_request.get():
            _has_request.set(False)
        if message.ByteSize() > SMALL_BYTES:
            await self.pacer.wait()
        return arrival

    def cancel(self, caller: Identity, request_id: str, index: int | None = None) -> bool:
        """Cancel a live request of `caller`, or one output of it. Return False if id or index are unknown."""
        request = self._services.live.get((caller, request_id))
        if request is None:
            return False
        if index is not None:
            return request.cancel_output(index)
        request.cancel()
        return True

    def count_rejected(self, reason: str) -> None:
        """Count a call or command that failed before it had a request. `RequestContext.close` counts the others."""
        self._services.stats.add_rejected(reason)

    def retry_after_seconds(self) -> float:
        """Return the retry hint for a full queue."""
        return self._quota.retry_after_seconds()

    def _open(
        self,
        message: pb.GenerateRequest,
        validated: ValidatedRequest,
        place: QueuePlace,
        bounds: ModelBounds,
        caller: Identity,
        tenant: str,
        arrival: float,
        deadline: float,
        adapter: LoadedAdapter | None,
        asks: Asks | None,
    ) -> RequestContext:
        services, key = self._services, (caller, validated.request_id)
        if key in services.live:
            raise DuplicateRequest("a request with this request_id is in progress")
        outputs, candidates = self._open_outputs(validated, place)
        cache_owner = identity.ANONYMOUS if self._settings.share_prefix_cache_across_tenants else caller
        salt = identity.cache_salt(cache_owner, message.cache_salt)
        request = RequestContext(
            *(
                services,
                validated,
                outputs,
                candidates,
                place,
                bounds,
                caller,
                tenant,
                salt,
                arrival,
                deadline,
                adapter,
                asks,
            )
        )
        services.live[key] = request
        self.fairness.start()
        return request

    def _open_outputs(
        self, validated: ValidatedRequest, place: QueuePlace
    ) -> tuple[tuple[OutputStream, ...], tuple[OutputStream, ...]]:
        """Open the streams of the outputs, and of the candidates that they are chosen from."""
        if validated.best_of:
            candidates = [(index, ()) for index in range(validated.best_of)]
            outputs = [(index, ()) for index in range(len(validated.received))]
            return self._open_streams(validated, outputs, NoPlace()), self._open_streams(validated, candidates, place)
        if validated.beams is not None:
            outputs = [(index, ()) for index in range(len(validated.received))]
            return self._open_streams(validated, outputs, NoPlace()), ()
        wanted = [(index, received) for index, received in enumerate(validated.received) if received is not None]
        return self._open_streams(validated, wanted, place), ()

    def _open_streams(
        self, validated: ValidatedRequest, wanted: Sequence[tuple[int, tuple[int, ...]]], place: QueuePlace
    ) -> tuple[OutputStream, ...]:
        shares = [place] * len(wanted) if isinstance(place, NoPlace) else place.shares(len(wanted))
        outputs = tuple(
            self._services.streams.open(
                validated.request_id,
                self._answer_text(validated),
                share,
                wants_times=validated.token_timings,
                num_received=len(received),
                index=index,
                encode_scores=None if validated.prompt_logprobs < 0 else responses.encoded_prompt_logprobs,
            )
            for (index, received), share in zip(wanted, shares, strict=True)
        )
        if len(outputs) > 1:
            for output in outputs:
                output.share_limits(outputs)
        return outputs

    def _on_close(self, request: RequestContext) -> None:
        self.fairness.ended(request)
        if request.adapter is not None:
            self._adapters.release(request.adapter)

    def _answer_text(self, validated: ValidatedRequest) -> AnswerText | None:
        ends_by_text = validated.stops is not None or validated.repetition is not None
        if not validated.wants_text and not ends_by_text:
            return None
        options: dict[str, Any] = {
            "stops": validated.stops,
            "include_stop_string": validated.include_stop_string,
            "min_tokens": validated.sampling.min_tokens,
            "silent_ids": validated.silent_ids,
            "keep_special": validated.keep_special,
            "repetition": validated.repetition,
            "is_start": validated.starts_text,
        }
        tokenizer = self._services.tokenizers.tokenizer
        if validated.is_chat and validated.wants_text and self._parsers.are_needed(validated.tool_names):
            options["is_parallel"] = validated.has_parallel_calls
            return ParsedAnswerText(tokenizer, self._parsers, validated.tool_names, **options)
        return AnswerText(tokenizer, **options)


def _too_large(num_bytes: int, limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the request has {num_bytes} bytes, the limit is {limit}; send less, or have the server raise "
        "--max-message-bytes",
        metadata={"request_bytes": str(num_bytes), "limit": str(limit)},
    )
