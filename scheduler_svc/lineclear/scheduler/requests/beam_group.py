"""Run a beam search on the engine: in each step, one request of one token for each running beam.

Beams share their common prefix through the prefix cache: full blocks are shared, the rest of the last block is computed
again. The requests keep the place of the first one in the queue's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lineclear.errors import InternalError, LineclearError
from lineclear.scheduler.core.events import FinishReason, RequestStats, Started
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.requests.beam_search import Beam, BeamSearch, BeamSettings
from lineclear.scheduler.requests.output_stream import Completion, OutputStream
from lineclear.wire.messages import Logprobs


class BeamGroup:
    """One search; `outputs` get the best finished beams at its end.

    `request` is that of the first step. `open_stream(is_first, index)` opens the stream of one request of the core, for
    the token `index`; `close_stream` closes it, and `submit` submits requests together. `num_top`: log probabilities to
    show for each token, -1 for none.
    """

    def __init__(
        self,
        request: Request,
        settings: BeamSettings,
        outputs: Sequence[OutputStream],
        open_stream: Callable[[bool, int], OutputStream],
        close_stream: Callable[[OutputStream], None],
        submit: Callable[..., None],
        clock: Callable[[], float],
        num_top: int,
    ) -> None:
        self._request = request
        self._settings = settings
        self._outputs = outputs
        self._open_stream = open_stream
        self._close_stream = close_stream
        self._submit_requests = submit
        self._clock = clock
        self._search = BeamSearch(settings, num_top)
        self._streams: list[OutputStream] = []
        self._steps: list[Logprobs | None] = []
        self._is_over = False
        self._started: Started | None = None
        self._first: RequestStats | None = None

    @property
    def num_running(self) -> int:
        """Number of beams from the start of the search to its end, also between two steps."""
        return 0 if self._is_over or self._started is None else len(self._search.running)

    def start(self) -> None:
        """Submit the first step."""
        self._submit(is_first=True)

    def cancel(self, error: LineclearError) -> None:
        """Cancel the requests of this step, and submit no other."""
        self._is_over = True
        for stream in self._streams:
            stream.cancel(error)

    def close(self) -> None:
        """Close the streams of this step, and submit no other."""
        self._is_over = True
        streams, self._streams = self._streams, []
        for stream in streams:
            self._close_stream(stream)

    def _submit(self, *, is_first: bool = False) -> None:
        beams = self._search.running
        # No beam has tokens of two models.
        model = self._request.model_fingerprint or (self._started.model_fingerprint if self._started else "")
        self._streams = [self._open_stream(is_first, len(beam.tokens)) for beam in beams]
        self._steps = [None] * len(beams)
        requests = [
            replace(
                self._request,
                request_id=stream.engine_id,
                output=beam.tokens,
                max_tokens=len(beam.tokens) + 1,
                expected_tokens=len(beam.tokens) + 1,
                is_sibling=not is_first,
                model_fingerprint=model,
                wants_position=is_first and self._request.wants_position,
            )
            for stream, beam in zip(self._streams, beams, strict=True)
        ]
        if is_first:
            self._streams[0].admission().add_done_callback(lambda _: self._outputs[0].on_admitted(None))
        for index, stream in enumerate(self._streams):
            stream.subscribe(partial(self._read, index, stream))
        self._submit_requests(*requests)

    def _read(self, index: int, stream: OutputStream) -> None:
        while stream.has_output and not self._is_over:
            chunk = stream.read_nowait()
            if chunk.error is not None:
                self._fail(chunk.error)
                return
            if chunk.queued is not None:
                self._outputs[0].on_admitted(chunk.queued)
            if chunk.started is not None and self._started is None:
                self._started = chunk.started
                self._outputs[0].start_held(chunk.started)
            if chunk.logprobs:
                self._steps[index] = chunk.logprobs[0]
            if chunk.end is not None:
                stream.is_read = True
                self._first = self._first or chunk.end.stats
        if not self._is_over and all(stream.is_read for stream in self._streams):
            self._advance()

    def _advance(self) -> None:
        steps = [step for step in self._steps if step is not None]
        if len(steps) < len(self._steps):
            self._fail(InternalError("a step of the beam search has no log probabilities"))
            return
        for stream in self._streams:
            self._close_stream(stream)
        self._streams = []
        self._search.advance(steps)
        if self._search.is_done:
            self._is_over = True
            self._deliver()
        else:
            self._submit()

    def _fail(self, error: LineclearError) -> None:
        self.cancel(error)
        for output in self._outputs:
            output.cancel(error)

    def _deliver(self) -> None:
        for output, beam in zip(self._outputs, self._search.finished, strict=False):
            assert self._started is not None
            texts: list[str] = []
            if output.text is not None:
                texts = [*map(output.text.push, beam.tokens), output.text.finish()]
            output.score = beam.score
            has_calls = output.text is not None and output.text.has_tool_calls
            end = self._end(beam)._replace(has_tool_calls=has_calls)
            output.deliver(self._started, list(beam.tokens), texts, beam.logprobs, [], end)

    def _end(self, beam: Beam) -> Completion:
        assert self._first is not None
        now, last = self._clock(), beam.tokens[-1]
        stats = replace(self._first, completion_tokens=len(beam.tokens), last_token_at=now, ended_at=now)
        if last not in self._settings.end_ids:
            return Completion(FinishReason.LENGTH, None, None, len(beam.tokens), stats)
        is_stop = last in self._request.stop_ids
        reason = FinishReason.STOP_TOKEN if is_stop else FinishReason.STOP_EOS
        return Completion(reason, None, last, len(beam.tokens), stats)
