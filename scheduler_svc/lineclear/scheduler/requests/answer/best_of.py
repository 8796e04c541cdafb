"""best_of: generate more outputs than requested, and deliver those with the best mean log-probability.

The mean over the tokens is the score of OpenAI's completions and of TGI; vLLM compared sums. Nothing can be delivered
before all candidates are complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Self

from lineclear.scheduler.core.events import Started
from lineclear.scheduler.requests.answer.answer import Answer, open_streams
from lineclear.scheduler.requests.output_stream import Completion, OutputStream
from lineclear.scheduler.requests.queue_limits import QueuePlace
from lineclear.scheduler.requests.services import RequestServices
from lineclear.scheduler.requests.validate.request import ValidatedRequest
from lineclear.wire.messages import Logprobs


@dataclass(eq=False, slots=True)
class Candidate:
    """One of the outputs to choose from, complete when it has an `end`."""

    stream: OutputStream
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    started: Started | None = None
    end: Completion | None = None

    @property
    def score(self) -> float:
        """Mean log-probability of its tokens."""
        return sum(entry.logprob for entry in self.logprobs) / max(1, len(self.logprobs))


@dataclass(eq=False)
class BestOf(Answer):
    """Reads the candidates, and delivers the best of them to `outputs` when all are complete."""

    _candidates: list[Candidate] = field(init=False)

    def __post_init__(self) -> None:
        self._candidates = [Candidate(stream) for stream in self.streams]
        for candidate in self._candidates:
            candidate.stream.subscribe(partial(self._read, candidate))

    @classmethod
    def open(cls, services: RequestServices, validated: ValidatedRequest, place: QueuePlace) -> Self:
        outputs = open_streams(services, validated, range(len(validated.received)), None)
        return cls(services, validated, outputs, open_streams(services, validated, range(validated.best_of), place))

    def start(self, fields: dict[str, Any]) -> None:
        """Submit all candidates, with the log-probabilities to choose by."""
        sampling = fields["sampling"]
        self.streams[0].admission().add_done_callback(lambda _: self.outputs[0].on_admitted(None))
        super().start(fields | {"sampling": replace(sampling, logprobs=max(0, sampling.logprobs))})

    def _read(self, candidate: Candidate) -> None:
        while candidate.stream.has_output:
            chunk = candidate.stream.read_nowait()
            if chunk.error is not None:
                candidate.stream.is_read = True
                self.cancel(chunk.error)
                return
            candidate.tokens += chunk.token_ids
            candidate.texts += chunk.texts
            candidate.logprobs += chunk.logprobs
            candidate.times += chunk.times
            if chunk.started is not None:
                candidate.started = chunk.started
                self.outputs[0].start_held(chunk.started)
            if chunk.queued is not None:
                self.outputs[0].on_admitted(chunk.queued)
            if chunk.end is not None:
                candidate.end, candidate.stream.is_read = chunk.end, True
        if all(candidate.end is not None for candidate in self._candidates):
            self._deliver()

    def _deliver(self) -> None:
        ranked = sorted(self._candidates, key=attrgetter("score"), reverse=True)
        for output, best in zip(self.outputs, ranked, strict=False):
            assert best.started is not None
            assert best.end is not None
            output.seed_index, output.score = best.stream.index, best.score
            logprobs = best.logprobs if self._validated.sampling.logprobs >= 0 else []
            output.deliver(best.started, best.tokens, best.texts, logprobs, best.times, best.end)
