"""Run a beam search on the engine: in each step, one request of one token for each running beam.

Beams share their common prefix through the prefix cache: full blocks are shared, and the rest of the last block is
copied, so a step computes one position of each beam. The requests keep the place of the first one in the queue's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from lineclear.errors import InternalError, LineclearError
from lineclear.scheduler.core.events import FinishReason, RequestStats
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.requests.answer.answer import HeldAnswer, open_streams
from lineclear.scheduler.requests.beam_search import Beam, BeamSearch
from lineclear.scheduler.requests.output_stream import Completion, OutputChunk, OutputStream
from lineclear.scheduler.requests.services import RequestServices
from lineclear.scheduler.requests.tenant_limits import QueuePlace
from lineclear.scheduler.requests.validate.request import ValidatedRequest
from lineclear.wire.messages import Sampling


@dataclass(eq=False)
class Beams(HeldAnswer):
    """One search; `outputs` get the best finished beams at its end. `streams` are those of the present step."""

    _template: Request = field(init=False)
    _search: BeamSearch = field(init=False)
    _first: RequestStats | None = None

    @classmethod
    def open(cls, services: RequestServices, validated: ValidatedRequest, place: QueuePlace) -> Self:
        outputs = open_streams(services, validated, range(len(validated.received)), None)
        first = services.streams.open(validated.request_id, None, place)
        return cls(services, validated, outputs, [first])

    @property
    def num_running_beams(self) -> int:
        """Number of beams from the start of the search to its end, also between two steps."""
        return 0 if self.is_over or self._started is None else len(self._search.running)

    @property
    def counted(self) -> Sequence[OutputStream]:
        """The outputs: a step's tokens are mostly dropped."""
        return self.outputs

    def start(self, fields: dict[str, Any]) -> None:
        """Submit the first step."""
        settings, services = self._validated.beams, self._services
        assert settings is not None
        shown = self._validated.sampling
        self._search = BeamSearch(settings._replace(max_tokens=fields["max_tokens"]), shown.logprobs)
        sampling = Sampling(logprobs=min(max(settings.num_top, shown.logprobs), settings.vocab_size))
        own = {"eos_ids": frozenset(), "max_drafts": 0, "queued_since": services.clock(), "request_id": ""}
        self._template = Request(**fields | own | {"sampling": sampling})
        self._submit_step()

    def close(self, error: LineclearError | None) -> None:
        super().close(error)
        self._services.stats.search_tokens += sum(output.num_received for output in self.outputs)

    def _submit_step(self) -> None:
        beams, is_first = self._search.running, self._started is None
        # No beam has tokens of two models.
        model = self._template.model_fingerprint or (self._started.model_fingerprint if self._started else "")
        requests = [
            replace(
                self._template,
                request_id=stream.engine_id,
                output=beam.tokens,
                max_tokens=len(beam.tokens) + 1,
                expected_tokens=len(beam.tokens) + 1,
                is_sibling=not is_first,
                model_fingerprint=model,
                wants_position=is_first and self._template.wants_position,
            )
            for stream, beam in zip(self.streams, beams, strict=True)
        ]
        self.submit(requests)

    def _complete(self) -> None:
        self._first = self._first or next(chunk.end.stats for chunk in self._chunks if chunk.end is not None)
        steps = [chunk.logprobs[0] for chunk in self._chunks if chunk.logprobs]
        if len(steps) < len(self.streams):
            self.cancel(InternalError("a step of the beam search has no log probabilities"))
            return
        streams = self._services.streams
        for stream in self.streams:
            streams.close(stream, None)
        self.streams = ()
        self._search.advance(steps)
        if self._search.is_done:
            self.is_over = True
            self._deliver()
        else:
            name = self._validated.request_id
            self.streams = [streams.open(name, None, num_received=len(beam.tokens)) for beam in self._search.running]
            self._submit_step()

    def _deliver(self) -> None:
        assert self._started is not None
        for output, beam in zip(self.outputs, self._search.finished, strict=False):
            texts: list[str] = []
            if output.text is not None:
                texts = [*map(output.text.push, beam.tokens), output.text.finish()]
            output.score = beam.score
            has_calls = output.text is not None and output.text.has_tool_calls
            end = self._end(beam)._replace(has_tool_calls=has_calls)
            output.deliver(OutputChunk(0, list(beam.tokens), texts, beam.logprobs, started=self._started, end=end))

    def _end(self, beam: Beam) -> Completion:
        assert self._first is not None
        assert self._validated.beams is not None
        now, last = self._services.clock(), beam.tokens[-1]
        stats = replace(self._first, completion_tokens=len(beam.tokens), last_token_at=now, ended_at=now)
        if last not in self._validated.beams.end_ids:
            return Completion(FinishReason.LENGTH, None, None, len(beam.tokens), stats)
        is_stop = last in self._template.stop_ids
        reason = FinishReason.STOP_TOKEN if is_stop else FinishReason.STOP_EOS
        return Completion(reason, None, last, len(beam.tokens), stats)
