"""The answer to one submitted request: its tokens in compact form, and messages built from any range of an output.

A token with 20 log probabilities takes 3 KiB as Python and protobuf objects, and a tenth of that packed: ids and times
are arrays, log probabilities are encoded messages. `num_bytes` measures the memory.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import AsyncIterator, Sequence

from lineclear.api_limits import MAX_PIECE_BYTES
from lineclear.errors import InvalidRequest, LineclearError
from lineclear.scheduler.requests import responses
from lineclear.scheduler.requests.output_stream import OutputStream
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.requests.validate.request import ValidatedRequest
from lineclear.scheduler.security.identity import Identity
from lineclear.scheduler.text.parsed_answer import ParsedText
from lineclear.v1 import inference_pb2 as pb

_MAX_MESSAGE_TOKENS = 1024

# Bytes of memory, to estimate a reservation. The end of an answer replaces it by the measured size.
_ANSWER_BYTES = 4096  # an answer without tokens, and its entries in tables
_ID_BYTES, _TIME_BYTES, _POINTER_BYTES = 4, 8, 8
_TEXT_BYTES = 64  # a str object for each token
_PARSED_BYTES = 160  # its attributes, if it is parsed
_LOGPROBS_BYTES, _CANDIDATE_BYTES = 48, 14


def reserved_bytes(validated: ValidatedRequest, max_tokens: int) -> int:
    """Estimate the memory of one output of `max_tokens`."""
    per_token = _ID_BYTES
    if validated.wants_text:
        per_token += _POINTER_BYTES + _TEXT_BYTES + (_PARSED_BYTES if validated.tools is not None else 0)
    if validated.token_timings:
        per_token += _TIME_BYTES
    if validated.sampling.logprobs >= 0:
        num_candidates = validated.sampling.logprobs + len(validated.sampling.logprob_ids)
        per_token += _POINTER_BYTES + _LOGPROBS_BYTES + _CANDIDATE_BYTES * num_candidates
    return _ANSWER_BYTES + max_tokens * per_token


class SubmittedAnswer:
    """The outputs so far, and the error of the request. Outlives the RequestContext."""

    def __init__(self, request: RequestContext) -> None:
        self.caller: Identity = request.call.caller
        self.tenant = request.call.tenant
        self.request_id = request.request_id
        self.timer: asyncio.TimerHandle | None = None
        self.queued: pb.Queued | None = None
        self.error: LineclearError | None = None
        self.outputs = [SubmittedOutput(self, output, request) for output in request.outputs]
        self._streams: Sequence[OutputStream] = request.outputs
        self._by_index = {output.index: output for output in self.outputs}
        self._changed = asyncio.Event()

    @property
    def has_started(self) -> bool:
        """Whether an output has left the queue."""
        return any(stream.started is not None for stream in self._streams)

    @property
    def has_ended(self) -> bool:
        return self.error is not None or all(output.finished is not None for output in self.outputs)

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return sum(output.num_tokens for output in self.outputs)

    @property
    def num_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs)

    @property
    def state(self) -> pb.ResultState.ValueType:
        if self.error is not None:
            return pb.RESULT_STATE_FAILED
        if self.has_ended:
            return pb.RESULT_STATE_FINISHED
        return pb.RESULT_STATE_RUNNING if self.has_started else pb.RESULT_STATE_WAITING

    def add(self, message: pb.GenerateResponse, texts: Sequence[str], error: LineclearError | None = None) -> None:
        """Append a part of an output, or end the answer with its error."""
        self.error = error
        if message.HasField("queued"):
            self.queued = message.queued
        if error is None:
            self._by_index[message.index].add(message, texts)
        if self.has_ended:
            self._streams = ()
        self._changed.set()
        self._changed = asyncio.Event()

    def read(self, *from_indexes: int) -> AsyncIterator[pb.GenerateResponse]:
        """Iterate over the messages from an index of each output on, present and future.

        Ends after the ends of all outputs, or raises the error of the answer. Raises InvalidRequest at once for an
        index outside the present output, and for indexes of outputs that the answer does not have.
        """
        if len(from_indexes) > len(self.outputs):
            raise InvalidRequest.at("more_from_indexes", f"must have at most {len(self.outputs) - 1} entries")
        cursors = []
        for output in self.outputs:
            start = from_indexes[output.index] if output.index < len(from_indexes) else 0
            start = max(start, output.first_index) if output.index else start
            if not output.first_index <= start <= output.next_index:
                path = f"more_from_indexes[{output.index - 1}]" if output.index else "from_index"
                raise InvalidRequest.at(path, f"must be in [{output.first_index}, {output.next_index}] now")
            cursors.append(_Cursor(output, start))
        return self._messages(cursors)

    async def _messages(self, cursors: Sequence[_Cursor]) -> AsyncIterator[pb.GenerateResponse]:
        has_sent_queued = False
        while not all(cursor.is_done for cursor in cursors):
            if self.state == pb.RESULT_STATE_WAITING and self.queued is not None and not has_sent_queued:
                has_sent_queued = True
                yield pb.GenerateResponse(first_index=cursors[0].index, queued=self.queued)
            changed, has_message = self._changed, False
            for cursor in cursors:  # what all outputs have, one message of each
                if cursor.has_more:
                    has_message = True
                    yield cursor.take()
            if not has_message:
                if self.error is not None:
                    raise self.error
                await changed.wait()


class SubmittedOutput:
    """The tokens of one output so far, and its end."""

    def __init__(self, answer: SubmittedAnswer, output: OutputStream, request: RequestContext) -> None:
        self.index = output.index
        self.first_index = output.num_resumed
        self.started: pb.Started | None = None
        self.finished: pb.Finished | None = None
        self.prompt_echo: pb.PromptEcho | None = None
        self._answer = answer
        self._wants_text = request.validated.wants_text
        self._is_parsed = output.is_parsed
        self._call_key = request.call_key(output)
        self._token_ids = array("I")
        self._texts: list[str] = []
        self._tail = ""  # text that the end released
        self._logprobs: list[bytes] = []  # for each token, an encoded GenerateResponse with this field alone
        self._prompt_logprobs = b""  # the same
        self._times_us = array("q")
        self._object_bytes = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self._token_ids)

    @property
    def num_bytes(self) -> int:
        return (
            _ANSWER_BYTES
            + _ID_BYTES * len(self._token_ids)
            + _TIME_BYTES * len(self._times_us)
            + _POINTER_BYTES * (len(self._texts) + len(self._logprobs))
            + self._object_bytes
        )

    @property
    def next_index(self) -> int:
        return self.first_index + len(self._token_ids)

    def add(self, message: pb.GenerateResponse, texts: Sequence[str]) -> None:
        count = len(message.token_ids)
        self._token_ids.extend(message.token_ids)
        self._times_us.extend(message.token_times_us)
        if self._wants_text:
            self._texts += texts[:count]
            self._object_bytes += sum(map(_text_bytes, texts) if self._is_parsed else map(sys.getsizeof, texts))
        for entry in message.logprobs:
            packed = pb.GenerateResponse(logprobs=[entry]).SerializeToString()
            self._logprobs.append(packed)
            self._object_bytes += sys.getsizeof(packed)
        if message.prompt_logprobs:
            packed = pb.GenerateResponse(prompt_logprobs=message.prompt_logprobs).SerializeToString()
            self._prompt_logprobs = packed
            self._object_bytes += sys.getsizeof(packed)
        if message.HasField("started"):
            self.started = message.started
        if message.HasField("prompt_echo"):
            self.prompt_echo = message.prompt_echo
            self._object_bytes += _ID_BYTES * len(message.prompt_echo.token_ids)
            self._object_bytes += sys.getsizeof(message.prompt_echo.text)
        if message.HasField("finished"):
            self.finished = message.finished
            self._tail = texts[count] if self._wants_text and len(texts) > count else ""

    def whole(self) -> pb.GenerateResponse:
        """Return the output so far in one message, without logprobs and token times."""
        return self.message(self.first_index, self.next_index, brief=True)

    def message(self, start: int, end: int, *, brief: bool = False) -> pb.GenerateResponse:
        """Return tokens [start, end), and the end of the output if it follows them."""
        a, b = start - self.first_index, end - self.first_index
        is_last = self.finished is not None and end == self.next_index
        message = pb.GenerateResponse(first_index=start, token_ids=self._token_ids[a:b], index=self.index)
        if self._wants_text:
            texts = self._texts[a:b] + ([self._tail] if is_last else [])
            message.text = "".join(texts)
            if self._is_parsed:
                responses.add_parsed(message, texts, self._call_key)
        if not brief:
            message.token_times_us.extend(self._times_us[a:b])
            message.MergeFromString(b"".join(self._logprobs[a:b]))
            if a == 0 and (b or is_last):
                message.MergeFromString(self._prompt_logprobs)
        if brief and self.started is not None:
            self.add_start(message)
        elif brief and self.index == 0 and self._answer.queued is not None:
            message.queued.CopyFrom(self._answer.queued)
        if is_last and self.finished is not None:
            message.finished.CopyFrom(self.finished)
        return message

    def add_start(self, message: pb.GenerateResponse) -> None:
        assert self.started is not None
        message.started.CopyFrom(self.started)
        if self.prompt_echo is not None and message.first_index == self.first_index:
            message.prompt_echo.CopyFrom(self.prompt_echo)


def _text_bytes(text: str) -> int:
    extra = _PARSED_BYTES + text.num_extra if isinstance(text, ParsedText) else 0
    return sys.getsizeof(text) + extra


class _Cursor:
    """The place in one output up to which a reader has read."""

    def __init__(self, output: SubmittedOutput, index: int) -> None:
        self.index = index
        self.is_done = False
        self._output = output
        self._has_sent_started = False

    @property
    def has_more(self) -> bool:
        """Whether `take` may be called."""
        output = self._output
        is_new = output.started is not None and not self._has_sent_started
        return not self.is_done and (is_new or self.index < output.next_index or output.finished is not None)

    def take(self) -> pb.GenerateResponse:
        output = self._output
        end = min(output.next_index, self.index + _MAX_MESSAGE_TOKENS)
        message = output.message(self.index, end)
        while message.ByteSize() > MAX_PIECE_BYTES and end - self.index > 1:
            end = (self.index + end) // 2
            message = output.message(self.index, end)
        self.index = end
        if output.started is not None and not self._has_sent_started:
            self._has_sent_started = True
            output.add_start(message)
        self.is_done = message.HasField("finished")
        return message
