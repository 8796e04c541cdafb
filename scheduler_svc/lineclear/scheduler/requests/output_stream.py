"""The unread output of one request (vLLM's RequestOutputCollector).

The engine's events are written by `OutputRouter` on the event loop; one reader takes them out in chunks. The number of
unread tokens is bounded, and one chunk holds any number of steps. A stop string ends the answer here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from lineclear.api_limits import MAX_PIECE_BYTES
from lineclear.errors import LineclearError, SlowConsumer
from lineclear.scheduler.core.events import (
    Failed,
    Finished,
    FinishReason,
    Pooled,
    QueuePosition,
    RequestStats,
    Scored,
    Started,
)
from lineclear.scheduler.requests.engine_api import EngineApi
from lineclear.scheduler.requests.tenant_limits import QueuePlace
from lineclear.scheduler.text.detokenizer import AnswerText, StopMatch
from lineclear.scheduler.text.parsed_answer import ParsedAnswerText, ParsedText
from lineclear.wire.messages import Logprobs, Scores

T = TypeVar("T")

# Upper bounds of the encoded size in a message.
TOKEN_BYTES = 24  # id, index, handle, time
CHARACTER_BYTES = 4
_LOGPROB_BYTES = 16  # of the token, and of each entry of `top`
MAX_UNREAD_BYTES = 4 * 1024 * 1024  # of log probabilities: 1,500 tokens with 20 each, a minute of a fast stream
# Memory of log probabilities: of the token, and of each entry of `top`.
_LOGPROBS_MEMORY, _TOP_MEMORY = 192, 128


class Completion(NamedTuple):
    """The end of a complete answer. `completion_tokens` is the length of the answer itself."""

    reason: FinishReason
    matched_stop_string: str | None
    matched_token_id: int | None
    completion_tokens: int
    stats: RequestStats
    has_tool_calls: bool = False
    """The answer has a complete tool call."""


@dataclass(slots=True)
class OutputChunk:
    """Output taken from a stream. `texts`, `logprobs` and `times` are empty or have one entry for each token.

    At the end, `texts` has one more entry: the text that was held back. Texts of parsed answers are
    ParsedText. `times` are monotonic seconds of the worker's results. The last chunk has either `end` or `error`.
    """

    first_index: int
    token_ids: list[int]
    texts: list[str]
    # Few requests ask for these: made with the first entry.
    logprobs: Sequence[Logprobs] = ()
    times: Sequence[float] = ()
    started: Started | None = None
    end: Completion | None = None
    queued: QueuePosition | None = None
    error: LineclearError | None = None
    prompt_logprobs: Sequence[bytes] = ()
    """By the stream's `encode_scores`."""

    def extend(self, chunk: OutputChunk) -> None:
        self.token_ids += chunk.token_ids
        self.texts += chunk.texts
        self.logprobs = _extended(self.logprobs, chunk.logprobs)
        self.times = _extended(self.times, chunk.times)
        self.started, self.end = self.started or chunk.started, chunk.end

    def split(self, count: int) -> OutputChunk:
        """Keep the first `count` tokens, and return a chunk with the others."""
        tokens, texts, logprobs, times = self.token_ids, self.texts, self.logprobs, self.times
        rest = OutputChunk(self.first_index + count, tokens[count:], texts[count:], logprobs[count:], times[count:])
        self.token_ids, self.texts = tokens[:count], texts[:count]
        self.logprobs, self.times = logprobs[:count], times[:count]
        return rest

    def num_fitting(self, max_bytes: int) -> int:
        """Return the number of tokens that fit into `max_bytes`, at least 1."""
        bytes_left = max_bytes
        for i in range(len(self.token_ids)):
            bytes_left -= TOKEN_BYTES
            if self.texts:
                bytes_left -= CHARACTER_BYTES * (len(self.texts[i]) + _num_extra(self.texts[i]))
            if self.logprobs:
                bytes_left -= _LOGPROB_BYTES * (1 + len(self.logprobs[i].top))
            if bytes_left < 0:
                return max(1, i)
        return len(self.token_ids)


def end_of(match: StopMatch) -> FinishReason:
    """Return the reason of an end that the engine does not know."""
    if match.is_call:
        return FinishReason.STOP_TOKEN
    return FinishReason.REPETITION if match.string is None else FinishReason.STOP_STRING


class OutputLimits(NamedTuple):
    """Most unread output of all streams of a request: tokens, and bytes of log probabilities."""

    tokens: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class OutputStream:
    """The unread part of one output, for one reader, which is called through `subscribe`.

    `engine_id` is the output's name in the engine, `index` its number among those of its request. `text` is None for
    answers without text. The first `num_received` tokens reached the client from another server. `queue_place` is left
    when the output starts or fails; None: it has none. `siblings` are all outputs of the request; limits hold for them
    together. `encode_scores` encodes the scores of each step as they arrive, since those of a long prompt are 65,536
    entries. The reader gets the encodings one behind the other. Without it `scores` has the scores.
    """

    engine_id: str
    text: AnswerText | None
    _engine: EngineApi
    _queue_place: QueuePlace | None
    _limits: OutputLimits
    _wants_times: bool
    num_received: int
    index: int
    _encode_scores: Callable[[Scores], bytes] | None
    num_resumed: int = field(init=False)
    seed_index: int = field(init=False)
    _share: OutputLimits = field(init=False)
    """Below its share of the limits, no other output need be asked."""
    is_parsed: bool = field(init=False)
    siblings: Sequence[OutputStream] = ()
    score: float | None = None
    """What it was chosen by, if it was."""
    started: Started | None = None
    stats: RequestStats | None = None
    scores: list[Scores] = field(default_factory=list)
    """Scores of the prompt's positions, in order."""
    vector: bytes = b""
    is_engine_done: bool = False
    """The engine has sent its last event of the request."""
    is_notified: bool = False
    """The subscriber was called, and is not called again before it has read everything."""
    is_read: bool = False
    """Its end or its error was read."""
    _is_cancelled: bool = False
    is_stopped: bool = False
    _unread: OutputChunk = field(init=False)
    """Without the end, which `_end` and `_error` keep after the read, too."""
    _logprobs_bytes: int = 0
    _end: Completion | None = None
    _error: LineclearError | None = None
    _subscriber: Callable[[], None] | None = None
    _admission: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self.num_resumed = self.num_received
        self._unread = OutputChunk(self.num_received, [], [])
        self.seed_index = self.index
        self._share = self._limits
        self.is_parsed = isinstance(self.text, ParsedAnswerText)

    def admission(self) -> asyncio.Future[None]:
        """Return a future that is done when the engine has queued or rejected the request. Call it before `submit`."""
        self._admission = asyncio.get_running_loop().create_future()
        return self._admission

    # --- the reader --------------------------------------------------------------------------------------------------

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Call `subscriber` on new output, then not again until all output is read."""
        self._subscriber = subscriber
        if self.has_output:
            self._wake()

    @property
    def has_output(self) -> bool:
        """Whether `read_nowait` may be called."""
        unread = self._unread
        if unread.token_ids or unread.queued is not None:
            return True
        return not (self.is_read or (unread.started is None and self._end is None and self._error is None))

    @property
    def has_only_tokens(self) -> bool:
        """Whether the unread output is tokens, with or without plain text."""
        unread = self._unread
        if unread.started or self._end or self._error or not unread.token_ids or self.is_parsed:
            return False
        return not (unread.logprobs or unread.times or unread.prompt_logprobs)

    @property
    def has_ended(self) -> bool:
        """Whether the output has its end or its error, which may be unread."""
        return self._end is not None or self._error is not None

    def read_nowait(self, max_bytes: int = MAX_PIECE_BYTES) -> OutputChunk:
        """Take output of about `max_bytes`, at least one token. Requires `has_output`.

        The chunk with the `end` or the `error` is the last one. An error follows all tokens before it.
        """
        chunk = self._unread
        if self._error is not None and not chunk.token_ids:
            return OutputChunk(chunk.first_index, [], [], error=self._error)
        num_unread = len(chunk.token_ids)
        count = num_unread if num_unread <= 1 else chunk.num_fitting(max_bytes)
        is_all = count == num_unread
        if is_all:
            self._unread, chunk.end = OutputChunk(chunk.first_index + count, [], []), self._end
        else:
            self._unread = chunk.split(count)
        if chunk.prompt_logprobs and not (count or chunk.end):  # they travel with the first token or the end
            self._unread.prompt_logprobs, chunk.prompt_logprobs = chunk.prompt_logprobs, ()
        if chunk.logprobs:
            self._logprobs_bytes -= sum(map(_memory, chunk.logprobs))
        self.is_notified = not is_all or self._error is not None
        return chunk

    def cancel(self, error: LineclearError, *, discard_unread: bool = False) -> None:
        """Stop the engine's work on the request, and end the output with `error`.

        Unread output is delivered before the error unless `discard_unread`. No effect on output that has ended.
        """
        if discard_unread:
            self._unread = OutputChunk(self._unread.first_index, [], [], started=self._unread.started)
            self._logprobs_bytes = 0
        if not (self.is_engine_done or self._is_cancelled):
            self._is_cancelled = True
            self._engine.cancel(self.engine_id, error)
        self._fail(error)

    def deliver(self, chunk: OutputChunk) -> None:
        """Take a complete output at once, of any length, with its start and its end."""
        end, chunk.end = chunk.end, None  # it belongs to the last part that is read
        assert end is not None, "an output without an end"
        if self._error is None:
            self._unread, chunk.queued = chunk, self._unread.queued
            self.started, self.num_received = chunk.started, len(chunk.token_ids)
            self.is_engine_done, self.stats, self._end = True, end.stats, end
            self._wake()

    def stop(self) -> None:
        """Cancel this output alone. It ends with CANCELLED, unless it has ended before the engine knows."""
        if not (self.is_engine_done or self._is_cancelled):
            self._is_cancelled = self.is_stopped = True
            self._engine.cancel(self.engine_id)

    def close(self, error: LineclearError | None) -> None:
        """End the reading, and cancel the request if the engine still has it; None: its output has ended."""
        self._subscriber = None
        if error is not None:
            self.cancel(error)

    def _fail(self, error: LineclearError) -> None:
        self._leave_queue(started=False)  # not when the client reads of it: unread failures would fill the queue
        self._resolve_admission()
        if self._end is None and self._error is None:
            self._error = error
            self._wake()

    def _leave_queue(self, *, started: bool) -> None:
        if self._queue_place is not None:
            place, self._queue_place = self._queue_place, None
            place.leave(started=started)

    # --- the engine's events -----------------------------------------------------------------------------------------

    def on_admitted(self, position: QueuePosition | None) -> None:
        if self._queue_place is not None:
            self._queue_place.admit()
        self._resolve_admission()
        if position is not None:
            self._unread.queued = position
            self._wake()

    def _resolve_admission(self) -> None:
        if self._admission is not None and not self._admission.done():
            self._admission.set_result(None)

    def on_started(self, event: Started) -> None:
        if self._queue_place is not None:
            self._queue_place.admit()
            self._leave_queue(started=True)
        self.started = self._unread.started = event
        self._wake()

    def on_token(self, index: int, token_id: int, logprobs: Logprobs | None, at: float) -> None:
        text, unread = self.text, self._unread
        if self._error is not None or (text is not None and text.match is not None):
            return  # computed before the engine processed the end
        assert index == self.num_received, "a gap in the tokens of a request"
        self.num_received = index + 1
        unread.token_ids.append(token_id)
        if text is not None:
            unread.texts.append(text.push(token_id))
            if text.match is not None:
                self._engine.finish(self.engine_id, self.num_received)
        if self._wants_times:
            unread.times = _extended(unread.times, (at,))
        if logprobs is not None:
            unread.logprobs = _extended(unread.logprobs, (logprobs,))
            self._logprobs_bytes += _memory(logprobs)
        if len(unread.token_ids) > self._share.tokens or self._logprobs_bytes > self._share.num_bytes:
            self._check_unread()
        if not self.is_notified:
            self._wake()

    def on_scored(self, event: Scored) -> None:
        if self._error is not None:
            return
        if self._encode_scores is None:
            self.scores.append(event.scores)
        else:
            encoded = self._encode_scores(event.scores)
            self._unread.prompt_logprobs = _extended(self._unread.prompt_logprobs, (encoded,))

    def on_pooled(self, event: Pooled) -> None:
        self.vector = event.vector

    def on_finished(self, event: Finished) -> None:
        self.is_engine_done, self.stats = True, event.stats
        self._complete(event.reason, event.matched_token_id, event.stats)

    def on_failed(self, event: Failed) -> None:
        self.is_engine_done, self.stats = True, event.stats
        if self.text is not None and self.text.match is not None:
            # Complete before the failure, by a stop string that the engine does not know.
            self._complete(FinishReason.STOP_STRING, None, event.stats)
        elif self.is_stopped:
            self._leave_queue(started=False)
            self._complete(FinishReason.CANCELLED, None, event.stats)
        else:
            self._fail(event.error)

    def _complete(self, reason: FinishReason, matched_token_id: int | None, stats: RequestStats) -> None:
        self._resolve_admission()
        if self._error is not None:
            return
        if self.text is not None and self.text.match is None:
            self._unread.texts.append(self.text.finish())
        match = self.text.match if self.text is not None else None
        if match is not None:
            # The stop string wins over a later end by the engine.
            self._end = Completion(end_of(match), match.string, None, self.num_received, stats, match.is_call)
        else:
            has_calls = self.text is not None and self.text.has_tool_calls
            self._end = Completion(reason, None, matched_token_id, self.num_received, stats, has_calls)
        self._wake()

    def share_limits(self, siblings: Sequence[OutputStream]) -> None:
        """Count what is unread of all `siblings` together."""
        self.siblings = siblings
        self._share = OutputLimits(self._limits.tokens // len(siblings), self._limits.num_bytes // len(siblings))

    def _check_unread(self) -> None:
        """Fail the output as a slow consumer if too much of all outputs of the request is unread."""
        siblings = self.siblings or (self,)
        unread = sum(len(output._unread.token_ids) for output in siblings)
        num_bytes = sum(output._logprobs_bytes for output in siblings)
        max_tokens, max_bytes = self._limits
        if unread > max_tokens:
            advice = "read faster, or have the server raise --max-unread-tokens"
            message = f"{unread} tokens are unread, the limit is {max_tokens}; {advice}"
            figures = {"unread_tokens": str(unread), "limit": str(max_tokens)}
        elif num_bytes > max_bytes:
            message = (
                f"{num_bytes} bytes of log probabilities are unread, the limit is {max_bytes}; read "
                "faster, or ask for fewer"
            )
            figures = {"unread_bytes": str(num_bytes), "limit": str(max_bytes)}
        else:
            return
        self.cancel(SlowConsumer(message, metadata=figures), discard_unread=True)

    def _wake(self) -> None:
        if self._subscriber is not None and not self.is_notified:
            self.is_notified = True
            self._subscriber()


def _extended(column: Sequence[T], entries: Sequence[T]) -> Sequence[T]:
    """Return the column with more entries. The empty one of a new chunk is shared; others grow in place."""
    if not isinstance(column, list):
        return [*column, *entries] if entries else column
    column += entries
    return column


def _num_extra(text: str) -> int:
    return text.num_extra if isinstance(text, ParsedText) else 0


def _memory(logprobs: Logprobs) -> int:
    """Estimate the bytes of memory that the log probabilities of one token take."""
    return _LOGPROBS_MEMORY + _TOP_MEMORY * len(logprobs.top)
