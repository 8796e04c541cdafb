"""Requests as frozen values, and their protobuf messages.

A field that is None stays unset in the message: the server applies its default. The server checks the bounds; here a
value is rejected only if the protobuf field cannot hold it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Unpack

from lineclear.errors import InvalidRequest, MalformedMessage
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2

from .call_params import Params
from .chat_messages import ChatMessage, is_chat, set_message, set_tools
from .message_fields import is_bool, set_field, set_given
from .parameters import Metadata, Parameters, Prompt, RepetitionDetection, Sampling
from .response_format import schema_of

SAMPLING_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(Sampling))


class Request(Parameters):
    """A prompt and its parameters, in place of a prompt in any call.

    `timeout_seconds`: the deadline of the answer, by default that of the client. With None the server applies its own
    (`Limits.default_deadline_seconds`, 600 s by default). `on_model_change`: by default that of the client.
    `response_format`: pydantic model, dataclass, TypedDict or JSON Schema of the answer; `Generation.parsed` is then
    a value of it.
    `tools`: what the model may call in a conversation. `tool_choice`: "auto" (the default), "none", "required" or a
    dict that names a function. `parallel_tool_calls`: whether an answer may have several calls (the default).
    `top_logprobs`, `logprob_token_ids`: the log-probabilities of the most likely tokens and of these, beside those of
    the answer. `prompt_logprobs`: those of the prompt's tokens, and of this many most likely in their places.
    `tenant`: whose share of the server the request takes, unless the token or certificate of the client names one.

    `on_queued` is called at once with the place of a request that has to wait in the queue, on the thread or task that
    reads the answer. If it raises, the request is cancelled and the reader gets the exception.
    """

    __slots__ = ()

    @classmethod
    def of(cls, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]) -> Request:
        """Return `prompt` as a request. Other arguments override the fields of a `Request`.

        Raises TypeError for an unknown parameter.
        """
        request = prompt if isinstance(prompt, Request) else cls(prompt=prompt)
        known = SAMPLING_FIELDS | REQUEST_FIELDS
        if unknown := sorted(params.keys() - known):
            raise TypeError(f"no such parameter: {', '.join(unknown)}; the parameters are {', '.join(sorted(known))}")
        chosen = {name: value for name, value in params.items() if name in SAMPLING_FIELDS}
        changes: dict[str, Any] = {name: value for name, value in params.items() if name not in SAMPLING_FIELDS}
        if sampling is not None:
            changes["sampling"] = sampling
        if chosen:
            base = sampling or request.sampling or Sampling()
            changes["sampling"] = base.replace(**chosen)
        return dataclasses.replace(request, **changes) if changes else request

    def to_proto(self, default_sampling: Sampling | None = None) -> pb.GenerateRequest:
        """Return the message. `default_sampling` fills the sampling fields that are None.

        Raises InvalidRequest if the message cannot hold a value. The error does not contain the value.
        """
        message = pb.GenerateRequest()
        _set_prompt(message, self.prompt)
        if message.HasField("chat"):
            if self.tools or self.tool_choice is not None:
                set_tools(message.chat, self.tools, self.tool_choice)
            for name in ("add_generation_prompt", "parallel_tool_calls"):
                set_field(message.chat, name, getattr(self, name), path=f"chat.{name}")
        elif given := [name for name in _CHAT_FIELDS if getattr(self, name) not in (None, (), [])]:
            raise InvalidRequest.at(given[0], "needs a list of chat messages as the prompt")
        sampling = _merged(self._with_format(), default_sampling)
        _set_sampling(message, sampling)
        for name in _SCALARS:
            set_field(message, name, getattr(self, name))
        for name in _OUTPUT_OPTIONS:
            set_field(message.output, name, getattr(self, name), path=f"output.{name}")
        if self.logprob_token_ids is not None:
            _extend(message.output.logprob_token_ids, self.logprob_token_ids, "output.logprob_token_ids")
        if (self.top_logprobs or message.output.logprob_token_ids) and self.logprobs is None:
            message.output.logprobs = True
        if self.on_queued is not None and self.queue_position is None:
            message.output.queue_position = True
        return message

    def _with_format(self) -> Sampling | None:
        if self.response_format is None:
            return self.sampling
        own = self.sampling or Sampling()
        if own.json_schema is not None:
            raise InvalidRequest.at("response_format", "must be unset with json_schema; give one")
        return own.replace(json_schema=schema_of(self.response_format))


_CHAT_FIELDS: Final = ("tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt")
_OUTPUT_OPTIONS: Final = tuple(
    name for name in pb.OutputOptions.DESCRIPTOR.fields_by_name if name != "logprob_token_ids"
)


def arrives_whole(sampling: sampling_pb2.SamplingParams) -> bool:
    """Return whether the outputs are chosen at the end. Such an answer is not resumed."""
    return sampling.num_beams > 1 or sampling.best_of > max(sampling.n, 1)


REQUEST_FIELDS: Final = frozenset(f.name for f in dataclasses.fields(Request)) - {"prompt", "sampling"}
_SCALARS: Final = tuple(name for name in pb.GenerateRequest.DESCRIPTOR.fields_by_name if name in REQUEST_FIELDS)


def tokenize_request(prompt: str | Sequence[ChatMessage] | Sequence[Mapping[str, Any]]) -> pb.TokenizeRequest:
    """Return the message of Tokenize. Raises InvalidRequest."""
    message = pb.TokenizeRequest()
    if isinstance(prompt, str):
        set_field(message, "text", prompt)
    else:
        _set_chat(message.chat, prompt)
    return message


def detokenize_request(token_ids: Sequence[int], keep_special_tokens: bool | None) -> pb.DetokenizeRequest:
    """Return the message of Detokenize. Raises InvalidRequest."""
    message = pb.DetokenizeRequest()
    _extend(message.token_ids, token_ids, "token_ids")
    set_field(message, "keep_special_tokens", keep_special_tokens)
    return message


def pairs(*sources: Metadata) -> tuple[tuple[str, str | bytes], ...]:
    """Return all metadata in order, with lower-case keys. Raises InvalidRequest if gRPC cannot send it."""
    found = []
    for source in sources:
        for name, value in source.items() if isinstance(source, Mapping) else source:
            key = name.lower()
            if not _KEY.fullmatch(key) or key.startswith("grpc-"):
                raise InvalidRequest.at(
                    "metadata", f"has the key {key!r}: keys are of [a-z0-9_.-] and do not begin with grpc-"
                )
            if key.endswith("-bin") != isinstance(value, bytes):
                raise InvalidRequest.at(
                    "metadata", f"has a value of {key!r} that is not what -bin says: with it bytes, else text"
                )
            if isinstance(value, str) and not _VALUE.fullmatch(value):
                raise InvalidRequest.at(
                    "metadata", f"has a value of {key!r} that is not printable ASCII; use a -bin key for bytes"
                )
            found.append((key, value))
    return tuple(found)


TENANT_KEY: Final = "x-tenant-id"


def of_tenant(metadata: tuple[tuple[str, str | bytes], ...], tenant: str) -> tuple[tuple[str, str | bytes], ...]:
    """Return `metadata` with that tenant and no other."""
    return pairs([pair for pair in metadata if pair[0] != TENANT_KEY], {TENANT_KEY: tenant})


TRACE_KEY: Final = "traceparent"


def traced(metadata: tuple[tuple[str, str | bytes], ...]) -> tuple[tuple[str, str | bytes], ...]:
    """Return `metadata` with the active span of OpenTelemetry, if the program uses it and names no trace itself."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or any(key == TRACE_KEY for key, _ in metadata):
        return metadata
    span = trace.get_current_span().get_span_context()
    if not span.is_valid:
        return metadata
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    state = span.trace_state.to_header()
    return (*metadata, (TRACE_KEY, parent), *((("tracestate", state),) if state else ()))


def authorized(metadata: Metadata, token: str | None) -> Metadata:
    """Return `metadata` with the token as a bearer token, if it is not None."""
    return metadata if token is None else (*pairs(metadata), ("authorization", f"Bearer {token}"))


_EARLY_STOPPING: Final[dict[bool | str, sampling_pb2.EarlyStopping.ValueType]] = {
    False: sampling_pb2.EARLY_STOPPING_HEURISTIC,
    True: sampling_pb2.EARLY_STOPPING_WHEN_FULL,
    "never": sampling_pb2.EARLY_STOPPING_NEVER,
}
_KEY = re.compile(r"[a-z0-9_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]*")


def _merged(sampling: Sampling | None, default: Sampling | None) -> Sampling:
    if default is None:
        return sampling or Sampling()
    own = sampling or Sampling()
    names = set(SAMPLING_FIELDS)
    if _has_form(own):
        names -= set(_FORMS)
    elif not _has_form(default):
        names -= set(_FORM_OPTIONS)  # as defaults they wait for a form
    return own.replace(**{name: getattr(default, name) for name in names if getattr(own, name) is None})


def _has_form(sampling: Sampling) -> bool:
    return any(getattr(sampling, name) is not None for name in _FORMS)


def _set_prompt(message: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        set_field(message, "text", prompt)
    elif is_chat(prompt):
        _set_chat(message.chat, prompt)
    elif _is_sequence(prompt):
        message.token_ids.SetInParent()  # the server rejects an empty list
        _extend(message.token_ids.ids, prompt, "token_ids.ids")
    else:
        raise InvalidRequest.at("prompt", "must be a text, a list of token ids or a list of chat messages")


def _is_sequence(prompt: object) -> bool:
    """Whether it has items in order: a list, or an array of any library."""
    if isinstance(prompt, bytes | bytearray | Mapping):
        return False
    return hasattr(prompt, "__getitem__") and hasattr(prompt, "__len__")


def _set_chat(chat: pb.ChatMessages, messages: Iterable[Any]) -> None:
    chat.SetInParent()
    if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
        raise InvalidRequest.at("prompt", "must be a text or a list of chat messages")
    for index, entry in enumerate(messages):
        set_message(chat.messages.add(), entry, f"chat.messages[{index}]")


def _set_sampling(message: pb.GenerateRequest, sampling: Sampling) -> None:
    params, stop = message.sampling, message.stop
    for name, field in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name.items():
        value = getattr(sampling, name) if name != "structured_output" else None
        if value is None:
            continue
        path = f"sampling.{name}"
        if name == "early_stopping":
            if value not in _EARLY_STOPPING:
                raise InvalidRequest.at(path, 'must be True, False or "never"')
            params.early_stopping = _EARLY_STOPPING[value]
        elif name == "logit_bias":
            if not isinstance(value, Mapping):
                raise InvalidRequest.at(path, "must be a mapping of token ids to numbers")
            for token_id, bias in value.items():
                entry = params.logit_bias.add()
                set_given(entry, "token_id", token_id, path=path)
                set_given(entry, "bias", bias, path=path)
        elif not field.has_presence:  # repeated
            _extend(getattr(params, name), value, path)
        else:
            set_field(params, name, value, path=path)
    strings = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop
    lists = {"strings": strings, "token_ids": sampling.stop_token_ids, "eos_token_ids": sampling.eos_token_ids}
    for name, values in lists.items():
        if values is not None:
            _extend(getattr(stop, name), values, f"stop.{name}")
    set_field(stop, "regex", sampling.stop_regex, path="stop.regex")
    set_field(stop, "include_stop_string", sampling.include_stop_string, path="stop.include_stop_string")
    if sampling.repetition_detection is not None:
        _set_repetition(stop.repetition_detection, sampling.repetition_detection)
    _set_form(params, sampling)


def _set_repetition(message: Any, value: RepetitionDetection | Mapping[str, int]) -> None:
    path = "stop.repetition_detection"
    given = dataclasses.asdict(value) if isinstance(value, RepetitionDetection) else value
    known = set(message.DESCRIPTOR.fields_by_name)
    if not isinstance(given, Mapping) or not given.keys() <= known:
        raise InvalidRequest.at(path, f"must be a RepetitionDetection or a mapping with {', '.join(sorted(known))}")
    message.SetInParent()
    for name, number in given.items():
        set_given(message, name, number, f"{path}.{name}")


_FORMS = ("json_schema", "json_object", "regex", "choice", "grammar")
_FORM_OPTIONS = ("json_whitespace", "constraint_start")
_WHITESPACE = {"compact": sampling_pb2.JSON_WHITESPACE_COMPACT, "any": sampling_pb2.JSON_WHITESPACE_ANY}


def _set_form(params: sampling_pb2.SamplingParams, sampling: Sampling) -> None:
    path = "sampling.structured_output"
    given = [name for name in _FORMS if getattr(sampling, name) is not None]
    if len(given) > 1:
        raise InvalidRequest.at(path, f"has {' and '.join(given)}; give one")
    if not given:
        for name in _FORM_OPTIONS:
            if getattr(sampling, name) is not None:
                raise InvalidRequest.at(f"{path}.{name}", f"needs one of {', '.join(_FORMS)}")
        return
    form, name = params.structured_output, given[0]
    value = getattr(sampling, name)
    if name == "choice":
        form.choice.SetInParent()
        _extend(form.choice.texts, value, f"{path}.choice.texts")
    else:
        set_field(form, name, json.dumps(value) if isinstance(value, Mapping) else value, path=f"{path}.{name}")
    if sampling.json_whitespace is not None:
        if sampling.json_whitespace not in _WHITESPACE:
            raise InvalidRequest.at(f"{path}.json_whitespace", "must be compact or any")
        form.json_whitespace = _WHITESPACE[sampling.json_whitespace]
    set_field(form, "constraint_start", sampling.constraint_start, path=f"{path}.constraint_start")


def _extend(field: Any, values: Any, path: str) -> None:
    wanted = "a list of texts" if path in _TEXT_LISTS else "a list of whole numbers from 0 to 2**32 - 1"
    if isinstance(values, str | bytes):
        raise InvalidRequest.at(path, f"must be {wanted}")
    try:
        values = list(values)
        if any(map(is_bool, set(map(type, values)))):  # protobuf would take True as 1
            raise TypeError
        field.extend(values)
    except UnicodeError:
        raise MalformedMessage.at(path, "is not valid Unicode") from None
    except (TypeError, ValueError):
        raise InvalidRequest.at(path, f"must be {wanted}") from None


_TEXT_LISTS = {"stop.strings", "sampling.structured_output.choice.texts"} | {
    f"sampling.{field.name}"
    for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields
    if field.type == field.TYPE_STRING
}
