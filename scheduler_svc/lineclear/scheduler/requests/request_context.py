"""An admitted request, from its validation to its last response: submit, cancel, close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

import structlog

from lineclear.errors import Cancelled, DeadlineExceeded, InvalidRequest, LineclearError
from lineclear.model_files.fingerprint import prompt_digest
from lineclear.scheduler.core.events import Event, Finished, FinishReason, RequestStats, Started
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.requests import model_identity, sampling_validation, validation
from lineclear.scheduler.requests.output_length import AnswerShape, OutputLengths
from lineclear.scheduler.requests.output_router import OutputRouter
from lineclear.scheduler.requests.output_stream import Completion, OutputStream
from lineclear.scheduler.requests.queue_limits import QueuePlace
from lineclear.scheduler.requests.request_stats import RequestTimings, ServerStats, request_timings
from lineclear.scheduler.requests.tokenizer_pool import TokenizerPool
from lineclear.scheduler.requests.validation import ModelBounds, ValidatedRequest
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import Identity
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.scheduler.text.template_renderer import wall_clock_us
from lineclear.v1 import inference_pb2 as pb

log = structlog.get_logger()


class Submitter(Protocol):
    """The engine method that queues a request."""

    def submit(self, request: Request) -> None:
        """Queue a request; the outcome is an event."""
        ...


@dataclass(frozen=True, slots=True)
class RequestServices:
    """The services that all requests of a server use. `live` maps (caller, request_id) to the request."""

    tokenizers: TokenizerPool
    streams: OutputRouter
    engine: Submitter
    lengths: OutputLengths
    stats: ServerStats
    incident: Callable[[BaseException], LineclearError]
    clock: Callable[[], float]
    live: dict[tuple[Identity, str], RequestContext]
    on_close: Callable[[RequestContext], None]


class RequestContext:
    """A live request. Its owner calls `submit` once, reads the answer, and calls `close` in any case.

    As a context manager it is closed if the block raises, by a hang-up too. `arrival` and `deadline` are monotonic.
    """

    __slots__ = (
        *("arrival", "bounds", "cache_salt", "caller", "chat_time_us", "deadline", "is_closed", "max_tokens", "output"),
        *(
            "prompt_digest",
            "prompt_tokens",
            "tenant",
            "validated",
            "_num_counted",
            "_queue_place",
            "_services",
            "_text",
        ),
    )

    def __init__(
        self,
        services: RequestServices,
        validated: ValidatedRequest,
        output: OutputStream,
        text: AnswerText | None,
        queue_place: QueuePlace,
        bounds: ModelBounds,
        caller: Identity,
        tenant: str,
        cache_salt: bytes,
        arrival: float,
        deadline: float,
    ) -> None:
        self.validated = validated
        self.output = output
        self.bounds = bounds
        self.caller = caller
        self.tenant = tenant
        self.cache_salt = cache_salt
        self.arrival = arrival
        self.deadline = deadline
        self.prompt_tokens = 0  # 0 before tokenization, as max_tokens
        self.max_tokens = 0
        self.prompt_digest = ""
        self.chat_time_us = 0  # time given to the chat template; 0 without one
        self.is_closed = False
        self._num_counted = 0  # tokens that `take_served_tokens` has returned
        self._services = services
        self._text = text
        self._queue_place = queue_place

    @property
    def request_id(self) -> str:
        """The client's name for the request, or a random one."""
        return self.validated.request_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.close(outcome_of(error))

    async def submit(self, message: pb.GenerateRequest) -> None:
        """Tokenize the prompt and queue the request in the engine. Raises the reason for a rejection."""
        if message.WhichOneof("prompt") == "chat":
            self.chat_time_us = message.resume.chat_time_us or wall_clock_us()
        try:
            async with asyncio.timeout(self.deadline - self._services.clock()):
                prompt = await self._services.tokenizers.ids(message, self.chat_time_us)
                if self.validated.bad_words:
                    await self._resolve_bad_words()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the prompt was tokenized") from None
        if self.output.has_ended:  # cancelled in the meantime
            return
        self.prompt_digest = prompt_digest(prompt)
        model_identity.check_prompt(self.validated, self.prompt_digest)
        request = validation.resolve(self.validated, self.output.engine_id, prompt, self.deadline, self.bounds)
        self._queue_place.add_tokens(len(request.prompt))
        self.prompt_tokens, self.max_tokens = len(request.prompt), request.max_tokens
        request = replace(
            request,
            cache_salt=self.cache_salt,
            tenant=identity.share(self.tenant),
            expected_tokens=self._services.lengths.expect(self._shape(), len(request.output)),
        )
        if request.output:
            if self._text is not None:
                await self._services.tokenizers.replay(self._text, request.output)
                if self.output.has_ended:
                    return
            end = _end_of_resumed(request, self._text)
            if end is not None:
                self._finish_resumed(*end)
                return
        self._services.engine.submit(request)

    def cancel(self, error: LineclearError | None = None) -> None:
        """Stop the engine's work on the request, and end its answer with `error` (default: Cancelled).

        Every cancellation comes here: hang-ups through `close`, the Cancel RPC, SessionCancel, and shutdown.
        """
        self.output.cancel(error or _cancelled())

    def fail(self, error: BaseException) -> None:
        """Cancel the request with an error of its submission; a bug becomes an incident."""
        self.cancel(error if isinstance(error, LineclearError) else self._services.incident(error))

    def close(self, outcome: str) -> None:
        """Forget the request and log its end. A request that the engine still has is cancelled."""
        if self.is_closed:
            return
        self.is_closed = True
        services = self._services
        del services.live[self.caller, self.request_id]
        services.on_close(self)
        services.streams.close(self.output, _cancelled())
        services.stats.add_ended(outcome)
        self._log_end(outcome)

    def take_served_tokens(self) -> int:
        """Return the prompt and output tokens of this server since the last call."""
        if self.output.started is None:
            return 0
        total = self.prompt_tokens + self.output.num_received - len(self.validated.received)
        served, self._num_counted = total - self._num_counted, total
        return served

    def record_completion(self, end: Completion) -> RequestTimings:
        """Add a complete answer to the statistics, and return its timings."""
        num_made_here = end.completion_tokens - len(self.validated.received)
        timings = request_timings(end.stats, self.arrival, num_made_here, self._services.clock())
        self._services.stats.add_finished(timings)
        self._services.lengths.learn(self._shape(), end.completion_tokens)
        return timings

    def incident(self, error: BaseException) -> LineclearError:
        """Log a bug and return the error that the client gets for it."""
        return self._services.incident(error)

    async def _resolve_bad_words(self) -> None:
        words = await self._services.tokenizers.bad_words(self.validated.bad_words)
        sampling = sampling_validation.with_bad_words(self.validated.sampling, words, self.bounds.vocab_size)
        self.validated = replace(self.validated, sampling=sampling)

    def _shape(self) -> AnswerShape:
        tenant = identity.share(self.tenant)
        return AnswerShape(tenant, self.prompt_tokens, self.max_tokens, self.validated.expected_tokens)

    def _finish_resumed(self, reason: FinishReason, matched_token_id: int | None) -> None:
        """Complete a resumed answer of which only the end is missing."""
        now, engine_id = self._services.clock(), self.output.engine_id
        stats = RequestStats(self.arrival, self.prompt_tokens, self.output.num_received, started_at=now, ended_at=now)
        started = Started(engine_id, 0, 0, 0, self.bounds.model_fingerprint)
        events: list[Event] = [started, Finished(engine_id, reason, matched_token_id, stats)]
        self._services.streams.dispatch(events, now)

    def _log_end(self, outcome: str) -> None:
        stats, num_tokens, now = self.output.stats, self.output.num_received, self._services.clock()
        fields: dict[str, Any] = {"request_id": self.request_id, "outcome": outcome, "tokens": num_tokens}
        if stats is not None:
            timings = request_timings(stats, self.arrival, num_tokens, now)._asdict()
            fields |= {f"{name}_seconds": round(value, 6) for name, value in timings.items() if value is not None}
            fields |= {
                "prompt_tokens": stats.prompt_tokens,
                "cached_tokens": stats.cached_tokens,
                "recomputed_tokens": stats.recomputed_tokens,
                "preemptions": stats.preemptions,
                "recoveries": stats.recoveries,
            }
        else:
            fields["e2e_latency_seconds"] = round(now - self.arrival, 6)
        log.info("request_ended", **fields)


def outcome_of(error: BaseException) -> str:
    """Return the `outcome` in the log and the metrics of a request that ended with `error`."""
    if isinstance(error, LineclearError):
        return error.reason.lower()
    return "internal_error" if isinstance(error, Exception) else "cancelled"


def _cancelled() -> Cancelled:
    return Cancelled("the caller cancelled the request")


def _end_of_resumed(request: Request, text: AnswerText | None) -> tuple[FinishReason, int | None] | None:
    """Return why the tokens of `request.output` are a complete answer, and the stop token; None if they are not.

    Raises InvalidRequest if the answer was complete before the last token.
    """
    count, last = len(request.output), request.output[-1]
    if text is not None and text.match is not None:
        if text.match.num_tokens < count:
            raise InvalidRequest.at("resume.token_ids", "has tokens after a stop string")
        return FinishReason.STOP_STRING, None
    if last in request.sampling.stop_ids and count > request.sampling.min_tokens:
        return (FinishReason.STOP_EOS if last in request.eos_ids else FinishReason.STOP_TOKEN), last
    return (FinishReason.LENGTH, None) if count == request.max_tokens else None
