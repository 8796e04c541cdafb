"""Responses as frozen values: durations in seconds, lists as tuples, enums as strings.

Those with the fields of their messages are in `message_classes.py`, which is generated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from lineclear.errors import LineclearError
from lineclear.status_codec import from_status
from lineclear.v1 import inference_pb2 as pb

from .chat_messages import ChatMessage, ToolCall, ToolCallDelta
from .message_classes import Started, Timings, TopLogprob, Usage
from .response_format import value_of

T = TypeVar("T")


class FinishReason(StrEnum):
    """Why an answer ended. UNSPECIFIED also stands for a reason newer than this client."""

    UNSPECIFIED = "unspecified"
    STOP_EOS = "stop_eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    """This output was cancelled, and others of the request were not."""
    REPETITION = "repetition"
    TOOL_CALLS = "tool_calls"


class HealthStatus(StrEnum):
    """The status of a service by grpc.health.v1."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    SERVICE_UNKNOWN = "service_unknown"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logarithm (base e) of the probability of a sampled token, and the most likely candidates, best first.

    `token_id_logprobs`: those of the request's `logprob_token_ids`, in their order.
    """

    logprob: float
    top_logprobs: tuple[TopLogprob, ...] = ()
    token_id_logprobs: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits: how many requests start before it, and the predicted wait; None if unknown."""

    requests_ahead: int
    predicted_wait_seconds: float | None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: new tokens and new text.

    `first_index`: the index in the answer of the first of `token_ids`. The first delta has `started` and may have no
    tokens; the last one has `finish_reason`. `logprobs` and `token_times_seconds` (since the request arrived at the
    server) are empty unless requested. Text may lag behind the tokens. `reasoning` and `tool_calls` are new text
    that the server has separated from `text`.

    `restarted`: the first delta of a new answer (`on_model_change` "restart"). Drop the deltas before it: they are of a
    model that was replaced. `first_index` is 0 and `started` is set.

    `index`: the output that it is a piece of. With several outputs, the above holds for the pieces of each.
    """

    text: str
    token_ids: tuple[int, ...]
    first_index: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    token_times_seconds: tuple[float, ...] = ()
    started: Started | None = None
    finish_reason: FinishReason | None = None
    restarted: bool = False
    index: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens from the second on, in one delta, if requested."""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt_text: str = ""
    """The prompt, in the first delta, with `echo`."""
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Fields of a `Generation` and of each of its outputs."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    started: Started
    logprobs: tuple[TokenLogprobs, ...] = ()
    token_times_seconds: tuple[float, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    response_format: Any = dataclasses.field(default=None, repr=False, compare=False)
    constraint_start: str = dataclasses.field(default="", repr=False, compare=False)

    @property
    def parsed(self) -> Any:
        """The JSON of the answer as a value of the request's `response_format`, without one as a plain value.

        Raises ValueError if the text is no JSON: the answer was cut off, or had no form.
        """
        start, form = self.constraint_start, self.text
        # The form is behind the first `constraint_start`, unless the server took it for the end of the reasoning.
        if start and start in form and not (self.reasoning and start == "</think>"):
            form = form.partition(start)[2]
        return value_of(self.response_format, form)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output(_Answer):
    """One output of a request: see `Generation` for the fields. A request with n = 1 and `seed` has the same tokens.

    `usage` is that of this output; the prompt counts in output 0.
    """

    index: int
    score: float | None = None
    """What `best_of` and beam search rank outputs by."""

    @property
    def seed(self) -> int:
        """The seed of this output."""
        return self.started.seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(_Answer):
    """A complete answer.

    With `n` outputs, `outputs` has all of them in order, and the other fields are those of output 0, except `usage`,
    which is that of the request.

    `matched_stop`: the stop string or token id that ended it, None otherwise. `logprobs` and `token_times_seconds`
    have an entry for each token if requested. `resumes`: how often the answer was interrupted and resumed; `timings`
    are then those of the last part only. `restarts`: how often it started over because the model was replaced; the
    answer is that of the last model. `tool_calls` and `reasoning` are what the server has separated from `text`.
    """

    resumes: int = 0
    restarts: int = 0
    outputs: tuple[Output, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens from the second on, if requested."""
    prompt_text: str = ""
    """With `echo`: the text of the prompt, which `text` continues."""
    prompt_token_ids: tuple[int, ...] = ()
    """With `echo`: the token ids of the prompt. `prompt_logprobs` are those of all but the first."""

    @classmethod
    def of(cls, outputs: Sequence[Output], **more: Any) -> Generation:
        """Return the answer with these outputs."""
        first = {field.name: getattr(outputs[0], field.name) for field in dataclasses.fields(_Answer)}
        usages = [dataclasses.astuple(output.usage) for output in outputs]
        return cls(**(first | {"usage": Usage(*map(sum, zip(*usages, strict=True)))}), outputs=tuple(outputs), **more)

    @property
    def message(self) -> ChatMessage:
        """The answer as a message, to continue the conversation with the results of its calls."""
        return ChatMessage("assistant", self.text, self.tool_calls, reasoning=self.reasoning or None)

    @property
    def request_id(self) -> str:
        """The name of the request: the caller's, or the server's."""
        return self.started.request_id

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first, divided by the seconds from the first to the last: 1 / mean inter-token latency.

        With a single token: 1 / `timings.e2e_latency_seconds`. None without tokens, and for a resumed answer, whose
        timings are those of the last part only.
        """
        tokens = self.outputs[0].usage.completion_tokens if self.outputs else self.usage.completion_tokens
        seconds = self.timings.decode_time_seconds if tokens > 1 else self.timings.e2e_latency_seconds
        if self.resumes or not tokens or seconds <= 0:
            return None
        return max(tokens - 1, 1) / seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for json.dumps, without the fields that were not requested."""
        outputs = tuple(dataclasses.replace(output, response_format=None) for output in self.outputs)
        bare = dataclasses.replace(self, response_format=None, outputs=outputs)
        plain = {"request_id": self.request_id, **dataclasses.asdict(bare)}
        for entry in (plain, *plain["outputs"]):
            del entry["response_format"], entry["constraint_start"]
        plain["tokens_per_second"] = self.tokens_per_second
        for name in _OPTIONAL:
            if not plain[name]:
                del plain[name]
        if len(self.outputs) < 2:
            del plain["outputs"]
        return plain


_OPTIONAL = (
    *("logprobs", "prompt_logprobs", "token_times_seconds", "tool_calls", "reasoning"),
    *("prompt_text", "prompt_token_ids"),
)


_STATES = {
    pb.RESULT_STATE_WAITING: "waiting",
    pb.RESULT_STATE_RUNNING: "running",
    pb.RESULT_STATE_FINISHED: "finished",
    pb.RESULT_STATE_FAILED: "failed",
}


@dataclass(frozen=True, slots=True)
class SubmittedStatus:
    """The state of a submitted request, and its answer so far.

    `state` is "waiting", "running", "finished" or "failed"; `error` is set if it is "failed", `queued` if it is
    "waiting" and the request has `queue_position=True`. `text` and `token_ids` are those of output 0, `texts` has those
    of all outputs.
    """

    state: str
    text: str
    token_ids: tuple[int, ...]
    error: LineclearError | None = None
    queued: Queued | None = None
    texts: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete or the request failed."""
        return self.state in ("finished", "failed")


def submitted_status(message: pb.GetResultResponse) -> SubmittedStatus:
    """Convert the response of GetResult."""
    error = from_status(message.error) if message.HasField("error") else None
    state = _STATES.get(message.state, "unspecified")
    answer = message.response
    queued = queued_from_proto(answer.queued) if answer.HasField("queued") else None
    texts = (answer.text, *(output.text for output in message.more_outputs))
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in answer.tool_calls)
    return SubmittedStatus(state, answer.text, tuple(answer.token_ids), error, queued, texts, calls, answer.reasoning)


def from_proto(kind: type[T], message: Message) -> T:
    """Convert `message` to a dataclass with fields of the same names. A Duration `x` becomes the field `x_seconds`."""
    return kind(**{name: read(message) for name, read in _readers(cast("Hashable", kind), message.DESCRIPTOR)})


def queued_from_proto(message: pb.Queued) -> Queued:
    """Convert the place of a request in the queue."""
    wait = message.predicted_wait.ToNanoseconds() / 1e9 if message.HasField("predicted_wait") else None
    return Queued(message.requests_ahead, wait)


def delta_from_proto(message: pb.GenerateResponse) -> Delta:
    """Convert one response of the stream, without checking its index."""
    rare: dict[str, Any] = {}
    if message.HasField("started"):
        rare["started"] = from_proto(Started, message.started)
    if message.HasField("finished"):
        rare["finish_reason"] = _finish_reason(message.finished.finish_reason)
    if message.HasField("prompt_echo"):
        echo = message.prompt_echo
        rare |= {"prompt_text": echo.text, "prompt_token_ids": tuple(echo.token_ids)}
    if message.logprobs:
        rare["logprobs"] = tuple(map(token_logprobs, message.logprobs))
    if message.prompt_logprobs:
        rare["prompt_logprobs"] = tuple(map(token_logprobs, message.prompt_logprobs))
    if message.token_times_us:
        rare["token_times_seconds"] = tuple(time_us / 1e6 for time_us in message.token_times_us)
    if message.tool_calls:
        rare["tool_calls"] = tuple(ToolCallDelta(d.index, d.id, d.name, d.arguments) for d in message.tool_calls)
    return Delta(
        text=message.text,
        token_ids=tuple(message.token_ids),
        first_index=message.first_index,
        index=message.index,
        reasoning=message.reasoning,
        **rare,
    )


def token_logprobs(entry: pb.TokenLogprobs) -> TokenLogprobs:
    """Convert the log-probabilities of one token."""
    return TokenLogprobs(entry.logprob, _candidates(entry.top_logprobs), _candidates(entry.token_id_logprobs))


def _candidates(entries: Iterable[pb.TopLogprob]) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(entry.token_id, entry.logprob) for entry in entries)


def _finish_reason(number: pb.FinishReason.ValueType) -> FinishReason:
    value = pb.FinishReason.DESCRIPTOR.values_by_number.get(number)
    try:
        return FinishReason(value.name.removeprefix("FINISH_REASON_").lower() if value else "unspecified")
    except ValueError:
        return FinishReason.UNSPECIFIED


@cache
def _readers(kind: Hashable, descriptor: Descriptor) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """Return how each field of a dataclass is read from messages of a type."""
    assert isinstance(kind, type)
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return tuple((name, _reader(hints[name], descriptor, name)) for name in names)


def _reader(kind: Any, descriptor: Descriptor, name: str) -> Callable[[Any], Any]:
    duration = descriptor.fields_by_name.get(name.removesuffix("_seconds"))
    if kind is float and duration is not None and duration.message_type is Duration.DESCRIPTOR:
        span = attrgetter(duration.name)
        return lambda message: span(message).ToNanoseconds() / 1e9
    value = attrgetter(name)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return lambda message: from_proto(kind, value(message))
    if kind == int | None:
        return lambda message: value(message) if message.HasField(name) else None
    item: Any = next(iter(get_args(kind)), None)
    if isinstance(item, type) and dataclasses.is_dataclass(item):
        return lambda message: tuple(from_proto(item, entry) for entry in value(message))
    is_repeated = get_origin(kind) is tuple
    return (lambda message: tuple(value(message))) if is_repeated else value
