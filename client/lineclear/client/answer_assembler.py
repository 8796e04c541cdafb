"""The answer to a request: its responses over all calls, and what the client sends next. No I/O.

`AnswerAssembler` checks that no token is missing or repeated. `AnswerProgress` decides on the next call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lineclear.api_limits import output_seed
from lineclear.errors import DataLoss, LineclearError, ModelChanged
from lineclear.v1 import inference_pb2 as pb

from .call_settings import CallOptions
from .chat_messages import ToolCall, ToolCallDelta
from .grpc_channel import names_one_server
from .message_classes import Started, Timings, Usage
from .requests import arrives_whole
from .results import (
    Delta,
    FinishReason,
    Generation,
    Output,
    Queued,
    TokenLogprobs,
    delta_from_proto,
    from_proto,
    queued_from_proto,
)
from .retry import ResumeState
from .rpc_methods import ATTACH, GENERATE, Method


class ToolCalls:
    """The calls of an answer so far."""

    def __init__(self) -> None:
        self._first: dict[int, ToolCallDelta] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, deltas: Iterable[ToolCallDelta]) -> None:
        """Add new text. Raises DataLoss if a call begins twice."""
        for delta in deltas:
            if delta.id:
                if delta.index in self._first:
                    raise DataLoss(f"tool call {delta.index} begins twice")
                self._first[delta.index] = delta
            self._arguments.setdefault(delta.index, []).append(delta.arguments)

    def whole(self) -> tuple[ToolCall, ...]:
        """Return the calls. Id and name are empty if they were sent before the first response that was read."""
        nothing = ToolCallDelta(0, "", "", "")
        return tuple(
            ToolCall(self._first.get(index, nothing).id, self._first.get(index, nothing).name, "".join(parts))
            for index, parts in self._arguments.items()
        )


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
            message = self.assembler.rest(message)
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
        """The reasoning received so far."""
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


class AnswerAssembler:
    """The outputs so far. They grow with every `add`; their number is known from the first response on.

    `first_index` is the first token that is expected of output 0, as for Attach.
    """

    def __init__(self, first_index: int = 0) -> None:
        self.outputs = [OutputAssembler(first_index)]
        self.resumes = 0
        """How often the answer was resumed."""
        self.restarts = 0
        """How often the answer started over with another model."""

    @property
    def complete(self) -> bool:
        """Whether the last response of each output has been added."""
        return all(output.complete for output in self.outputs)

    def add(self, message: pb.GenerateResponse) -> Delta:
        """Add a response and return it as a Delta.

        Raises DataLoss if it does not start at the next token of its output, ModelChanged if another model or prompt
        answers.
        """
        if message.index >= len(self.outputs) or message.HasField("started"):
            self._grow(message)
        output = self.outputs[message.index]
        if output.complete and self.resumes and not message.token_ids:
            return Delta("", (), message.first_index, index=message.index)  # an Attach repeats the end
        return output.add(message)

    def close(self) -> None:
        """Record the end of the stream. Raises DataLoss if the answer is not complete."""
        if not self.complete:
            count = sum(len(output.token_ids) for output in self.outputs)
            raise DataLoss(f"the stream ended after {count} tokens without the end of the answer")

    def rest(self, message: pb.GenerateRequest) -> pb.GenerateRequest:
        """Return the request that resumes the answer to `message`."""
        again = pb.GenerateRequest()
        again.CopyFrom(message)
        started = next((output.started for output in self.outputs if output.started is not None), None)
        index = next((index for index, output in enumerate(self.outputs) if output.started is not None), 0)
        if started is not None:
            again.sampling.seed = output_seed(started.seed, -index)
            again.resume.model_fingerprint = started.model_fingerprint
            again.resume.chat_time_us = started.chat_time_us
            if started.prompt_digest:
                again.resume.prompt_digest = started.prompt_digest
        again.resume.SetInParent()
        if len(self.outputs) == 1:
            again.resume.token_ids[:] = self.outputs[0].token_ids
            return again
        del again.resume.outputs[:]
        for output in self.outputs:
            entry = again.resume.outputs.add(is_complete=output.complete)
            if not output.complete:
                entry.token_ids[:] = output.token_ids
        return again

    def generation(self, response_format: Any = None, constraint_start: str = "") -> Generation:
        """Return the complete answer. `Generation` explains the arguments."""
        form = {"response_format": response_format, "constraint_start": constraint_start}
        first = self.outputs[0]
        return Generation.of(
            [output.output(index, form) for index, output in enumerate(self.outputs)],
            resumes=self.resumes,
            restarts=self.restarts,
            prompt_logprobs=first.prompt_logprobs,
            prompt_text=first.prompt_text,
            prompt_token_ids=first.prompt_token_ids,
        )

    def _grow(self, message: pb.GenerateResponse) -> None:
        """Take the number of outputs from the first response."""
        count = max(message.started.num_outputs, 1) if message.HasField("started") else len(self.outputs)
        if message.index >= count:
            raise DataLoss(f"a response is a part of output {message.index}; the request has {count}")
        self.outputs += [OutputAssembler() for _ in range(count - len(self.outputs))]


class OutputAssembler:
    """One output so far, from the token `first_index` on."""

    def __init__(self, first_index: int = 0) -> None:
        self._first_index = first_index
        self.token_ids: list[int] = []
        self.started: Started | None = None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls = ToolCalls()
        self._logprobs: list[TokenLogprobs] = []
        self._times_seconds: list[float] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.prompt_text = ""
        self.prompt_token_ids: tuple[int, ...] = ()
        self._finish_reason: FinishReason | None = None
        self._finished: pb.Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self._calls.whole()

    @property
    def next_index(self) -> int:
        """The index of the next token."""
        return self._first_index + len(self.token_ids)

    @property
    def complete(self) -> bool:
        """Whether the last response has been added."""
        return self._finished is not None

    def add(self, message: pb.GenerateResponse) -> Delta:
        """Add a response and return it as a Delta."""
        if self.complete:
            raise DataLoss("the server sent more after the end of the answer")
        delta = delta_from_proto(message)
        if self.started is not None and delta.started is not None:
            _check_same(self.started, delta.started)
            delta = replace(delta, started=None)  # of a resumed call
        count, have = len(delta.token_ids), self.next_index
        if count and delta.first_index != have:
            raise DataLoss(
                f"the answer continues at token {delta.first_index}, token {have} was expected",
                metadata={"expected_index": str(have), "received_index": str(delta.first_index)},
            )
        if delta.logprobs or delta.token_times_seconds:
            self._add_columns(delta)
        self.token_ids += delta.token_ids
        self._texts.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        if delta.tool_calls:
            self._calls.add(delta.tool_calls)
        if delta.prompt_logprobs and not self.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if self.prompt_token_ids and delta.prompt_token_ids:
            delta = replace(delta, prompt_text="", prompt_token_ids=())  # of a resumed call
        elif delta.prompt_token_ids:
            self.prompt_text, self.prompt_token_ids = delta.prompt_text, delta.prompt_token_ids
        if delta.started is not None:
            self.started = delta.started
        if delta.finish_reason is not None:
            self._finish_reason, self._finished = delta.finish_reason, message.finished
        return delta

    def _add_columns(self, delta: Delta) -> None:
        """Add what a response has for each token. Raises DataLoss unless it has it for all or none."""
        count = len(delta.token_ids)
        for name, entries in (("logprobs", delta.logprobs), ("token times", delta.token_times_seconds)):
            if entries and len(entries) != count:
                raise DataLoss(f"a response has {count} tokens and {len(entries)} {name}")
        self._logprobs += delta.logprobs
        self._times_seconds += delta.token_times_seconds

    def output(self, index: int, form: dict[str, Any]) -> Output:
        """Return the complete output. `form` has the fields of its format."""
        assert self._finished is not None
        assert self._finish_reason is not None
        return Output(
            index=index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self._finish_reason,
            matched_stop=_matched_stop(self._finished),
            usage=from_proto(Usage, self._finished.usage),
            timings=from_proto(Timings, self._finished.timings),
            started=self.started or Started(),
            logprobs=tuple(self._logprobs),
            token_times_seconds=tuple(self._times_seconds),
            tool_calls=self.tool_calls,
            reasoning=self.reasoning,
            score=self._finished.score if self._finished.HasField("score") else None,
            **form,
        )


def _check_same(first: Started, then: Started) -> None:
    """Raise ModelChanged or DataLoss if a resumed call answers another request.

    Servers compare, except for Attach: the request_id may belong to another request by now.
    """
    if (first.model_fingerprint, first.prompt_digest) != (then.model_fingerprint, then.prompt_digest):
        raise ModelChanged(
            "the resumed call has another model or another prompt",
            metadata={
                "model_fingerprint": then.model_fingerprint,
                "expected_model_fingerprint": first.model_fingerprint,
            },
        )
    if first.seed != then.seed:
        raise DataLoss("the resumed call has another seed")


def _matched_stop(finished: pb.Finished) -> str | int | None:
    if finished.HasField("matched_stop_string"):
        return finished.matched_stop_string
    return finished.matched_token_id if finished.HasField("matched_token_id") else None
