"""best_of: generate more outputs than requested, and deliver those with the best mean log-probability.

The mean over the tokens is the score of OpenAI's completions and of TGI; vLLM compared sums. Nothing can be delivered
before all candidates are complete.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Self

from lineclear.scheduler.requests.answer.answer import HeldAnswer, open_streams
from lineclear.scheduler.requests.output_stream import OutputChunk
from lineclear.scheduler.requests.queue_limits import QueuePlace
from lineclear.scheduler.requests.services import RequestServices
from lineclear.scheduler.requests.validate.request import ValidatedRequest


@dataclass(eq=False)
class BestOf(HeldAnswer):
    """Delivers the best candidates to `outputs` when all are complete. `streams` are those of the candidates."""

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


def _score(chunk: OutputChunk) -> float:
    """Return the mean log-probability of the tokens."""
    return sum(entry.logprob for entry in chunk.logprobs) / max(1, len(chunk.logprobs))
