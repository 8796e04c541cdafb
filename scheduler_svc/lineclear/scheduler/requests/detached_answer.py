"""One submitted answer: its tokens as they come, packed, and messages made of any part of them.

A token with 20 log probabilities is 3 KiB of Python and protobuf objects, and a tenth of that packed: ids and times in
arrays, log probabilities as the bytes they have on the wire. `num_bytes` counts what is held.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Sequence

from lineclear.api_limits import MAX_PIECE_BYTES
from lineclear.errors import InvalidRequest, LineclearError
from lineclear.scheduler.requests.admission import RequestContext
from lineclear.scheduler.requests.validation import ValidatedRequest
from lineclear.scheduler.security.identity import Identity
from lineclear.v1 import inference_pb2 as pb

_TOKENS_OF_A_MESSAGE = 1024

# Bytes of memory. A reservation is an estimate from these; what is counted at the end is measured.
_ANSWER_BYTES = 4096  # an answer without tokens, and its entries in the tables around it
_ID_BYTES, _TIME_BYTES, _POINTER_BYTES = 4, 8, 8
_TEXT_BYTES = 64  # the text of one token, an object of its own
_LOGPROBS_BYTES, _CANDIDATE_BYTES = 48, 14


def reserved_bytes(checked: ValidatedRequest, max_tokens: int) -> int:
    """Return how much memory an answer of `max_tokens` is expected to take."""
    of_token = _ID_BYTES
    if checked.wants_text:
        of_token += _POINTER_BYTES + _TEXT_BYTES
    if checked.token_timings:
        of_token += _TIME_BYTES
    if checked.sampling.logprobs >= 0:
        of_token += _POINTER_BYTES + _LOGPROBS_BYTES + _CANDIDATE_BYTES * checked.sampling.logprobs
    return _ANSWER_BYTES + max_tokens * of_token


class DetachedAnswer:
    """One answer: what came so far, and how it ended. Outlives its ticket, of which it keeps only the names."""

    def __init__(self, ticket: RequestContext) -> None:
        self.caller: Identity = ticket.caller
        self.tenant = ticket.tenant
        self.label = ticket.output.request_id
        self.timer: asyncio.TimerHandle | None = None
        self.first_index = len(ticket.checked.received)
        self.started: pb.Started | None = None
        self.finished: pb.Finished | None = None
        self.error: LineclearError | None = None
        self._wants_text = ticket.checked.wants_text
        self._token_ids = array("I")
        self._pieces: list[str] = []
        self._tail = ""  # text that came with the end and belongs to no token
        self._logprobs: list[bytes] = []  # of each token, a GenerateResponse with that field alone
        self._times_us = array("q")
        self._bytes_of_objects = 0
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self.finished is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        """Held here."""
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        """Memory that is held."""
        return (
            _ANSWER_BYTES
            + _ID_BYTES * len(self._token_ids)
            + _TIME_BYTES * len(self._times_us)
            + _POINTER_BYTES * (len(self._pieces) + len(self._logprobs))
            + self._bytes_of_objects
        )

    @property
    def next_index(self) -> int:
        """Of the token to come."""
        return self.first_index + len(self._token_ids)

    @property
    def state(self) -> pb.ResultState.ValueType:
        """How far it is."""
        if self.error is not None:
            return pb.RESULT_STATE_FAILED
        if self.finished is not None:
            return pb.RESULT_STATE_FINISHED
        return pb.RESULT_STATE_WAITING if self.started is None else pb.RESULT_STATE_RUNNING

    def add(self, message: pb.GenerateResponse, pieces: Sequence[str]) -> None:
        """Append what came; `pieces` is the text of each token and of the end."""
        count = len(message.token_ids)
        self._token_ids.extend(message.token_ids)
        self._times_us.extend(message.token_times_us)
        if self._wants_text:
            self._pieces += pieces[:count]
            self._bytes_of_objects += sum(map(sys.getsizeof, pieces))
        for entry in message.logprobs:
            packed = pb.GenerateResponse(logprobs=[entry]).SerializeToString()
            self._logprobs.append(packed)
            self._bytes_of_objects += sys.getsizeof(packed)
        if message.HasField("started"):
            self.started = message.started
        if message.HasField("finished"):
            self.finished = message.finished
            self._tail = "".join(pieces[count:]) if self._wants_text else ""
        self._notify()

    def fail(self, error: LineclearError) -> None:
        """End it without an answer."""
        self.error = error
        self._notify()

    def whole(self) -> pb.GenerateResponse:
        """Return everything in one piece, without logprobs and times, which can be many times larger."""
        return self.message(self.first_index, self.next_index, brief=True)

    def read(self, from_index: int) -> Attachment:
        """Return an iterator over everything from there on, as it comes.

        Raises InvalidRequest for an index before the first token or after the last.
        """
        if not self.first_index <= from_index <= self.next_index:
            raise InvalidRequest.at("from_index", f"must be in [{self.first_index}, {self.next_index}] now")
        return Attachment(self, from_index)

    async def change(self) -> None:
        """Return when something is new."""
        await self._changed.wait()

    def message(self, start: int, end: int, *, brief: bool = False) -> pb.GenerateResponse:
        """Return tokens [start, end) and what belongs to them; with the end, where that follows."""
        a, b = start - self.first_index, end - self.first_index
        is_last = self.finished is not None and end == self.next_index
        message = pb.GenerateResponse(first_index=start, token_ids=self._token_ids[a:b])
        if self._wants_text:
            message.text = "".join(self._pieces[a:b]) + (self._tail if is_last else "")
        if not brief:
            message.token_times_us.extend(self._times_us[a:b])
            message.MergeFromString(b"".join(self._logprobs[a:b]))
        if brief and self.started is not None:
            message.started.CopyFrom(self.started)
        if is_last and self.finished is not None:
            message.finished.CopyFrom(self.finished)
        return message

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Attachment:
    """Iterate for messages. Ends after the answer's end, or raises what the request failed with."""

    def __init__(self, answer: DetachedAnswer, from_index: int) -> None:
        self._answer = answer
        self._index = from_index
        self._has_sent_started = False
        self._is_done = False

    def __aiter__(self) -> Attachment:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        answer = self._answer
        while not self._is_done:
            greeting = answer.started if not self._has_sent_started else None
            if greeting is not None or self._index < answer.next_index or answer.finished is not None:
                return self._next(greeting)
            if answer.error is not None:
                raise answer.error
            await answer.change()
        raise StopAsyncIteration

    def _next(self, greeting: pb.Started | None) -> pb.GenerateResponse:
        end = min(self._answer.next_index, self._index + _TOKENS_OF_A_MESSAGE)
        message = self._answer.message(self._index, end)
        while message.ByteSize() > MAX_PIECE_BYTES and end - self._index > 1:
            end = (self._index + end) // 2
            message = self._answer.message(self._index, end)
        self._index = end
        if greeting is not None:
            self._has_sent_started = True
            message.started.CopyFrom(greeting)
        self._is_done = message.HasField("finished")
        return message
