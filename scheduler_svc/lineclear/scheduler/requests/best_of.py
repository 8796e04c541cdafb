"""best_of: generate more outputs than requested, and deliver those with the best mean log-probability.

The mean over the tokens is the score of OpenAI's completions and of TGI; vLLM compared sums. Nothing can be delivered
before all candidates are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

from lineclear.errors import LineclearError
from lineclear.scheduler.core.events import Started
from lineclear.scheduler.requests.output_stream import Completion, OutputStream
from lineclear.wire.messages import Logprobs


class Candidate:
    """One of the outputs to choose from, complete when it has an `end`."""

    def __init__(self, output: OutputStream) -> None:
        self.output = output
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[Logprobs] = []
        self.times: list[float] = []
        self.started: Started | None = None
        self.end: Completion | None = None

    @property
    def score(self) -> float:
        """Mean log-probability of its tokens."""
        return sum(entry.logprob for entry in self.logprobs) / max(1, len(self.logprobs))


class BestOf:
    """Reads the candidates, and delivers the best of them to `outputs` when all are complete.

    The engine's work on the candidates is cancelled with the first of the outputs that is cancelled. `wants_logprobs`:
    the outputs show them.
    """

    def __init__(
        self, outputs: Sequence[OutputStream], candidates: Sequence[OutputStream], wants_logprobs: bool
    ) -> None:
        self._outputs = outputs
        self._candidates = [Candidate(output) for output in candidates]
        self._wants_logprobs = wants_logprobs
        candidates[0].admission().add_done_callback(lambda _: outputs[0].on_admitted(None))
        for candidate in self._candidates:
            candidate.output.subscribe(partial(self._read, candidate))

    def cancel(self, error: LineclearError) -> None:
        """Cancel all candidates."""
        for candidate in self._candidates:
            candidate.output.cancel(error)

    def _read(self, candidate: Candidate) -> None:
        while candidate.output.has_output:
            chunk = candidate.output.read_nowait()
            if chunk.error is not None:
                candidate.output.is_read = True
                self._fail(chunk.error)
                return
            candidate.tokens += chunk.token_ids
            candidate.texts += chunk.texts
            candidate.logprobs += chunk.logprobs
            candidate.times += chunk.times
            if chunk.started is not None:
                candidate.started = chunk.started
                self._outputs[0].start_held(chunk.started)
            if chunk.queued is not None:
                self._outputs[0].on_admitted(chunk.queued)
            if chunk.end is not None:
                candidate.end, candidate.output.is_read = chunk.end, True
        if all(candidate.end is not None for candidate in self._candidates):
            self._deliver()

    def _fail(self, error: LineclearError) -> None:
        for output in self._outputs:
            output.cancel(error)
        self.cancel(error)

    def _deliver(self) -> None:
        ranked = sorted(self._candidates, key=attrgetter("score"), reverse=True)
        for output, best in zip(self._outputs, ranked, strict=False):
            assert best.started is not None
            assert best.end is not None
            output.seed_index, output.score = best.output.index, best.score
            logprobs = best.logprobs if self._wants_logprobs else []
            output.deliver(best.started, best.tokens, best.texts, logprobs, best.times, best.end)
