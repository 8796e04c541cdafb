"""Puts the responses to a request together to its answer. Checks that no token is missing or repeated. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lineclear.errors import DataLoss, ModelChanged
from lineclear.v1 import inference_pb2 as pb

from .chat_messages import ToolCall, ToolCallDelta
from .message_classes import Started, Timings, Usage
from .results import (
    Delta,
    FinishReason,
    Generation,
    Output,
    TokenLogprobs,
    delta_from_proto,
    from_proto,
)


class ToolCalls:
    """The calls of an answer so far."""

    def __init__(self) -> None:
        self._first: dict[int, ToolCallDelta] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, deltas: Iterable[ToolCallDelta]) -> None:
        """Add new text. Raises DataLoss if a call starts twice."""
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
