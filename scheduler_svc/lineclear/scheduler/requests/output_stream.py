"""One mailbox for each request in progress: what the engine said and the caller has not read yet.

Lives on the event loop: the engine's events enter through `Streams.dispatch`, the handlers take them out. Decides how
much may wait (a bounded number of tokens, in one message however many steps made them), where an answer ends when a
stop string appears, and that every mailbox ends exactly once. Knows nothing of gRPC; what a token says is `text`'s.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, Protocol

from lineclear.api_limits import MAX_PIECE_BYTES
from lineclear.errors import DuplicateRequest, LineclearError, SlowConsumer
from lineclear.scheduler.core.events import (
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Preempted,
    RequestStats,
    Started,
    StepTokens,
    WorkerJoined,
    WorkerLost,
)
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.wire.messages import Logprobs

# The most that one takes up in a message, on either side's encoding of it.
TOKEN_BYTES = 24  # id, index, handle, time
CHARACTER_BYTES = 4
_TOP_BYTES = 16  # one of `top`, and the token's own
# What log probabilities take in memory: a token's own, and each of `top`.
_LOGPROBS_MEMORY, _TOP_MEMORY = 192, 128


class Canceller(Protocol):
    """The part of the engine that streams call."""

    def cancel(self, request_id: str, error: LineclearError | None = None) -> None:
        """End a request without an answer."""
        ...

    def finish(self, request_id: str, num_tokens: int) -> None:
        """Complete a request after its first `num_tokens` output tokens."""
        ...


class Completion(NamedTuple):
    """A complete answer. `record` is the core's account; `completion_tokens` are those of the answer itself."""

    reason: FinishReason
    matched_stop_string: str | None
    matched_token_id: int | None
    completion_tokens: int
    record: RequestStats


class OutputChunk(NamedTuple):
    """Everything not yet delivered, in one. `logprobs` is empty or one for each token, as `times` is.

    `pieces` is empty or has the text that each token released, and after them, at the end, that of no token.
    `times` are seconds of the monotonic clock at which the worker's result was seen.
    """

    first_index: int
    token_ids: Sequence[int]
    pieces: Sequence[str]
    logprobs: Sequence[Logprobs]
    times: Sequence[float]
    started: Started | None
    end: Completion | None

    @property
    def text(self) -> str:
        """All of the text."""
        return "".join(self.pieces)


class OutputStream:
    """One request's unread answer. One reader, which waits in `take` or is told by `listen`; only Streams writes to it.

    `key` names the request to the engine, `label` to its owner, the caller. `text` is None when nobody wants any.
    Tokens before `num_received` reached the caller in another way. `seed` is what another server needs to go on with
    the answer.
    """

    __slots__ = (
        "_end",
        "_engine",
        "_error",
        "_first_unread",
        "_listener",
        "_logprobs",
        "_logprobs_bytes",
        "_max_unread_bytes",
        "_max_unread_tokens",
        "_pieces",
        "_text",
        "_times",
        "_tokens",
        "_unsent_start",
        "_waiter",
        "_wants_times",
        "engine_id",
        "is_announced",
        "is_over",
        "num_received",
        "on_dequeued",
        "owner",
        "request_id",
        "seed",
        "started",
        "stats",
    )

    def __init__(
        self,
        engine_id: str,
        request_id: str,
        owner: Hashable,
        text: AnswerText | None,
        engine: Canceller,
        max_unread_tokens: int,
        max_unread_bytes: int,
        *,
        wants_times: bool,
        num_received: int,
        seed: int,
    ) -> None:
        self.engine_id = engine_id
        self.request_id = request_id
        self.owner = owner
        self.started: Started | None = None
        self.stats: RequestStats | None = None
        self.on_dequeued: Callable[[bool], None] = lambda began: None
        """Called once, when the request waits no longer: it began (True), or its reader is done."""
        self.num_received = num_received
        self.seed = seed
        self.is_over = False
        """The engine has said its last word."""
        self.is_announced = False
        """The listener knows that there is something to take, and is not called again before it has taken all."""
        self._text = text
        self._engine = engine
        self._max_unread_tokens = max_unread_tokens
        self._max_unread_bytes = max_unread_bytes
        self._wants_times = wants_times
        self._first_unread = num_received
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._logprobs_bytes = 0
        self._times: list[float] = []
        self._unsent_start: Started | None = None
        self._end: Completion | None = None
        self._error: LineclearError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    # --- the reader --------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when there is something to take, and not again until it was taken."""
        self._listener = listener
        if self.has_output:
            self._wake()

    @property
    def has_output(self) -> bool:
        """Whether `take_now` has something to give, or to raise."""
        return bool(self._tokens or self._unsent_start or self._end or self._error)

    async def read(self) -> OutputChunk:
        """What is unread, at most MAX_PIECE_BYTES, as soon as there is something. The one with an `end` is the last.

        Raises the error the request failed with, once everything before it is delivered.
        """
        while not self.has_output:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.read_nowait()

    def read_nowait(self, max_bytes: int = MAX_PIECE_BYTES) -> OutputChunk:
        """Take what fits into about `max_bytes`, one token at least. The rest stays for the next call.

        Only where `has_news`.
        """
        if self._error is not None and not self._tokens:
            raise self._error
        tokens, count = self._tokens, self._num_fitting(max_bytes)
        is_all = count == len(tokens)
        delivery = OutputChunk(
            self._first_unread,
            tokens if is_all else tokens[:count],
            self._pieces if is_all else self._pieces[:count],
            self._logprobs[:count],
            self._times[:count],
            self._unsent_start,
            self._end if is_all else None,
        )
        self._first_unread += count
        self._tokens = [] if is_all else tokens[count:]
        self._pieces = [] if is_all else self._pieces[count:]  # those after the last token belong to the end
        self._logprobs, self._times = self._logprobs[count:], self._times[count:]
        self._logprobs_bytes -= sum(map(_memory, delivery.logprobs))
        self._unsent_start = None
        self.is_announced = not is_all or self._error is not None
        return delivery

    def read_tokens_only(self, max_bytes: int = MAX_PIECE_BYTES) -> tuple[int, list[int], list[str]] | None:
        """First index, tokens and the text of each, where that is all there is to take: the usual case, made cheap.

        None where `take_now` is needed.
        """
        tokens = self._tokens
        if self._unsent_start or self._end or self._error or self._logprobs or self._times or not tokens:
            return None
        first_index, pieces, count = self._first_unread, self._pieces, self._num_fitting(max_bytes)
        self._first_unread = first_index + count
        if count == len(tokens):
            self._tokens, self._pieces, self.is_announced = [], [], False
            return first_index, tokens, pieces
        self._tokens, self._pieces, self.is_announced = tokens[count:], pieces[count:], True
        return first_index, tokens[:count], pieces[:count]

    def _num_fitting(self, max_bytes: int) -> int:
        """How many of the unread tokens fit into a message of `max_bytes`: at least one, where there is one."""
        count = len(self._tokens)
        if count <= 1:
            return count
        room = max_bytes
        for place in range(count):
            room -= TOKEN_BYTES
            if self._pieces:
                room -= CHARACTER_BYTES * len(self._pieces[place])
            if self._logprobs:
                room -= _TOP_BYTES * (1 + len(self._logprobs[place].top))
            if room < 0:
                return max(1, place)
        return count

    def fail(self, error: LineclearError) -> None:
        """End the stream with `error` unless it ended already."""
        if self._end is None and self._error is None:
            self._error = error
            self._wake()

    def break_off(self, error: LineclearError) -> None:
        """End the stream with `error` at once, without what is unread: that may be incomplete, or too much."""
        self._tokens, self._pieces, self._logprobs, self._times = [], [], [], []
        self._logprobs_bytes = 0
        self.fail(error)

    # --- the engine's events -----------------------------------------------------------------------------------------

    def on_started(self, event: Started) -> None:
        self.started = self._unsent_start = event
        self._wake()

    def on_token(self, index: int, token_id: int, logprobs: Logprobs | None, at: float) -> None:
        text = self._text
        if self._error is not None or (text is not None and text.match is not None):
            return  # made before the engine heard that the answer is over
        assert index == self.num_received, "a gap in the tokens of a request"
        self.num_received = index + 1
        self._tokens.append(token_id)
        if text is not None:
            self._pieces.append(text.push(token_id))
            if text.match is not None:
                self._engine.finish(self.engine_id, self.num_received)
        if self._wants_times:
            self._times.append(at)
        if logprobs is not None:
            self._logprobs.append(logprobs)
            self._logprobs_bytes += _memory(logprobs)
        if len(self._tokens) > self._max_unread_tokens or self._logprobs_bytes > self._max_unread_bytes:
            self._fail_slow_consumer()
        if not self.is_announced:
            self._wake()

    def on_finished(self, event: Finished) -> None:
        self.is_over, self.stats = True, event.record
        self._complete(event.reason, event.matched_token_id, event.record)

    def on_failed(self, event: Failed) -> None:
        self.is_over, self.stats = True, event.record
        if self._stopped():  # the answer was complete before this; the engine just did not know
            self._complete(FinishReason.STOP_STRING, None, event.record)
        else:
            self.fail(event.error)

    def _stopped(self) -> bool:
        return self._text is not None and self._text.match is not None

    def _complete(self, reason: FinishReason, matched_token_id: int | None, record: RequestStats) -> None:
        if self._error is not None:
            return
        if self._text is not None and self._text.match is None:
            self._pieces.append(self._text.finish())
        match = self._text.match if self._text is not None else None
        if match is not None:
            # Also when the engine ended it otherwise meanwhile: the stop string came first.
            self._end = Completion(FinishReason.STOP_STRING, match.string, None, self.num_received, record)
        else:
            self._end = Completion(reason, None, matched_token_id, self.num_received, record)
        self._wake()

    def _fail_slow_consumer(self) -> None:
        unread, num_bytes = len(self._tokens), self._logprobs_bytes
        if unread > self._max_unread_tokens:
            what = (
                f"{unread} tokens are unread, the limit is {self._max_unread_tokens}; read faster, or have the server "
                "raise --max-unread-tokens"
            )
            figures = {"unread_tokens": unread, "limit": self._max_unread_tokens}
        else:
            what = (
                f"{num_bytes} bytes of log probabilities are unread, the limit is {self._max_unread_bytes}; read "
                "faster, ask for fewer, or have the server raise --max-unread-bytes"
            )
            figures = {"unread_bytes": num_bytes, "limit": self._max_unread_bytes}
        error = SlowConsumer(what, metadata={name: str(figure) for name, figure in figures.items()})
        self.break_off(error)
        self._engine.cancel(self.engine_id, error)

    def _wake(self) -> None:
        if self._listener is not None:
            if not self.is_announced:
                self.is_announced = True
                self._listener()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _memory(logprobs: Logprobs) -> int:
    """Return about how many bytes the log probabilities of one token take."""
    return _LOGPROBS_MEMORY + _TOP_MEMORY * len(logprobs.top)


class OutputRouter:
    """Every mailbox by the key the engine knows. `on_worker` is told of each worker that joins (True) or is lost.

    `num_waiting` mailboxes are of requests that have not left the queue.
    """

    def __init__(
        self,
        engine: Canceller,
        max_unread_tokens: int,
        max_unread_bytes: int,
        on_worker: Callable[[bool], None],
        incident: Callable[[BaseException], LineclearError],
    ) -> None:
        self._engine = engine
        self._max_unread_tokens = max_unread_tokens
        self._max_unread_bytes = max_unread_bytes
        self._on_worker = on_worker
        self._incident = incident
        self._by_key: dict[str, OutputStream] = {}
        self._labels: set[tuple[Hashable, str]] = set()
        self._numbers = itertools.count(1)
        self.num_waiting = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[OutputStream]:
        return iter(list(self._by_key.values()))

    def open(
        self,
        label: str,
        text: AnswerText | None,
        *,
        owner: Hashable = None,
        wants_times: bool = False,
        num_received: int = 0,
        seed: int = 0,
    ) -> OutputStream:
        """A mailbox for a request about to be submitted.

        Raises DuplicateRequest while another of the same owner has its label.
        """
        if (owner, label) in self._labels:
            raise DuplicateRequest("a request with this request_id is in progress")
        # Not the label alone: a caller may reuse that at once, and events of its first request may still be under way.
        key = f"{label}~{next(self._numbers)}"
        mailbox = OutputStream(
            *(key, label, owner, text, self._engine, self._max_unread_tokens, self._max_unread_bytes),
            wants_times=wants_times,
            num_received=num_received,
            seed=seed,
        )
        self._by_key[mailbox.engine_id] = mailbox
        self._labels.add((owner, label))
        self._idle.clear()
        self.num_waiting += 1
        return mailbox

    def close(self, mailbox: OutputStream) -> None:
        """The reader is done. A request still going on is cancelled."""
        del self._by_key[mailbox.engine_id]
        self._labels.discard((mailbox.owner, mailbox.request_id))
        if mailbox.started is None:
            self.num_waiting -= 1
            mailbox.on_dequeued(False)
        if not mailbox.is_over:
            self._engine.cancel(mailbox.engine_id)
        if not self._by_key:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        """Return when no mailbox is open."""
        await self._idle.wait()

    def dispatch(self, events: Sequence[Event], at: float) -> None:
        """Put the engine's events where they belong. `at` is when the engine made them."""
        mailboxes = self._by_key
        for event in events:
            if isinstance(event, StepTokens):  # the bulk of all there is to do here: a row costs one call
                columns = (event.request_ids, event.indices, event.tokens, event.logprobs or repeat(None))
                for request_id, index, token_id, logprobs in zip(*columns, strict=False):
                    mailbox = mailboxes.get(request_id)
                    if mailbox is not None:
                        try:
                            mailbox.on_token(index, token_id, logprobs, at)
                        except AssertionError:
                            raise  # not one answer's text is wrong, but what the engine says
                        except Exception as error:
                            self._break(mailbox, error)
            elif isinstance(event, WorkerJoined | WorkerLost):
                self._on_worker(isinstance(event, WorkerJoined))
            else:
                mailbox = mailboxes.get(event.request_id)
                if mailbox is not None:  # or its reader left
                    try:
                        self._deliver(mailbox, event)
                    except AssertionError:
                        raise
                    except Exception as error:
                        self._break(mailbox, error)

    def _break(self, mailbox: OutputStream, error: Exception) -> None:
        """End one request with an incident. A bug that its text or its reader met must not end the others."""
        failure = self._incident(error)
        mailbox.break_off(failure)
        if not mailbox.is_over:
            self._engine.cancel(mailbox.engine_id, failure)

    def _deliver(self, mailbox: OutputStream, event: Admitted | Preempted | Started | Finished | Failed) -> None:
        if isinstance(event, Started):
            if mailbox.started is None:
                self.num_waiting -= 1
                mailbox.on_dequeued(True)
            mailbox.on_started(event)
        elif isinstance(event, Finished):
            mailbox.on_finished(event)
        elif isinstance(event, Failed):
            mailbox.on_failed(event)
        else:
            assert isinstance(event, Admitted | Preempted)
