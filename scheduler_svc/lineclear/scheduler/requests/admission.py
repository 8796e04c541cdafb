"""The door: from a message to a request in the queue, and from its end to the log.

Decides the order of admission (a small request that is wrong is told so first; who finds no room, before anything large
is looked at) and that whatever happens to a caller, the request ends with it. Whether there is room, is
`waiting_room`'s; what a valid request is, `validation`'s; how its tokens are made, `prompts`'; what becomes of it, the
engine's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import structlog

from lineclear.errors import Cancelled, DeadlineExceeded, InvalidRequest, LineclearError, RequestTooLarge
from lineclear.model_files.fingerprint import prompt_digest
from lineclear.scheduler.core.events import Event, Finished, FinishReason, RequestStats, Started
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.requests import validation
from lineclear.scheduler.requests.loop_pacer import SMALL_BYTES, LoopPacer
from lineclear.scheduler.requests.output_stream import Completion, OutputRouter, OutputStream
from lineclear.scheduler.requests.queue_quota import QueueQuota
from lineclear.scheduler.requests.request_stats import RequestTimings, ServerStats, request_timings
from lineclear.scheduler.requests.tokenizer_pool import TokenizerPool
from lineclear.scheduler.requests.validation import ModelBounds, ValidatedRequest
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import Identity
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.scheduler.text.template_renderer import wall_clock_us
from lineclear.v1 import inference_pb2 as pb

log = structlog.get_logger()


_was_let_in: ContextVar[bool] = ContextVar("was_let_in", default=False)


def was_let_in() -> bool:
    """Whether the call of this task has opened a ticket."""
    return _was_let_in.get()


class Submitter(Protocol):
    """The part of the engine that admission calls."""

    def submit(self, request: Request) -> None:
        """Queue a request; the outcome is an event."""
        ...


class RequestContext:
    """A request that was let in, from its check to its end."""

    __slots__ = (
        *("arrival", "bounds", "caller", "chat_time_us", "checked", "deadline"),
        *("is_over", "output", "max_tokens", "prompt_digest", "prompt_tokens", "tenant", "text"),
    )

    def __init__(
        self,
        checked: ValidatedRequest,
        output: OutputStream,
        text: AnswerText | None,
        bounds: ModelBounds,
        caller: Identity,
        tenant: str,
        arrival: float,
        deadline: float,
    ) -> None:
        self.checked = checked
        self.output = output
        self.text = text
        self.bounds = bounds
        self.caller = caller
        self.tenant = tenant
        self.arrival = arrival
        self.deadline = deadline
        self.prompt_tokens = 0  # these two are known once it is tokenized
        self.max_tokens = 0
        self.prompt_digest = ""
        self.chat_time_us = 0  # what the chat template took for the time; 0 where the prompt is no conversation
        self.is_over = False


class Admission:
    """Opens, submits and closes tickets. On one event loop."""

    def __init__(
        self,
        settings: SchedulerSettings,
        prompts: TokenizerPool,
        streams: OutputRouter,
        engine: Submitter,
        room: QueueQuota,
        stats: ServerStats,
        pacer: LoopPacer,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._streams = streams
        self._engine = engine
        self._stats = stats
        self._clock = clock
        self._quota = room
        self._pacer = pacer
        self._requests: dict[tuple[Identity, str], RequestContext] = {}  # by the caller and its name for the request

    def open(
        self, message: pb.GenerateRequest, bounds: ModelBounds, caller: Identity, tenant: str, seconds: float | None
    ) -> RequestContext:
        """Let a request of `caller` in that has `seconds` from now (None: the default). Raises what it is refused for.

        Whoever has the ticket calls `submit` once, and `close` whatever happens.
        """
        now = self._clock()
        num_bytes = message.ByteSize()
        if num_bytes > self._settings.max_request_bytes:
            raise _too_large(num_bytes, self._settings.max_request_bytes)
        seconds = self._settings.default_deadline_seconds if seconds is None else seconds
        seconds = min(seconds, self._settings.max_deadline_seconds)
        # Who sends what will never be taken learns it at once, and does not wait for room to hear it.
        known = validation.check(message, bounds) if num_bytes <= SMALL_BYTES else None
        self._quota.reserve(tenant, seconds)
        try:
            if known is None:
                with self._pacer.measured():
                    checked = validation.check(message, bounds)
            else:
                checked = known
            validation.check_model(message, checked, bounds)
            text = self._answer_text(checked)
            mailbox = self._streams.open(
                checked.request_id,
                text,
                owner=caller,
                wants_times=checked.token_timings,
                num_received=len(checked.received),
                seed=checked.sampling.seed,
            )
        except BaseException:
            self._quota.release(tenant, 0, began=False)
            raise
        ticket = RequestContext(checked, mailbox, text, bounds, caller, tenant, now, now + seconds)
        _was_let_in.set(True)
        mailbox.on_dequeued = partial(self._on_dequeued, ticket)
        self._requests[caller, mailbox.request_id] = ticket
        return ticket

    async def pace(self, message: pb.GenerateRequest) -> None:
        """Return when the request may be opened, at once where it is small. To be awaited right before `open`."""
        if message.ByteSize() > SMALL_BYTES:
            await self._pacer.wait()

    def _on_dequeued(self, ticket: RequestContext, began: bool) -> None:
        self._quota.release(ticket.tenant, ticket.prompt_tokens, began=began)

    async def submit(self, ticket: RequestContext, message: pb.GenerateRequest) -> None:
        """Tokenize and hand over to the engine. Raises what the request is refused for."""
        if message.WhichOneof("prompt") == "chat":
            ticket.chat_time_us = message.resume.chat_time_us or wall_clock_us()
        try:
            async with asyncio.timeout(ticket.deadline - self._clock()):
                prompt = await self._prompts.ids(message, ticket.chat_time_us)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the prompt was tokenized") from None
        if ticket.is_over:  # given up meanwhile
            return
        ticket.prompt_digest = prompt_digest(prompt)
        validation.check_prompt(ticket.checked, ticket.prompt_digest)
        request = validation.resolve(ticket.checked, ticket.output.engine_id, prompt, ticket.deadline, ticket.bounds)
        request = replace(request, cache_salt=self._salt(ticket, message), tenant=identity.share(ticket.tenant))
        self._quota.add_tokens(ticket.tenant, len(request.prompt))
        ticket.prompt_tokens, ticket.max_tokens = len(request.prompt), request.max_tokens
        if not request.output:
            self._engine.submit(request)
            return
        if ticket.text is not None:
            await self._prompts.replay(ticket.text, request.output)
            if ticket.is_over:
                return
        end = _end_of(request, ticket.text)
        if end is None:
            self._engine.submit(request)
        else:  # all that is missing is the end
            self._finish_at_once(ticket, *end)

    def _finish_at_once(self, ticket: RequestContext, reason: FinishReason, matched_token_id: int | None) -> None:
        now, mailbox = self._clock(), ticket.output
        record = RequestStats(ticket.arrival, ticket.prompt_tokens, mailbox.num_received, started_at=now, ended_at=now)
        started = Started(mailbox.engine_id, 0, 0, 0, ticket.bounds.model_fingerprint)
        events: list[Event] = [started, Finished(mailbox.engine_id, reason, matched_token_id, record)]
        self._streams.dispatch(events, now)

    def count_rejected(self, reason: str) -> None:
        """Count an error that a call or an order ended with before any request of it was let in.

        What was let in is counted by `close`.
        """
        self._stats.add_rejected(reason.lower())

    def retry_after_seconds(self) -> float:
        """When it may be worth asking again."""
        return self._quota.retry_after_seconds()

    def spent(self, ticket: RequestContext, end: Completion) -> RequestTimings:
        """The times of a complete answer, which count in the statistics from now on."""
        made_here = end.completion_tokens - len(ticket.checked.received)
        spent = request_timings(end.record, ticket.arrival, made_here, self._clock())
        self._stats.add_finished(spent)
        return spent

    def cancel(self, caller: Identity, request_id: str) -> bool:
        """End a request of `caller` that is in progress; whether there was one. Its reader gets Cancelled."""
        ticket = self._requests.get((caller, request_id))
        if ticket is None:
            return False
        ticket.output.fail(Cancelled("the caller cancelled the request"))
        return True

    def close(self, ticket: RequestContext, outcome: str) -> None:
        """The caller has all it will get. A request that still goes on is cancelled."""
        ticket.is_over = True
        del self._requests[ticket.caller, ticket.output.request_id]
        self._streams.close(ticket.output)
        self._stats.add_ended(outcome)
        _log_end(ticket, outcome, self._clock())

    def _salt(self, ticket: RequestContext, message: pb.GenerateRequest) -> bytes:
        """Which cached prefixes the request may share: its caller's, or those with the request's salt among them."""
        owner = identity.ANONYMOUS if self._settings.share_prefix_cache_across_tenants else ticket.caller
        return identity.cache_salt(owner, message.cache_salt)

    def _answer_text(self, checked: ValidatedRequest) -> AnswerText | None:
        if not checked.wants_text and checked.stops is None:
            return None
        return AnswerText(
            self._prompts.tokenizer,
            stops=checked.stops,
            include_stop_string=checked.include_stop_string,
            min_tokens=checked.sampling.min_tokens,
            silent_ids=checked.stop_ids,
            keep_special=checked.keep_special,
        )


def _too_large(num_bytes: int, limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the request has {num_bytes} bytes, the limit is {limit}; send less, or have the server raise "
        "--max-message-bytes",
        metadata={"request_bytes": str(num_bytes), "limit": str(limit)},
    )


def _end_of(request: Request, text: AnswerText | None) -> tuple[FinishReason, int | None] | None:
    """Why an answer that begins with all of `request.output` is complete, and the token that ended it; None if not.

    Raises InvalidRequest if it was complete before.
    """
    count, last = len(request.output), request.output[-1]
    if text is not None and text.match is not None:
        if text.match.num_tokens < count:
            raise InvalidRequest.at("resume.token_ids", "goes on after a stop string")
        return FinishReason.STOP_STRING, None
    if last in request.sampling.stop_ids and count > request.sampling.min_tokens:
        return (FinishReason.STOP_EOS if last in request.eos_ids else FinishReason.STOP_TOKEN), last
    return (FinishReason.LENGTH, None) if count == request.max_tokens else None


def outcome_of(error: BaseException) -> str:
    """The word the log has for a request that ended with this."""
    if isinstance(error, LineclearError):
        return error.reason.lower()
    return "internal_error" if isinstance(error, Exception) else "cancelled"


def _log_end(ticket: RequestContext, outcome: str, now: float) -> None:
    mailbox, arrival = ticket.output, ticket.arrival
    record = mailbox.stats
    fields: dict[str, Any] = {"request_id": mailbox.request_id, "outcome": outcome, "tokens": mailbox.num_received}
    if record is not None:
        spent = request_timings(record, arrival, mailbox.num_received, now)
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
