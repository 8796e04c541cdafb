"""Resumes an answer that is cut off: what the client asks for next, after which pause, on which server. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lineclear.api_limits import output_seed
from lineclear.errors import LineclearError, ModelChanged
from lineclear.v1 import inference_pb2 as pb

from .answer_assembler import AnswerAssembler, OutputAssembler
from .call_settings import CallOptions
from .chat_messages import ToolCall
from .requests import arrives_whole
from .results import Delta, Generation, Queued, queued_from_proto
from .retry import ResumeState
from .rpc_methods import ATTACH, GENERATE, Method
from .target import names_one_server


class AnswerProgress:
    """An answer over all of its calls. `target` is that of the transport."""

    def __init__(self, options: CallOptions, target: str) -> None:
        message = options.message
        self.options = options
        self.assembler = AnswerAssembler(message.from_index if isinstance(message, pb.AttachRequest) else 0)
        self.queued: Queued | None = None
        self.ended = False
        self._target = target
        self._arrives_whole = isinstance(message, pb.GenerateRequest) and arrives_whole(message.sampling)
        self._has_responses = False  # from the first response on, the next call resumes the answer
        self._call_has_responses = False
        self._restarting = False  # the next delta is the first of a new answer

    def begin(self) -> None:
        """Start the deadline of the answer."""
        self._retry_state = self.options.attempts()
        self._resume_state = ResumeState(self._retry_state)

    @property
    def resumes(self) -> int:
        return self._resume_state.count - self.assembler.restarts

    def next_call(self) -> tuple[Method[Any, pb.GenerateResponse], Any, float | None]:
        """Return the method, the request for what is missing of the answer, and the seconds left.

        Raises DeadlineExceeded if none are left.
        """
        message: Any = self.options.message
        method: Method[Any, pb.GenerateResponse] = GENERATE
        if isinstance(message, pb.AttachRequest):
            first, *more = (output.next_index for output in self.assembler.outputs)
            method = ATTACH
            message = pb.AttachRequest(request_id=message.request_id, from_index=first, more_from_indexes=more)
        elif self._has_responses:
            message = _rest(self.assembler.outputs, message)
        self._call_has_responses = False
        return method, message, self._retry_state.begin()

    def add(self, message: pb.GenerateResponse | None) -> Delta | None:
        """Add a response, or None at the end of the stream, to the answer.

        Returns None at the end, for the place in the queue, and for the first response of a resumed call. Raises
        DataLoss if the message does not continue the answer, or the answer is not complete at the end.
        """
        if message is None:
            self.assembler.close()
            self.ended = True
            return None
        if message.HasField("queued"):
            self.queued = queued_from_proto(message.queued)
            if not message.HasField("started"):
                return None
        self._has_responses = True
        self.assembler.resumes = self.resumes
        delta = self.assembler.add(message)
        self._call_has_responses = True
        if self._restarting:
            self._restarting, delta = False, replace(delta, restarted=True)
        if delta.token_ids or delta.text or delta.reasoning or delta.tool_calls or delta.finish_reason:
            self._resume_state.on_progress()
            return delta
        return delta if delta.started is not None or not self._resume_state.count else None

    def pause_after(self, error: LineclearError) -> float:
        """Return the seconds until the next call. Raises `error` if the request ends with it."""
        if self._has_responses and self._arrives_whole:
            raise error
        if isinstance(error, ModelChanged):
            # A submitted request is known to one server only.
            has_replicas = self.options.may_go_elsewhere and not names_one_server(self._target)
            pause_seconds = self._resume_state.pause_before_replica(self._call_has_responses) if has_replicas else None
            if pause_seconds is None and self._has_responses:
                pause_seconds = self._pause_before_restart(error)
            if pause_seconds is not None:
                return pause_seconds
        return (self._resume_state if self._has_responses else self._retry_state).pause_after(error)

    def _pause_before_restart(self, error: ModelChanged) -> float:
        """Drop the answer of the replaced model. Raises `error`, with that answer, if the request may not restart."""
        first = self.assembler.outputs[0]
        error.text, error.token_ids = first.text, tuple(first.token_ids)
        if not self.options.may_restart:
            raise error
        pause_seconds = self._resume_state.pause_after(error, restarts=True)
        restarts = self.assembler.restarts + 1
        self.assembler = AnswerAssembler()
        self.assembler.restarts = restarts
        self._has_responses, self._restarting = False, True
        return pause_seconds


def _rest(outputs: Sequence[OutputAssembler], message: pb.GenerateRequest) -> pb.GenerateRequest:
    """Return the request that resumes the answer to `message`."""
    again = pb.GenerateRequest()
    again.CopyFrom(message)
    started = next((output.started for output in outputs if output.started is not None), None)
    index = next((index for index, output in enumerate(outputs) if output.started is not None), 0)
    if started is not None:
        again.sampling.seed = output_seed(started.seed, -index)
        again.resume.model_fingerprint = started.model_fingerprint
        again.resume.chat_time_us = started.chat_time_us
        if started.prompt_digest:
            again.resume.prompt_digest = started.prompt_digest
    again.resume.SetInParent()
    if len(outputs) == 1:
        again.resume.token_ids[:] = outputs[0].token_ids
        return again
    del again.resume.outputs[:]
    for output in outputs:
        entry = again.resume.outputs.add(is_complete=output.complete)
        if not output.complete:
            entry.token_ids[:] = output.token_ids
    return again


class AnswerSoFar:
    """The parts of an answer that have arrived."""

    def __init__(self, progress: AnswerProgress) -> None:
        self._progress = progress
        self._result: Generation | None = None

    @property
    def resumes(self) -> int:
        """How often the answer was cut off and resumed so far."""
        return self._progress.resumes

    @property
    def may_restart(self) -> bool:
        """Whether the answer starts over if its model is replaced."""
        return self._progress.options.may_restart

    @property
    def restarts(self) -> int:
        """How often the answer started over with another model; `text` and `token_ids` are those of the last one."""
        return self._progress.assembler.restarts

    @property
    def queued(self) -> Queued | None:
        """The request's place in the queue when it arrived, with `queue_position=True`. None if it did not wait."""
        return self._progress.queued

    @property
    def text(self) -> str:
        """The text received so far, of output 0."""
        return self._progress.assembler.outputs[0].text

    @property
    def texts(self) -> tuple[str, ...]:
        """The text received so far of each output."""
        return tuple(output.text for output in self._progress.assembler.outputs)

    @property
    def reasoning(self) -> str:
        return self._progress.assembler.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls received so far. The last may be incomplete."""
        return self._progress.assembler.outputs[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens received so far, of output 0."""
        return tuple(self._progress.assembler.outputs[0].token_ids)

    @property
    def result(self) -> Generation:
        """The complete answer. Raises RuntimeError until the stream is read to its end."""
        progress = self._progress
        if not (progress.ended and progress.assembler.complete):
            raise RuntimeError("the answer is not complete: read the stream to its end first")
        if self._result is None:
            options = progress.options
            self._result = progress.assembler.generation(options.response_format, options.constraint_start)
        return self._result
