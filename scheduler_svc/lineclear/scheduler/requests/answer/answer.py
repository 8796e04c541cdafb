"""The outputs of a request, and the requests of the core that make them.

`Answer` streams its outputs: each is one request of the core, read while it grows. `BestOf` generates more outputs than
requested. Other answers override `open` and `start`. A request calls `start` once, `cancel` at any time, and `close` at
its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, Self

from lineclear.api_limits import output_seed
from lineclear.errors import LineclearError
from lineclear.scheduler.core.events import Started
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.requests.logprob_messages import encoded_prompt_logprobs
from lineclear.scheduler.requests.output_stream import OutputChunk, OutputStream
from lineclear.scheduler.requests.services import RequestServices
from lineclear.scheduler.requests.tenant_limits import QueuePlace
from lineclear.scheduler.requests.validate.request import ValidatedRequest
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.scheduler.text.parsed_answer import ParsedAnswerText
from lineclear.wire.messages import Sampling


@dataclass(eq=False)
class Answer:
    """Outputs that are streamed. `streams` are those of the requests of the core, of which `outputs` are made."""

    _services: RequestServices
    _validated: ValidatedRequest
    outputs: Sequence[OutputStream]
    streams: Sequence[OutputStream]
    is_started: bool = False
    """Requests of the core were submitted."""
    is_over: bool = False
    """No other request of the core is submitted."""

    @classmethod
    def open(cls, services: RequestServices, validated: ValidatedRequest, place: QueuePlace) -> Self:
        indices = [index for index, received in enumerate(validated.received) if received is not None]
        outputs = open_streams(services, validated, indices, place)
        return cls(services, validated, outputs, outputs)

    @property
    def num_running_beams(self) -> int:
        """Number of beams of a search that has started; 0 of other answers."""
        return 0

    @property
    def counted(self) -> Sequence[OutputStream]:
        """The streams whose tokens its tenant was served."""
        return self.streams

    def start(self, fields: dict[str, Any]) -> None:
        """Submit a request of the core for each output that has no end yet. `fields` are those that they share."""
        waiting = [stream for stream in self.streams if not stream.has_ended]
        self.submit([self._request(fields, stream, is_sibling=i > 0) for i, stream in enumerate(waiting)])

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests of the core together."""
        if requests:
            self.is_started = True
            self._services.engine.submit(*requests)

    def _request(self, fields: dict[str, Any], stream: OutputStream, *, is_sibling: bool) -> Request:
        own = {**fields, "request_id": stream.engine_id}
        received = self._validated.received[stream.index] if stream.num_resumed else None
        if stream.seed_index:
            own["sampling"] = seeded(fields["sampling"], stream.seed_index)
            own["scoring"] = None  # of the prompt, by the first output
        if received:
            own["output"], own["scoring"] = received, None
            own["expected_tokens"] = (
                max(fields["expected_tokens"], len(received) + 1) if fields["expected_tokens"] else 0
            )
        if is_sibling:
            own["is_sibling"], own["wants_position"] = True, False
        return Request(**own)

    def cancel(self, error: LineclearError) -> None:
        """Stop the engine's work, and end the outputs with `error`."""
        self.is_over = True
        for stream in self.streams:
            stream.cancel(error)
        if self.outputs is not self.streams:
            for output in self.outputs:
                output.cancel(error)

    def close(self, error: LineclearError | None) -> None:
        """Close all streams. What the engine still has is cancelled with `error`; None: it has nothing."""
        self.is_over = True
        for stream in self.streams:
            self._services.streams.close(stream, error)
        if self.outputs is not self.streams:
            for output in self.outputs:
                self._services.streams.close(output, error)


@dataclass(eq=False)
class HeldAnswer(Answer, ABC):
    """Outputs that are delivered at their end. The streams are read here, until `_complete` is called at their end."""

    _chunks: Sequence[OutputChunk] = field(init=False)
    """What was read of each stream."""
    _started: Started | None = None

    def __post_init__(self) -> None:
        self.streams[0].admission().add_done_callback(lambda _: self.outputs[0].on_admitted(None))

    def submit(self, requests: Sequence[Request]) -> None:
        """Read the present streams, and submit their requests."""
        self._chunks = [OutputChunk(0, [], []) for _ in self.streams]
        for stream, so_far in zip(self.streams, self._chunks, strict=True):
            stream.subscribe(partial(self._read, stream, so_far))
        super().submit(requests)

    def _read(self, stream: OutputStream, so_far: OutputChunk) -> None:
        while stream.has_output and not self.is_over:
            chunk = stream.read_nowait()
            if chunk.error is not None:
                self.cancel(chunk.error)
                return
            so_far.extend(chunk)
            if chunk.queued is not None:
                self.outputs[0].on_admitted(chunk.queued)
            if chunk.started is not None and self._started is None:
                self._started = chunk.started
                self.outputs[0].started = chunk.started  # the output itself is delivered later
            stream.is_read = chunk.end is not None
        if not self.is_over and all(stream.is_read for stream in self.streams):
            self._complete()

    @abstractmethod
    def _complete(self) -> None:
        """Go on after the end of all streams."""


@dataclass(eq=False)
class BestOf(HeldAnswer):
    """The outputs with the best mean log-probability of more candidates. `streams` are those of the candidates.

    The mean over the tokens is the score of OpenAI's completions and of TGI; vLLM compared sums. Nothing can be
    delivered before all candidates are complete.
    """

    @classmethod
    def open(cls, services: RequestServices, validated: ValidatedRequest, place: QueuePlace) -> Self:
        outputs = open_streams(services, validated, range(len(validated.received)), None)
        return cls(services, validated, outputs, open_streams(services, validated, range(validated.best_of), place))

    def start(self, fields: dict[str, Any]) -> None:
        """Submit all candidates, with the log-probabilities to choose by."""
        sampling = fields["sampling"]
        super().start(fields | {"sampling": replace(sampling, logprobs=max(0, sampling.logprobs))})

    def _complete(self) -> None:
        candidates = zip(map(_score, self._chunks), self.streams, self._chunks, strict=True)
        ranked = sorted(candidates, key=itemgetter(0), reverse=True)
        for output, (score, stream, best) in zip(self.outputs, ranked, strict=False):
            output.seed_index, output.score = stream.index, score
            if self._validated.sampling.logprobs < 0:
                best.logprobs = ()
            output.deliver(best)


def seeded(sampling: Sampling, index: int) -> Sampling:
    """Return the sampling parameters of an output with an index above 0."""
    return replace(sampling, seed=output_seed(sampling.seed, index))


def open_streams(
    services: RequestServices, validated: ValidatedRequest, indices: Sequence[int], place: QueuePlace | None
) -> Sequence[OutputStream]:
    """Open a stream for each index. `place` is theirs together; None: they wait for no place in the queue."""
    if place is not None:
        place.num_streams = len(indices)
    streams = [
        services.streams.open(
            validated.request_id,
            _answer_text(services, validated),
            place,
            wants_times=validated.token_timings,
            num_received=len(validated.received[index] or ()) if index < len(validated.received) else 0,
            index=index,
            encode_scores=None if validated.prompt_logprobs < 0 else encoded_prompt_logprobs,
        )
        for index in indices
    ]
    if len(streams) > 1:
        for stream in streams:
            stream.share_limits(streams)
    return streams


def _answer_text(services: RequestServices, validated: ValidatedRequest) -> AnswerText | None:
    options = validated.text_options
    if not validated.wants_text and options.get("stops") is None and options.get("repetition") is None:
        return None
    tokenizer, tools = services.tokenizers.tokenizer, validated.tools
    if tools is not None and validated.wants_text and services.parsers.are_needed(tools.names):
        is_parallel = tools.has_parallel_calls
        return ParsedAnswerText(tokenizer, services.parsers, tools.names, is_parallel=is_parallel, **options)
    return AnswerText(tokenizer, **options)


def _score(chunk: OutputChunk) -> float:
    return sum(entry.logprob for entry in chunk.logprobs) / max(1, len(chunk.logprobs))
