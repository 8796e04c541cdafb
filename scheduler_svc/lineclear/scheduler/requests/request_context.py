"""An admitted request, from its validation to its last response: submit, cancel, close."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import structlog

from lineclear.api_limits import output_seed
from lineclear.errors import Cancelled, DeadlineExceeded, InternalError, InvalidRequest, LineclearError
from lineclear.model_files.fingerprint import prompt_digest
from lineclear.scheduler.core.events import Event, Failed, Finished, FinishReason, RequestStats, Started
from lineclear.scheduler.core.policies import share_of
from lineclear.scheduler.requests.adapters import LoadedAdapter
from lineclear.scheduler.requests.answer.answer import Answer
from lineclear.scheduler.requests.expected_length import AnswerShape
from lineclear.scheduler.requests.output_stream import Completion, OutputStream, end_of
from lineclear.scheduler.requests.request_metrics import EndedRequest, RequestTimings, request_timings
from lineclear.scheduler.requests.services import Call, RequestServices
from lineclear.scheduler.requests.tenant_limits import QueuePlace
from lineclear.scheduler.requests.validate import request as validation
from lineclear.scheduler.requests.validate import sampling as sampling_validation
from lineclear.scheduler.requests.validate import tools
from lineclear.scheduler.requests.validate.request import ModelBounds, ValidatedRequest
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import TraceContext
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.scheduler.text.parsed_answer import ParsedAnswerText
from lineclear.scheduler.text.template_renderer import wall_clock_us
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Sampling

log = structlog.get_logger()

TRAVEL_SECONDS = 0.25
"""By which the client's deadline of a call may be ahead of this server's: 0.1 s seen at a load of 20 on two cores."""
_CANCEL_SECONDS = 0.02  # the same of a cancellation by name, whose caller sees how the request ended
_UNKNOWN = AnswerShape("", 0, 0)


@dataclass(slots=True, eq=False)
class RequestContext:
    """A live request. Its owner calls `submit` once, reads the answer, and calls `close` in any case.

    As a context manager it is closed if the block raises, by a hang-up too. `deadline` is monotonic.
    """

    services: RequestServices
    validated: ValidatedRequest
    call: Call
    answer: Answer
    queue_place: QueuePlace
    """Its place in the limits of the queue. `submit` counts the tokens, unless they are counted before."""
    deadline: float
    adapter: LoadedAdapter | None
    _on_close: Callable[[RequestContext, EndedRequest], None]
    outputs: Sequence[OutputStream] = field(init=False)
    """What the client reads."""
    error: LineclearError | None = None
    """The error that the first output ended with, and with it the request."""
    shape: AnswerShape = _UNKNOWN
    """Numbers of tokens; 0 before tokenization."""
    prompt_digest: str = ""
    prompt_echo: pb.PromptEcho | None = None
    chat_time_us: int = 0
    """Time given to the chat template; 0 without one."""
    is_closed: bool = False
    trace: TraceContext = field(default_factory=identity.trace)
    """The trace of its call."""
    reasons: list[FinishReason | None] = field(default_factory=list)
    """How outputs ended whose end has been read, in that order; None: with an error."""
    _num_counted: int = 0
    """Tokens that `take_served_tokens` has returned."""
    _reason: FinishReason | None = None
    _wakeup: asyncio.Event | None = None
    """Set on new output."""

    def __post_init__(self) -> None:
        self.outputs = self.answer.outputs

    @property
    def request_id(self) -> str:
        """The client's name for the request, or a random one."""
        return self.validated.request_id

    @property
    def has_started(self) -> bool:
        """Whether an output has left the queue."""
        return any(output.started is not None for output in self.outputs)

    @property
    def has_ended(self) -> bool:
        """Whether all outputs have their end or their error, which may be unread."""
        return all(output.has_ended for output in self.outputs)

    def call_key(self, output: OutputStream) -> str:
        """Return what the ids of tool calls derive from: equal on each server that resumes the output."""
        return f"{self.prompt_digest}:{self.seed_of(output)}"

    def seed_of(self, output: OutputStream) -> int:
        """Return the seed of an output: the first one has that of the request."""
        seed = self.validated.sampling.seed
        return output_seed(seed, output.seed_index) if output.seed_index else seed

    async def wait(self) -> None:
        """Wait for output since the last call, whose output was read to its end."""
        if self._wakeup is None:
            self._wakeup = asyncio.Event()
            for output in self.outputs:
                output.subscribe(self._wakeup.set)
        await self._wakeup.wait()
        self._wakeup.clear()

    def end_output(self, reason: FinishReason | None, error: LineclearError | None = None) -> bool:
        """Record that the end of an output was read. Return whether it was the last one.

        An `error` of one output ends all of them.
        """
        if self._reason in (None, FinishReason.CANCELLED):  # of several outputs, the first complete one counts
            self._reason = reason
        self.reasons.append(reason)
        if error is not None and self.error is None:
            self.error = error
            if not self._is_read:
                self.cancel(error)
        return self._is_read

    @property
    def _is_read(self) -> bool:
        return len(self.reasons) == len(self.outputs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.close(error)

    async def submit(self, message: pb.GenerateRequest, **asks: Any) -> None:
        """Tokenize the prompt and queue the request in the engine. Raises the reason for a rejection.

        Does not wait if `validated.is_prepared`. `asks` are fields of the core's request if it asks for something else
        than output.
        """
        services, validated, call, sampling = self.services, self.validated, self.call, self.validated.sampling
        if validated.is_prepared:
            prompt: Sequence[int] = message.token_ids.ids
            prompt = prompt[-message.truncate_prompt_tokens :] if message.truncate_prompt_tokens else prompt
        else:
            prompt, sampling = await self._prepare(message)
        if self.has_ended:  # cancelled in the meantime
            return
        self.prompt_digest = prompt_digest(prompt)
        fields = validation.resolve(validated, message, prompt, self.prompt_digest, sampling, call.bounds)
        if validated.echoes_prompt:
            self.prompt_echo = await _echo(services, validated, prompt, call.bounds)
            if self.has_ended:
                return
        self.queue_place.add_tokens(len(prompt))
        tenant = share_of(call.tenant)
        self.shape = AnswerShape(tenant, len(prompt), fields["max_tokens"], message.expected_tokens)
        for output in self.outputs:
            if output.is_stopped:  # before its usage was known
                self.cancel_output(output.index)
        if not validated.is_prepared:
            await self._begin_outputs(prompt)
            if self.has_ended:
                return
        fields["deadline"], fields["tenant"] = self.deadline, tenant
        fields["expected_tokens"] = services.lengths.expect(self.shape, 0)
        fields["max_drafts"] = _max_drafts(services.settings, message, sampling)
        owner = identity.ANONYMOUS if services.settings.share_prefix_cache_across_tenants else call.caller
        fields["cache_salt"] = identity.cache_salt(owner, message.cache_salt)
        if self.adapter is not None:  # the core compares fingerprints of the model alone
            fields["adapter"] = self.adapter.files.key
            fields["model_fingerprint"] = fields["model_fingerprint"] and call.bounds.model_fingerprint
        self.answer.start(fields | asks if asks else fields)

    async def _prepare(self, message: pb.GenerateRequest) -> tuple[Sequence[int], Sampling]:
        """Return the prompt and the complete sampling parameters: texts are tokenized, and the form is compiled.

        Raises DeadlineExceeded.
        """
        services, sampling = self.services, self.validated.sampling
        if message.WhichOneof("prompt") == "chat":
            self.chat_time_us = message.resume.chat_time_us or wall_clock_us()
        try:
            async with asyncio.timeout(self.deadline - services.clock()):
                prompt = await services.tokenizers.ids(message, self.chat_time_us)
                if message.truncate_prompt_tokens:
                    prompt = prompt[-message.truncate_prompt_tokens :]
                sampling = await _with_texts(services, sampling, message, self.call.bounds.vocab_size)
                if (grammar := await _grammar(services, self.validated, message, prompt)) is not None:
                    sampling = replace(sampling, grammar=grammar)
                return prompt, sampling
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the prompt was tokenized") from None

    async def _begin_outputs(self, prompt: Sequence[int]) -> None:
        """Prepare the outputs for an answer in parts behind the prompt, and for one that another server has begun."""
        for stream in (*self.outputs, *self.answer.streams) if self.validated.tools is not None else ():
            if isinstance(stream.text, ParsedAnswerText):
                stream.text.begin(prompt)
        if any(self.validated.received):
            for output in self.outputs:
                await self._replay(output)

    async def _replay(self, output: OutputStream) -> None:
        """Compute the text of the tokens of a resumed output, and end it if only its end is missing."""
        received, services = self.validated.received[output.index], self.services
        if not received:
            return
        if output.text is not None:
            await services.tokenizers.replay(output.text, received)
        end = None
        if not output.has_ended:
            end = _end_of_resumed(self.validated, output.text, received, self.shape.max_tokens)
        if end is not None:
            stats, engine_id = self._stats_of(output), output.engine_id
            started = Started(engine_id, 0, 0, 0, self.call.bounds.model_fingerprint)
            events: list[Event] = [started, Finished(engine_id, *end, stats)]
            services.streams.dispatch(events, services.clock())

    def fingerprint(self, model_fingerprint: str) -> str:
        """Return the fingerprint of the answer's model: with an adapter, of both."""
        return model_fingerprint if self.adapter is None else self.adapter.fingerprint(model_fingerprint)

    def cancel(self, error: LineclearError | None = None) -> None:
        """Stop the engine's work on the request, and end its answer with `error` (default: Cancelled).

        Every cancellation comes here: hang-ups through `close`, the Cancel RPC, SessionCancel, and shutdown.
        """
        self.answer.cancel(error or self._cancelled())

    def cancel_output(self, index: int) -> bool:
        """Cancel one output; the others continue. Return False if the request has no such output."""
        for output in () if self.validated.num_held else self.outputs:
            if output.index == index:
                output.stop()
                # The engine does not have it. Before tokenization it ends in `submit`, with the tokens of the prompt.
                if self.shape is not _UNKNOWN and not self.answer.is_started and not output.has_ended:
                    stats, at = replace(self._stats_of(output), started_at=None), self.services.clock()
                    self.services.streams.dispatch([Failed(output.engine_id, self._cancelled(), stats)], at)
                return True
        return False

    def close(self, error: BaseException | None = None) -> None:
        """Forget the request, count and log its end. `error` ended it; None: its outputs did, or a hang-up.

        A request that the engine still has is cancelled.
        """
        if self.is_closed:
            return
        self.is_closed = True
        services = self.services
        is_complete = error is None and self._is_read and self.error is None
        cancelled = None if is_complete else self._cancelled(is_hang_up=True)
        if error is None and self._is_read:
            error = self.error
        elif not isinstance(error, Exception):  # a hang-up cancels the task of the call
            error = cancelled
        if error is not None:
            known = error if isinstance(error, LineclearError) else InternalError
            ended = self._ended(known.reason, known.code)
        else:
            assert self._reason is not None, "all ends are read, and there is no reason"
            ended = self._ended(self._reason.name)
        self._on_close(self, ended)
        self.answer.close(cancelled)
        self.queue_place.release(started=False)
        services.stats.add_ended(ended)
        log.info("request_ended", **ended.log_fields())

    def take_served_tokens(self) -> int:
        """Return the prompt and output tokens of this server since the last call."""
        if not self.has_started:
            return 0
        streams = self.answer.counted
        total = self.shape.prompt_tokens + sum(stream.num_received - stream.num_resumed for stream in streams)
        served, self._num_counted = total - self._num_counted, total
        return served

    def record_completion(self, output: OutputStream, end: Completion) -> RequestTimings:
        """Learn the length of a complete output, and return its timings."""
        num_made_here = end.completion_tokens - output.num_resumed
        if end.reason is not FinishReason.CANCELLED:
            self.services.lengths.learn(self.shape, end.completion_tokens)
        return request_timings(end.stats, self.call.arrival, num_made_here, self.services.clock())

    def _stats_of(self, output: OutputStream) -> RequestStats:
        """Return the statistics of an output that the engine does not compute."""
        now, num_prompt = self.services.clock(), self.shape.prompt_tokens
        return RequestStats(self.call.arrival, num_prompt, output.num_received, started_at=now, ended_at=now)

    def _cancelled(self, *, is_hang_up: bool = False) -> LineclearError:
        """Return the error of a cancellation: shortly before the deadline or later, the request has expired.

        A client cancels the call when its time is up, as this server does, and either may be first: the call may travel
        slower than its cancellation, and gRPC rounds the timeout of a call up by at most a hundredth before it is sent.
        """
        seconds = self.deadline - self.call.arrival
        hang_up = min(seconds / 2, TRAVEL_SECONDS) + seconds / 100
        margin = hang_up if is_hang_up else min(seconds / 10, _CANCEL_SECONDS)
        if self.services.clock() >= self.deadline - margin:
            return DeadlineExceeded("the deadline passed before the answer was complete")
        return Cancelled("the caller cancelled the request")

    def _ended(self, outcome: str, code: str = "OK") -> EndedRequest:
        """Return the record of the end, from which counters, histograms and the log line are made."""
        first, now = next((o for o in self.outputs if o.started is not None), self.outputs[0]), self.services.clock()
        timings = RequestTimings(None, None, None, now - self.call.arrival, None)
        if first.stats is not None:
            timings = request_timings(first.stats, self.call.arrival, first.num_received - first.num_resumed, now)
        return EndedRequest(
            request_id=self.request_id,
            outcome=outcome.lower(),
            was_admitted=self.queue_place.was_admitted,
            tenant=identity.logged_tenant(self.call.caller, self.call.tenant),
            trace_id=self.trace.trace_id,
            num_outputs=len(self.validated.received),
            num_tokens=sum(output.num_received for output in self.outputs),
            timings=timings,
            stats=first.stats,
            code=code,
        )


# --- the preparation of a request that has more than token ids -------------------------------------------------------


async def _with_texts(
    services: RequestServices, sampling: Sampling, message: pb.GenerateRequest, vocab_size: int
) -> Sampling:
    params, tokenizers = message.sampling, services.tokenizers
    if params.bad_words:
        words = await tokenizers.bad_words(tuple(params.bad_words))
        sampling = sampling_validation.with_bad_words(sampling, words, vocab_size)
    if sampling.dry_multiplier:
        breakers = await tokenizers.breakers(tuple(params.dry_sequence_breakers))
        sampling = sampling_validation.with_breakers(sampling, *breakers, vocab_size)
    return sampling


async def _grammar(
    services: RequestServices, validated: ValidatedRequest, message: pb.GenerateRequest, prompt: Sequence[int]
) -> str | None:
    """Compile the form of the answer here and on the workers; return None if it has none."""
    if validated.tools is not None and validated.tools.is_call_forced:
        calls = tools.forced_calls(message.chat, services.parsers, services.tokenizers.tokenizer, prompt)
        grammar = await services.grammars.grammar_of_calls(calls)
    elif message.sampling.HasField("structured_output"):
        grammar = await services.grammars.grammar(message.sampling.structured_output)
    else:
        return None
    loop, prepared = asyncio.get_running_loop(), asyncio.Event()

    def done() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(prepared.set)

    services.engine.prepare_grammar(grammar, done)
    await prepared.wait()
    return grammar


async def _echo(
    services: RequestServices, validated: ValidatedRequest, prompt: Sequence[int], bounds: ModelBounds
) -> pb.PromptEcho:
    """Return the prompt as its answer begins with it. Raises PromptTooLong."""
    keep_special = validated.text_options["keep_special"]
    text = await services.tokenizers.decode(prompt, keep_special=keep_special, vocab_size=bounds.vocab_size)
    validation.check_echo(text, bounds)
    return pb.PromptEcho(text=text, token_ids=prompt)


def _end_of_resumed(
    validated: ValidatedRequest, text: AnswerText | None, received: Sequence[int], max_tokens: int
) -> tuple[FinishReason, int | None] | None:
    """Return why the received tokens are a complete answer, and the stop token; None if they are not.

    Raises InvalidRequest if the answer was complete before the last token.
    """
    count, last = len(received), received[-1]
    if text is not None and (match := text.match) is not None:
        if match.num_tokens < count:
            message = "has tokens after a stop string, a repetition or the only call"
            raise InvalidRequest.at("resume.token_ids", message)
        return end_of(match), None
    if last in validated.sampling.stop_ids and count > validated.sampling.min_tokens:
        return (FinishReason.STOP_EOS if last in validated.fields["eos_ids"] else FinishReason.STOP_TOKEN), last
    return (FinishReason.LENGTH, None) if count == max_tokens else None


def _max_drafts(settings: SchedulerSettings, message: pb.GenerateRequest, sampling: Sampling) -> int:
    if settings.speculative_method == "none" or sampling.grammar:
        return 0  # a grammar follows the sampled tokens, one at a time
    if not message.HasField("num_speculative_tokens"):
        return settings.num_speculative_tokens
    return min(message.num_speculative_tokens, settings.num_speculative_tokens)
