"""An admitted request, from its validation to its last response: submit, cancel, close."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import structlog

from lineclear.api_limits import output_seed
from lineclear.errors import Cancelled, DeadlineExceeded, InternalError, InvalidRequest, LineclearError
from lineclear.model_files.fingerprint import prompt_digest
from lineclear.scheduler.core.events import Event, Failed, Finished, FinishReason, RequestStats, Started
from lineclear.scheduler.core.fair_share import share_of
from lineclear.scheduler.core.sequence import Request, Scoring
from lineclear.scheduler.requests import model_identity, sampling_validation, validation
from lineclear.scheduler.requests.adapters import LoadedAdapter
from lineclear.scheduler.requests.beam_group import BeamGroup
from lineclear.scheduler.requests.beam_search import BeamSettings
from lineclear.scheduler.requests.best_of import BestOf
from lineclear.scheduler.requests.forced_calls import forced_calls
from lineclear.scheduler.requests.grammar_pool import GrammarPool
from lineclear.scheduler.requests.output_length import AnswerShape, OutputLengths
from lineclear.scheduler.requests.output_router import OutputRouter
from lineclear.scheduler.requests.output_stream import Completion, OutputStream, end_of
from lineclear.scheduler.requests.queue_limits import NoPlace, QueuePlace
from lineclear.scheduler.requests.request_stats import EndedRequest, RequestTimings, ServerStats, request_timings
from lineclear.scheduler.requests.tokenizer_pool import TokenizerPool
from lineclear.scheduler.requests.validation import ModelBounds, ValidatedRequest
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import Identity
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.scheduler.text.parsed_answer import AnswerParsers, ParsedAnswerText
from lineclear.scheduler.text.template_renderer import wall_clock_us
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Pooling, Sampling

log = structlog.get_logger()

_TRAVEL_SECONDS = (
    0.02  # by which a client's clock may be ahead of this server's for one call: 2 ms seen at a load of 14
)


class Asks(NamedTuple):
    """What a request without output asks for."""

    scoring: Scoring | None = None
    pooling: Pooling | None = None


class Submitter(Protocol):
    """The engine method that queues a request."""

    def submit(self, request: Request, *siblings: Request) -> None:
        """Queue a request and its siblings, all or none; the outcome is an event of each."""
        ...

    def prepare_grammar(self, grammar: str, done: Callable[[], None]) -> None:
        """Have the workers compile a grammar, then call `done()` from another thread."""
        ...


@dataclass(frozen=True, slots=True)
class RequestServices:
    """The services that all requests of a server use. `live` maps (caller, request_id) to the request."""

    tokenizers: TokenizerPool
    grammars: GrammarPool
    parsers: AnswerParsers
    streams: OutputRouter
    engine: Submitter
    lengths: OutputLengths
    stats: ServerStats
    incident: Callable[[BaseException], LineclearError]
    clock: Callable[[], float]
    max_drafts: int
    live: dict[tuple[Identity, str], RequestContext]
    on_close: Callable[[RequestContext], None]


class RequestContext:
    """A live request. Its owner calls `submit` once, reads the answer, and calls `close` in any case.

    As a context manager it is closed if the block raises, by a hang-up too. `arrival` and `deadline` are monotonic.
    """

    __slots__ = (
        *("arrival", "bounds", "cache_salt", "caller", "chat_time_us", "deadline", "error", "is_closed", "max_tokens"),
        *("adapter", "outputs", "prompt_digest", "prompt_echo", "prompt_tokens", "tenant", "validated", "_asks"),
        *(
            "_candidates",
            "_group",
            "_is_submitted",
            "_num_counted",
            "_num_unread",
            "_queue_place",
            "_reason",
            "_services",
            "_trace_id",
            "_wakeup",
        ),
    )

    def __init__(
        self,
        services: RequestServices,
        validated: ValidatedRequest,
        outputs: tuple[OutputStream, ...],
        candidates: tuple[OutputStream, ...],
        queue_place: QueuePlace,
        bounds: ModelBounds,
        caller: Identity,
        tenant: str,
        cache_salt: bytes,
        arrival: float,
        deadline: float,
        adapter: LoadedAdapter | None = None,
        asks: Asks | None = None,
    ) -> None:
        self._asks = asks
        self.validated = validated
        self.outputs = outputs
        self.error: LineclearError | None = None
        """The error that the first output ended with, and with it the request."""
        self.bounds = bounds
        self.caller = caller
        self.tenant = tenant
        self.cache_salt = cache_salt
        self.arrival = arrival
        self.deadline = deadline
        self.adapter = adapter
        self._trace_id = identity.trace_id()
        self.prompt_tokens = 0  # 0 before tokenization, as max_tokens
        self.max_tokens = 0
        self.prompt_digest = ""
        self.prompt_echo: pb.PromptEcho | None = None
        self.chat_time_us = 0  # time given to the chat template; 0 without one
        self.is_closed = False
        self._num_counted = 0  # tokens that `take_served_tokens` has returned
        self._services = services
        self._queue_place = queue_place
        self._is_submitted = False
        self._candidates = candidates
        self._group: BestOf | BeamGroup | None = None
        self._num_unread = len(outputs)  # outputs whose end has not been read
        self._reason: FinishReason | None = None
        self._wakeup: asyncio.Event | None = None  # set on new output of any of several

    @property
    def request_id(self) -> str:
        """The client's name for the request, or a random one."""
        return self.validated.request_id

    @property
    def has_started(self) -> bool:
        """Whether an output has left the queue."""
        return any(output.started is not None for output in (*self.outputs, *self._candidates))

    @property
    def num_beams_running(self) -> int:
        """Number of beams of a search that has started; 0 of other requests."""
        return self._group.num_running if isinstance(self._group, BeamGroup) else 0

    @property
    def has_ended(self) -> bool:
        """Whether all outputs have their end or their error, which may be unread."""
        return all(output.has_ended for output in self.outputs)

    def call_key(self, output: OutputStream) -> str:
        """Return what the ids of tool calls derive from: equal on each server that resumes the output."""
        return f"{self.prompt_digest}:{self.sampling_of(output).seed}"

    def sampling_of(self, output: OutputStream) -> Sampling:
        """Return the sampling parameters of an output: those of the request, with a seed of its own."""
        sampling = self.validated.sampling
        if self._candidates and sampling.logprobs < 0:
            sampling = replace(sampling, logprobs=0)  # to choose by
        return replace(sampling, seed=output_seed(sampling.seed, output.seed_index)) if output.seed_index else sampling

    async def wait(self) -> None:
        """Wait for output."""
        if len(self.outputs) == 1:
            await self.outputs[0].wait()
            return
        if self._wakeup is None:
            self._wakeup = asyncio.Event()
            for output in self.outputs:
                output.subscribe(self._wakeup.set)
        while not any(output.has_output for output in self.outputs):
            self._wakeup.clear()
            await self._wakeup.wait()

    def end_output(self, reason: FinishReason | None, error: LineclearError | None = None) -> bool:
        """Record that the end of an output was read. Return whether it was the last one.

        An `error` of one output ends all of them.
        """
        if self._reason in (None, FinishReason.CANCELLED):  # of several outputs, the first complete one counts
            self._reason = reason
        self._num_unread -= 1
        if error is not None and self.error is None:
            self.error = error
            if self._num_unread:
                self.cancel(error)
        return not self._num_unread

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.close(error)

    def submits_at_once(self, message: pb.GenerateRequest) -> bool:
        """Whether `submit` does not wait: nothing is text, and nothing is compiled or computed again."""
        validated = self.validated
        return (
            validated.prompt_path == "token_ids.ids"
            and not (validated.bad_words or validated.sampling.dry_multiplier or validated.echoes_prompt)
            and not any(validated.received)
            and not message.sampling.HasField("structured_output")
        )

    async def submit(self, message: pb.GenerateRequest) -> None:
        """Tokenize the prompt and queue the request in the engine. Raises the reason for a rejection."""
        if self.submits_at_once(message):
            prompt: Sequence[int] = message.token_ids.ids
            if message.truncate_prompt_tokens:
                prompt = prompt[-message.truncate_prompt_tokens :]
        else:
            if message.WhichOneof("prompt") == "chat":
                self.chat_time_us = message.resume.chat_time_us or wall_clock_us()
            try:
                async with asyncio.timeout(self.deadline - self._services.clock()):
                    prompt = await self._services.tokenizers.ids(message, self.chat_time_us)
                    if message.truncate_prompt_tokens:
                        prompt = prompt[-message.truncate_prompt_tokens :]
                    await self._resolve_texts()
                    await self._resolve_form(message, prompt)
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed before the prompt was tokenized") from None
        if self.has_ended:  # cancelled in the meantime
            return
        self.prompt_digest = prompt_digest(prompt)
        for output in (*self.outputs, *self._candidates):
            if isinstance(output.text, ParsedAnswerText):
                output.text.begin(prompt)
        model_identity.check_prompt(self.validated, self.prompt_digest)
        shared = validation.resolve(self.validated, prompt, self.deadline, self.bounds)
        if self.validated.echoes_prompt:
            await self._resolve_echo(prompt)
            if self.has_ended:
                return
        self._queue_place.add_tokens(len(prompt))
        self.prompt_tokens, self.max_tokens = len(prompt), shared["max_tokens"]
        shared |= self._model_fields()
        shared |= {"cache_salt": self.cache_salt, "tenant": share_of(self.tenant)}
        if self.validated.beams is not None:
            self._start_beams(shared, self.validated.beams)
            return
        submitted: list[tuple[OutputStream, Request]] = []
        if self._candidates:
            self._check_held(len(self._candidates))
            self._group = BestOf(self.outputs, self._candidates, self.validated.sampling.logprobs >= 0)
        for output in self._candidates or self.outputs:
            received = () if self._candidates else self.validated.received[output.index] or ()
            own = self._of_output(shared, output, received, is_sibling=bool(submitted))
            if received and not await self._replay(output, own):
                continue
            submitted.append((output, own))
        requests = [own for output, own in submitted if not output.has_ended]
        if requests:
            self._is_submitted = True
            first = replace(requests[0], is_sibling=False) if requests[0].is_sibling else requests[0]
            self._services.engine.submit(first, *requests[1:])

    def _of_output(
        self, shared: dict[str, Any], output: OutputStream, received: tuple[int, ...], *, is_sibling: bool
    ) -> Request:
        """Return the core's request for one output."""
        own: dict[str, Any] = {"request_id": output.engine_id, "sampling": self.sampling_of(output)}
        if self._asks is not None:
            return Request(**shared | own | {"max_tokens": 0} | self._asks._asdict())
        if output.index or received:
            own["scoring"] = None
        return Request(
            **shared | own,
            output=received,
            expected_tokens=self._services.lengths.expect(self._shape(), len(received)),
            max_drafts=self._max_drafts(),
            wants_position=self.validated.wants_position and not is_sibling,
            is_sibling=is_sibling,
        )

    def _check_held(self, num_outputs: int) -> None:
        """Raises InvalidRequest if more tokens may be held until the end than the server allows."""
        count, limit = num_outputs * self.max_tokens, self.bounds.max_held_tokens
        if count > limit:
            message = f"keeps up to {count} tokens until the end, the limit is {limit}; lower it or max_tokens"
            raise InvalidRequest.at("sampling.best_of" if self._candidates else "sampling.num_beams", message)

    def _start_beams(self, shared: dict[str, Any], beams: BeamSettings) -> None:
        services = self._services
        self._check_held(beams.num_beams)
        settings = beams._replace(max_tokens=self.max_tokens)
        shown = self.validated.sampling.logprobs
        num_top = min(max(settings.num_top, shown), self.bounds.vocab_size)
        own = {"sampling": Sampling(logprobs=num_top), "eos_ids": frozenset(), "queued_since": self.arrival}
        first = Request(**shared | own, request_id=self.request_id, wants_position=self.validated.wants_position)

        def open_stream(is_first: bool, index: int) -> OutputStream:
            place = self._queue_place if is_first else NoPlace()
            return services.streams.open(self.request_id, None, place, num_received=index)

        def close_stream(stream: OutputStream) -> None:
            services.streams.close(stream, self._cancelled())

        group = BeamGroup(
            first, settings, self.outputs, open_stream, close_stream, services.engine.submit, services.clock, shown
        )
        self._group, self._is_submitted = group, True
        group.start()

    async def _replay(self, output: OutputStream, request: Request) -> bool:
        """Compute the text of the tokens of a resumed output. Return whether tokens are missing at its end."""
        if output.text is not None:
            await self._services.tokenizers.replay(output.text, request.output)
            if output.has_ended:
                return False
        end = _end_of_resumed(request, output.text)
        if end is not None:
            self._finish_resumed(output, *end)
        return end is None

    def _model_fields(self) -> dict[str, Any]:
        """Return what the core must know of the adapter. The core compares fingerprints of the model alone."""
        if self.adapter is None:
            return {}
        required = self.bounds.model_fingerprint if self.validated.model_fingerprint else ""
        return {"adapter": self.adapter.files.key, "model_fingerprint": required}

    def fingerprint(self, model_fingerprint: str) -> str:
        """Return the fingerprint of the answer's model: with an adapter, of both."""
        return model_fingerprint if self.adapter is None else self.adapter.fingerprint(model_fingerprint)

    async def _resolve_form(self, message: pb.GenerateRequest, prompt: Sequence[int]) -> None:
        """Compile the form of the answer, if it has one, here and on the workers."""
        services = self._services
        if self.validated.is_call_forced:
            calls = forced_calls(message.chat, services.parsers, services.tokenizers.tokenizer, prompt)
            grammar = await services.grammars.grammar_of_calls(calls)
        elif message.sampling.HasField("structured_output"):
            grammar = await services.grammars.grammar(message.sampling.structured_output)
        else:
            return
        loop, prepared = asyncio.get_running_loop(), asyncio.Event()

        def done() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(prepared.set)

        self._services.engine.prepare_grammar(grammar, done)
        await prepared.wait()
        self.validated = replace(self.validated, sampling=replace(self.validated.sampling, grammar=grammar))

    def cancel(self, error: LineclearError | None = None) -> None:
        """Stop the engine's work on the request, and end its answer with `error` (default: Cancelled).

        Every cancellation comes here: hang-ups through `close`, the Cancel RPC, SessionCancel, and shutdown.
        """
        error = error or self._cancelled()
        if self._group is not None:
            self._group.cancel(error)
        for output in self.outputs:
            output.cancel(error)

    def cancel_output(self, index: int) -> bool:
        """Cancel one output; the others continue. Return False if the request has no such output."""
        for output in () if self.validated.is_held else self.outputs:
            if output.index == index:
                output.stop()
                if not self._is_submitted and not output.has_ended:  # the engine does not have it
                    stats = self._stats_of(output)
                    self._services.streams.dispatch([Failed(output.engine_id, self._cancelled(), stats)], stats.arrival)
                return True
        return False

    def fail(self, error: BaseException) -> None:
        """Cancel the request with an error of its submission; a bug becomes an incident."""
        self.cancel(error if isinstance(error, LineclearError) else self._services.incident(error))

    def close(self, error: BaseException | None = None) -> None:
        """Forget the request, count and log its end. `error` ended it; None: its outputs did, or a hang-up.

        A request that the engine still has is cancelled.
        """
        if self.is_closed:
            return
        self.is_closed = True
        services = self._services
        cancelled = self._cancelled(is_hang_up=True)
        if error is None and self._num_unread == 0:
            error = self.error
        elif not isinstance(error, Exception):  # a hang-up cancels the task of the call
            error = cancelled
        if error is not None:
            outcome = outcome_of(error)
        else:
            assert self._reason is not None, "all ends are read, and there is no reason"
            outcome = self._reason.name
        ended = self._ended(outcome)
        del services.live[self.caller, self.request_id]
        services.on_close(self)
        for output in (*self.outputs, *self._candidates):
            services.streams.close(output, cancelled)
        if isinstance(self._group, BeamGroup):
            self._group.close()
            services.stats.search_tokens += sum(output.num_received for output in self.outputs)
        self._queue_place.release(started=False)
        services.stats.add_ended(ended)
        log.info("request_ended", **ended.log_fields())

    def take_served_tokens(self) -> int:
        """Return the prompt and output tokens of this server since the last call."""
        outputs = self._candidates or self.outputs
        if all(output.started is None for output in outputs):
            return 0
        total = self.prompt_tokens + sum(output.num_received - output.num_resumed for output in outputs)
        served, self._num_counted = total - self._num_counted, total
        return served

    def record_completion(self, output: OutputStream, end: Completion) -> RequestTimings:
        """Learn the length of a complete output, and return its timings."""
        num_made_here = end.completion_tokens - output.num_resumed
        if end.reason is not FinishReason.CANCELLED:
            self._services.lengths.learn(self._shape(), end.completion_tokens)
        return request_timings(end.stats, self.arrival, num_made_here, self._services.clock())

    def incident(self, error: BaseException) -> LineclearError:
        """Log a bug and return the error that the client gets for it."""
        return self._services.incident(error)

    async def _resolve_echo(self, prompt: Sequence[int]) -> None:
        keep_special, bounds = self.validated.keep_special, self.bounds
        text = await self._services.tokenizers.decode(prompt, keep_special=keep_special, vocab_size=bounds.vocab_size)
        validation.check_echo(text, bounds)
        self.prompt_echo = pb.PromptEcho(text=text, token_ids=prompt)

    async def _resolve_texts(self) -> None:
        """Tokenize the texts in the sampling parameters."""
        sampling, tokenizers = self.validated.sampling, self._services.tokenizers
        if self.validated.bad_words:
            words = await tokenizers.bad_words(self.validated.bad_words)
            sampling = sampling_validation.with_bad_words(sampling, words, self.bounds.vocab_size)
        if sampling.dry_multiplier:
            breakers = await tokenizers.breakers(self.validated.dry_breakers)
            sampling = sampling_validation.with_breakers(sampling, *breakers, self.bounds.vocab_size)
        if sampling is not self.validated.sampling:
            self.validated = replace(self.validated, sampling=sampling)

    def _max_drafts(self) -> int:
        most, wanted = self._services.max_drafts, self.validated.max_drafts
        if self.validated.sampling.grammar:
            return 0  # a grammar follows the sampled tokens, one at a time
        return most if wanted is None else min(wanted, most)

    def _shape(self) -> AnswerShape:
        tenant = share_of(self.tenant)
        return AnswerShape(tenant, self.prompt_tokens, self.max_tokens, self.validated.expected_tokens)

    def _stats_of(self, output: OutputStream) -> RequestStats:
        """Return the statistics of an output that the engine does not compute."""
        now = self._services.clock()
        return RequestStats(self.arrival, self.prompt_tokens, output.num_received, started_at=now, ended_at=now)

    def _finish_resumed(self, output: OutputStream, reason: FinishReason, matched_token_id: int | None) -> None:
        """Complete a resumed output of which only the end is missing."""
        stats, engine_id = self._stats_of(output), output.engine_id
        started = Started(engine_id, 0, 0, 0, self.bounds.model_fingerprint)
        events: list[Event] = [started, Finished(engine_id, reason, matched_token_id, stats)]
        self._services.streams.dispatch(events, self._services.clock())

    def _cancelled(self, *, is_hang_up: bool = False) -> LineclearError:
        """Return the error of a cancellation: at the deadline or later, the request has expired.

        A client cancels the call when its time is up, as this server does, and either may be first: the call may travel
        slower than its cancellation, and gRPC rounds the timeout of a call up by at most a hundredth before it is sent.
        """
        seconds = self.deadline - self.arrival
        margin = min(seconds / 10, _TRAVEL_SECONDS) + (seconds / 100 if is_hang_up else 0.0)
        if self._services.clock() >= self.deadline - margin:
            return DeadlineExceeded("the deadline passed before the answer was complete")
        return Cancelled("the caller cancelled the request")

    def _ended(self, outcome: str) -> EndedRequest:
        """Return the record of the end, from which counters, histograms and the log line are made."""
        first, now = next((o for o in self.outputs if o.started is not None), self.outputs[0]), self._services.clock()
        timings = RequestTimings(None, None, None, now - self.arrival, None)
        if first.stats is not None:
            timings = request_timings(first.stats, self.arrival, first.num_received - first.num_resumed, now)
        return EndedRequest(
            request_id=self.request_id,
            outcome=outcome.lower(),
            was_admitted=self._queue_place.was_admitted,
            tenant=identity.logged_tenant(self.caller, self.tenant),
            trace_id=self._trace_id,
            num_outputs=len(self.validated.received),
            num_tokens=sum(output.num_received for output in self.outputs),
            timings=timings,
            stats=first.stats,
        )


def outcome_of(error: BaseException) -> str:
    """Return the `outcome` in the log and the metrics of a request that ended with `error`."""
    return error.reason if isinstance(error, LineclearError) else InternalError.reason


def _end_of_resumed(request: Request, text: AnswerText | None) -> tuple[FinishReason, int | None] | None:
    """Return why the tokens of `request.output` are a complete answer, and the stop token; None if they are not.

    Raises InvalidRequest if the answer was complete before the last token.
    """
    count, last = len(request.output), request.output[-1]
    if text is not None and text.match is not None:
        if text.match.num_tokens < count:
            raise InvalidRequest.at("resume.token_ids", "has tokens after a stop string, a repetition or the only call")
        return end_of(text.match), None
    if last in request.sampling.stop_ids and count > request.sampling.min_tokens:
        return (FinishReason.STOP_EOS if last in request.eos_ids else FinishReason.STOP_TOKEN), last
    return (FinishReason.LENGTH, None) if count == request.max_tokens else None
