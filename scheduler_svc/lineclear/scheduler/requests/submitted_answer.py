"""The answer to one submitted request: its tokens in compact form, and messages built from any range of them.

A token with 20 log probabilities takes 3 KiB as Python and protobuf objects, and a tenth of that packed: ids and times
are arrays, log probabilities are encoded messages. `num_bytes` measures the memory.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Sequence

from lineclear.api_limits import MAX_PIECE_BYTES
from lineclear.errors import InvalidRequest, LineclearError
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.requests.validation import ValidatedRequest
from lineclear.scheduler.security.identity import Identity
from lineclear.v1 import inference_pb2 as pb

_MAX_MESSAGE_TOKENS = 1024

# Bytes of memory, to estimate a reservation. The end of an answer replaces it by the measured size.
_ANSWER_BYTES = 4096  # an answer without tokens, and its entries in tables
_ID_BYTES, _TIME_BYTES, _POINTER_BYTES = 4, 8, 8
_TEXT_BYTES = 64  # a str object for each token
_LOGPROBS_BYTES, _CANDIDATE_BYTES = 48, 14


def reserved_bytes(validated: ValidatedRequest, max_tokens: int) -> int:
    """Estimate the memory of an answer of `max_tokens`."""
    per_token = _ID_BYTES
    if validated.wants_text:
        per_token += _POINTER_BYTES + _TEXT_BYTES
    if validated.token_timings:
        per_token += _TIME_BYTES
    if validated.sampling.logprobs >= 0:
        per_token += _POINTER_BYTES + _LOGPROBS_BYTES + _CANDIDATE_BYTES * validated.sampling.logprobs
    return _ANSWER_BYTES + max_tokens * per_token


class SubmittedAnswer:
    """The tokens so far, and the end or the error. Outlives the RequestContext."""

    def __init__(self, request: RequestContext) -> None:
        self.caller: Identity = request.caller
        self.tenant = request.tenant
        self.request_id = request.request_id
        self.timer: asyncio.TimerHandle | None = None
        self.first_index = len(request.validated.received)
        self.queued: pb.Queued | None = None
        self.started: pb.Started | None = None
        self.finished: pb.Finished | None = None
        self.error: LineclearError | None = None
        self._wants_text = request.validated.wants_text
        self._token_ids = array("I")
        self._texts: list[str] = []
        self._tail = ""  # text that the end released
        self._logprobs: list[bytes] = []  # for each token, an encoded GenerateResponse with this field alone
        self._times_us = array("q")
        self._object_bytes = 0
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        """Whether the answer is complete or has failed."""
        return self.finished is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return (
            _ANSWER_BYTES
            + _ID_BYTES * len(self._token_ids)
            + _TIME_BYTES * len(self._times_us)
            + _POINTER_BYTES * (len(self._texts) + len(self._logprobs))
            + self._object_bytes
        )

    @property
    def next_index(self) -> int:
        """Index of the next token."""
        return self.first_index + len(self._token_ids)

    @property
    def state(self) -> pb.ResultState.ValueType:
        """The state that GetResult returns."""
        if self.error is not None:
            return pb.RESULT_STATE_FAILED
        if self.finished is not None:
            return pb.RESULT_STATE_FINISHED
        return pb.RESULT_STATE_WAITING if self.started is None else pb.RESULT_STATE_RUNNING

    def add(self, message: pb.GenerateResponse, texts: Sequence[str], error: LineclearError | None = None) -> None:
        """Append a part of the answer, or end the answer with its error."""
        count = len(message.token_ids)
        self.error = error
        self._token_ids.extend(message.token_ids)
        self._times_us.extend(message.token_times_us)
        if self._wants_text:
            self._texts += texts[:count]
            self._object_bytes += sum(map(sys.getsizeof, texts))
        for entry in message.logprobs:
            packed = pb.GenerateResponse(logprobs=[entry]).SerializeToString()
            self._logprobs.append(packed)
            self._object_bytes += sys.getsizeof(packed)
        if message.HasField("queued"):
            self.queued = message.queued
        if message.HasField("started"):
            self.started = message.started
        if message.HasField("finished"):
            self.finished = message.finished
            self._tail = "".join(texts[count:]) if self._wants_text else ""
        self._changed.set()
        self._changed = asyncio.Event()

    def whole(self) -> pb.GenerateResponse:
        """Return the answer so far in one message, without logprobs and token times."""
        return self.message(self.first_index, self.next_index, brief=True)

    def read(self, from_index: int) -> Attachment:
        """Return an iterator over the messages from an index on, present and future.

        Raises InvalidRequest for an index outside the present answer.
        """
        if not self.first_index <= from_index <= self.next_index:
            raise InvalidRequest.at("from_index", f"must be in [{self.first_index}, {self.next_index}] now")
        return Attachment(self, from_index)

    async def change(self) -> None:
        """Return after the next part."""
        await self._changed.wait()

    def message(self, start: int, end: int, *, brief: bool = False) -> pb.GenerateResponse:
        """Return tokens [start, end), and the end of the answer if it follows them."""
        a, b = start - self.first_index, end - self.first_index
        is_last = self.finished is not None and end == self.next_index
        message = pb.GenerateResponse(first_index=start, token_ids=self._token_ids[a:b])
        if self._wants_text:
            message.text = "".join(self._texts[a:b]) + (self._tail if is_last else "")
        if not brief:
            message.token_times_us.extend(self._times_us[a:b])
            message.MergeFromString(b"".join(self._logprobs[a:b]))
        if brief and self.started is not None:
            message.started.CopyFrom(self.started)
        elif brief and self.queued is not None:
            message.queued.CopyFrom(self.queued)
        if is_last and self.finished is not None:
            message.finished.CopyFrom(self.finished)
        return message


class Attachment:
    """Asynchronous iterator over messages. Stops after the end of the answer, or raises its error."""

    def __init__(self, answer: SubmittedAnswer, from_index: int) -> None:
        self._answer = answer
        self._index = from_index
        self._has_sent_queued = False
        self._has_sent_started = False
        self._is_done = False

    def __aiter__(self) -> Attachment:
        return self

    async def __anext__(self) -> pb.GenerateResponse:
        answer = self._answer
        while not self._is_done:
            if answer.state == pb.RESULT_STATE_WAITING and answer.queued is not None and not self._has_sent_queued:
                self._has_sent_queued = True
                return pb.GenerateResponse(first_index=self._index, queued=answer.queued)
            started = answer.started if not self._has_sent_started else None
            if started is not None or self._index < answer.next_index or answer.finished is not None:
                return self._next(started)
            if answer.error is not None:
                raise answer.error
            await answer.change()
        raise StopAsyncIteration

    def _next(self, started: pb.Started | None) -> pb.GenerateResponse:
        end = min(self._answer.next_index, self._index + _MAX_MESSAGE_TOKENS)
        message = self._answer.message(self._index, end)
        while message.ByteSize() > MAX_PIECE_BYTES and end - self._index > 1:
            end = (self._index + end) // 2
            message = self._answer.message(self._index, end)
        self._index = end
        if started is not None:
            self._has_sent_started = True
            message.started.CopyFrom(started)
        self._is_done = message.HasField("finished")
        return message
