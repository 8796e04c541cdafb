"""Requests as they came to requests the core can trust. Every bound that the .proto files state is held here.

All that is wrong with a request is said at once, with the path of each field and never its value. Two stages, because
tokenizing is work: `check` looks at everything but the prompt's length, `resolve` at the rest. Nothing here tokenizes,
waits or knows the engine.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.duration_pb2 import Duration

from lineclear.errors import InvalidRequest, ModelChanged, ModelNotFound, PromptTooLong, TokenOutOfVocabulary, Violation
from lineclear.scheduler.core.sequence import Request
from lineclear.scheduler.requests.sampling_ranges import BIAS_RANGE, DEFAULTS, PARAMETERS
from lineclear.scheduler.text.stop_strings import StopStrings
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2
from lineclear.wire.messages import Sampling

MAX_REQUEST_ID = 64
MAX_STOP_STRINGS = 8
MAX_STOP_STRING_BYTES = 64
MAX_STOP_IDS = 16
MAX_LOGIT_BIAS = 300
MAX_ID_LIST = 4096
MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 255
MAX_SALT_CHARACTERS = 64
MAX_ROLE = 32
_MAX_DURATION_SECONDS = 315_576_000_000  # of google.protobuf.Duration: about 10,000 years
_MAX_VIOLATIONS = 16  # the status travels in a header, which has a size limit

_PROMPT_PATHS = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}
MAX_FINGERPRINT = 64
_MAX_CHAT_TIME_US = 253_402_300_800_000_000  # the year 10000
_FINGERPRINT = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_FINGERPRINT}}}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,32}")


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """What requests are held to: the model's figures and the settings that matter here."""

    context_length: int
    vocab_size: int
    max_prompt_bytes: int
    default_max_tokens: int
    max_chat_messages: int = 1024
    eos_ids: frozenset[int] = frozenset()
    defaults: Mapping[str, float] = field(default_factory=dict)
    """From the model's generation_config.json."""
    model: str = ""
    """The name that the model is served under."""
    model_fingerprint: str = ""
    vocabulary: tuple[int, tuple[int, ...]] | None = None
    """`vocab_size` and the end-of-sequence ids, to be compared with those of the worker that runs the request."""


@dataclass(frozen=True, slots=True)
class ValidatedRequest:
    """A request without fault but for the length of its prompt. `sampling` lacks what depends on that."""

    request_id: str
    prompt_path: str
    sampling: Sampling
    max_tokens: int | None
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    stops: StopStrings | None
    include_stop_string: bool
    priority: int
    wants_text: bool
    keep_special: bool
    token_timings: bool
    received: tuple[int, ...] = ()
    """Of an answer that goes on here."""
    model_fingerprint: str = ""
    """Of the model that must answer; empty: any."""
    prompt_digest: str = ""
    """Of the prompt that an answer began with; empty: not compared."""


class _Violations:
    """What is wrong, collected. `kinds` are the error classes that single faults would have."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.kinds: set[type[InvalidRequest]] = set()
        self.metadata: dict[str, str] = {}

    def add(self, path: str, description: str, kind: type[InvalidRequest] = InvalidRequest, **figures: int) -> None:
        self.violations.append(Violation(path, description))
        self.kinds.add(kind)
        self.metadata.update({name: str(figure) for name, figure in figures.items()})

    def raise_if_any(self) -> None:
        """Raise the most special class that fits all."""
        if not self.violations:
            return
        kind = next(iter(self.kinds)) if len(self.kinds) == 1 else InvalidRequest
        count = len(self.violations)
        first = self.violations[0]
        message = f"{first.field}: {first.description}" + (f" (and {count - 1} more)" if count > 1 else "")
        raise kind(message, violations=self.violations[:_MAX_VIOLATIONS], metadata=self.metadata)


def check(request: pb.GenerateRequest, bounds: ModelBounds) -> ValidatedRequest:
    """Everything about a request that can be known before its prompt is tokenized.

    Raises InvalidRequest (PromptTooLong, TokenOutOfVocabulary) with every violation there is.
    """
    faults = _Violations()
    label = _label(request, faults)
    _check_prompt(request, bounds, faults)
    sampling, max_tokens = _sampling(request.sampling, bounds, faults)
    stop_ids = frozenset(_ids("stop.token_ids", request.stop.token_ids, MAX_STOP_IDS, bounds.vocab_size, faults))
    strings = _stop_strings(request.stop.strings, faults)
    eos_ids = frozenset() if request.sampling.ignore_eos else bounds.eos_ids
    _check_choice(sampling, eos_ids | stop_ids, bounds.vocab_size, faults)
    logprobs = _logprobs(request.output, faults)
    received = _received(request, sampling, eos_ids | stop_ids, bounds, faults)
    model_fingerprint = _model_fingerprint(request, faults)
    priority = request.priority if request.HasField("priority") else 128
    if priority > MAX_PRIORITY:
        faults.add("priority", f"must be in [0, {MAX_PRIORITY}]")
    if len(request.cache_salt) > MAX_SALT_CHARACTERS:
        faults.add("cache_salt", f"has more than {MAX_SALT_CHARACTERS} characters")
    faults.raise_if_any()
    return ValidatedRequest(
        request_id=label,
        prompt_path=_PROMPT_PATHS.get(request.WhichOneof("prompt") or "", "prompt"),
        sampling=replace(sampling, stop_ids=tuple(sorted(eos_ids | stop_ids)), logprobs=logprobs),
        max_tokens=max_tokens,
        eos_ids=eos_ids,
        stop_ids=stop_ids,
        stops=StopStrings(strings) if strings else None,
        include_stop_string=request.stop.include_stop_string,
        priority=priority,
        wants_text=not request.output.omit_text,
        keep_special=request.output.keep_special_tokens,
        token_timings=request.output.token_timings,
        received=received,
        model_fingerprint=model_fingerprint,
        prompt_digest=request.resume.prompt_digest,
    )


def check_model(request: pb.GenerateRequest, checked: ValidatedRequest, bounds: ModelBounds) -> None:
    """Raises ModelNotFound or ModelChanged for a request that another model has to answer."""
    if request.HasField("model") and request.model != bounds.model:
        raise ModelNotFound(f"the model served here is {bounds.model}, not the one that `model` names")
    wanted = checked.model_fingerprint
    if wanted and wanted != bounds.model_fingerprint:
        raise ModelChanged(
            f"the model served here is {bounds.model_fingerprint}, the request is for {wanted}; what was received of "
            "its answer is right for that model, and a whole answer of the new one needs a new request",
            metadata={"model_fingerprint": bounds.model_fingerprint, "expected_model_fingerprint": wanted},
        )


def check_prompt(checked: ValidatedRequest, digest: str) -> None:
    """Raises ModelChanged where the prompt of an answer that goes on has other tokens than it began with."""
    if checked.prompt_digest not in ("", digest):
        raise ModelChanged(
            "this server makes other tokens of the prompt than the answer began with, so the answer cannot go on here; "
            "a whole answer needs a new request",
            metadata={"prompt_digest": digest, "expected_prompt_digest": checked.prompt_digest},
        )


def resolve(
    checked: ValidatedRequest, key: str, prompt: Sequence[int], deadline: float | None, bounds: ModelBounds
) -> Request:
    """The request for the core, under the name `key`.

    Raises PromptTooLong if prompt and output do not fit the context, InvalidRequest if the prompt gave no token or
    min_tokens cannot be reached, TokenOutOfVocabulary if the tokenizer is not the model's.
    """
    if not prompt:
        raise InvalidRequest.at(checked.prompt_path, "has no tokens")
    if max(prompt) >= bounds.vocab_size:
        description = "the tokenizer gave a token that the model does not have"
        raise TokenOutOfVocabulary(description, violations=[Violation(checked.prompt_path, description)])
    room = bounds.context_length - len(prompt)
    wanted = checked.max_tokens
    if room < 1 or (wanted is not None and wanted > room):
        raise _too_long(checked.prompt_path, len(prompt), wanted, bounds.context_length)
    max_tokens = min(bounds.default_max_tokens, room) if wanted is None else wanted
    if checked.sampling.min_tokens > max_tokens:
        raise InvalidRequest.at("sampling.min_tokens", f"must be in [0, max_tokens], which is {max_tokens} here")
    if len(checked.received) > max_tokens:
        raise InvalidRequest.at("resume.token_ids", f"has more entries than max_tokens, which is {max_tokens} here")
    return Request(
        request_id=key,
        prompt=tuple(prompt),
        sampling=checked.sampling,
        max_tokens=max_tokens,
        eos_ids=checked.eos_ids,
        stop_ids=checked.stop_ids,
        priority=checked.priority,
        deadline=deadline,
        output=checked.received,
        model_fingerprint=checked.model_fingerprint,
        vocabulary=bounds.vocabulary,
    )


def check_tokenize(request: pb.TokenizeRequest, max_prompt_bytes: int, max_chat_messages: int) -> None:
    """Raises InvalidRequest or PromptTooLong for a wrong request."""
    faults = _Violations()
    kind = request.WhichOneof("input")
    if kind is None:
        faults.add("input", "is missing: set text or chat")
    elif kind == "text":
        _check_text_size("text", [request.text], max_prompt_bytes, faults)
    else:
        _check_chat("chat", request.chat, max_prompt_bytes, max_chat_messages, faults)
    faults.raise_if_any()


def check_roles(chat: pb.ChatMessages, knows_role: Callable[[str], bool]) -> None:
    """Raises InvalidRequest for roles that the model's template does not know."""
    faults = _Violations()
    roles = [message.role for message in chat.messages]
    unknown = {role for role in set(roles) if not knows_role(role)}
    for index, role in enumerate(roles) if unknown else ():
        if role in unknown:
            faults.add(f"chat.messages[{index}].role", "is not a role that the model's chat template knows")
    faults.raise_if_any()


def check_detokenize(request: pb.DetokenizeRequest, max_tokens: int) -> None:
    """Raises InvalidRequest for too many tokens. `check_token_ids` is for the tokens, a slice at a time."""
    faults = _Violations()
    if len(request.token_ids) > max_tokens:
        faults.add("token_ids", f"has more than {max_tokens} entries")
    faults.raise_if_any()


def check_token_ids(ids: Sequence[int], start: int, vocab_size: int) -> None:
    """Raises TokenOutOfVocabulary. `start` is the index of the first of `ids` in the request's `token_ids`."""
    faults = _Violations()
    _check_vocabulary("token_ids", ids, vocab_size, faults, start)
    faults.raise_if_any()


# --- parts of a request ----------------------------------------------------------------------------------------------


def seconds(duration: Duration, path: str) -> float:
    """Return a Duration in seconds; it may be negative. Raises InvalidRequest if it breaks the rules of its type."""
    whole, nanos = duration.seconds, duration.nanos
    if abs(whole) > _MAX_DURATION_SECONDS or abs(nanos) > 999_999_999 or whole * nanos < 0:
        raise InvalidRequest.at(
            path,
            f"is no valid Duration: seconds within ±{_MAX_DURATION_SECONDS}, nanos within ±999999999, of the same sign",
        )
    return whole + nanos / 1e9


def _label(request: pb.GenerateRequest, faults: _Violations) -> str:
    if not request.HasField("request_id"):
        return secrets.token_hex(16)
    if not _REQUEST_ID.fullmatch(request.request_id):
        faults.add("request_id", f"must be 1 to {MAX_REQUEST_ID} of [A-Za-z0-9._:-]")
    return request.request_id


def _check_prompt(request: pb.GenerateRequest, bounds: ModelBounds, faults: _Violations) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        faults.add("prompt", "is missing: set text, token_ids or chat")
    elif kind == "text":
        if not request.text:
            faults.add("text", "is empty")
        _check_text_size("text", [request.text], bounds.max_prompt_bytes, faults)
    elif kind == "chat":
        _check_chat("chat", request.chat, bounds.max_prompt_bytes, bounds.max_chat_messages, faults)
    else:
        ids = request.token_ids.ids
        if not ids:
            faults.add("token_ids.ids", "is empty")
        elif len(ids) >= bounds.context_length:
            description = f"has {len(ids)} tokens; the context is {bounds.context_length}, and output needs one"
            figures = {"prompt_tokens": len(ids), "context_length": bounds.context_length}
            faults.add("token_ids.ids", description, PromptTooLong, **figures)
        else:
            _check_vocabulary("token_ids.ids", ids, bounds.vocab_size, faults)


def _check_chat(path: str, chat: pb.ChatMessages, max_bytes: int, max_messages: int, faults: _Violations) -> None:
    if not chat.messages:
        faults.add(f"{path}.messages", "is empty")
    if len(chat.messages) > max_messages:
        faults.add(f"{path}.messages", f"has {len(chat.messages)} entries, the limit is {max_messages}")
        return
    roles = [message.role for message in chat.messages]
    wrong = {role for role in set(roles) if not _ROLE.fullmatch(role)}
    for index, role in enumerate(roles) if wrong else ():
        if role in wrong:
            faults.add(f"{path}.messages[{index}].role", f"must be 1 to {MAX_ROLE} of [A-Za-z0-9_.-]")
    _check_text_size(f"{path}.messages", [m.content for m in chat.messages], max_bytes, faults)


def _check_text_size(path: str, texts: Iterable[str], max_bytes: int, faults: _Violations) -> None:
    size = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    if size > max_bytes:
        description = f"has {size} bytes, the limit is {max_bytes}"
        faults.add(path, description, PromptTooLong, prompt_bytes=size, max_prompt_bytes=max_bytes)


def _sampling(
    params: sampling_pb2.SamplingParams, bounds: ModelBounds, faults: _Violations
) -> tuple[Sampling, int | None]:
    vocab = bounds.vocab_size
    values: dict[str, Any] = {**DEFAULTS, **bounds.defaults}
    for name, parameter in PARAMETERS.items():
        if params.HasField(name):  # type: ignore[arg-type]  # one of the fields' names
            values[name] = getattr(params, name)
            if values[name] not in parameter.range:
                faults.add(f"sampling.{name}", f"must be {parameter.range}")
    if params.top_k > vocab:
        faults.add("sampling.top_k", f"must be in [0, vocabulary], which is {vocab}")
    values["top_k"] = min(values["top_k"], vocab)
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    if max_tokens == 0:
        faults.add("sampling.max_tokens", "must be at least 1")
    elif max_tokens is not None and max_tokens >= bounds.context_length:
        description = f"must leave room for a prompt in the context of {bounds.context_length} tokens"
        faults.add("sampling.max_tokens", description, PromptTooLong, context_length=bounds.context_length)
    limit = bounds.context_length if max_tokens is None else max_tokens
    if params.min_tokens > limit:
        faults.add("sampling.min_tokens", "must be in [0, max_tokens]")
    sampling = Sampling(
        **values,
        logit_bias=_logit_bias(params.logit_bias, vocab, faults),
        allowed_ids=_ids("sampling.allowed_token_ids", params.allowed_token_ids, MAX_ID_LIST, vocab, faults),
        banned_ids=_ids("sampling.banned_token_ids", params.banned_token_ids, MAX_ID_LIST, vocab, faults),
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        min_tokens=params.min_tokens,
    )
    return sampling, max_tokens


def _logit_bias(
    entries: Sequence[sampling_pb2.LogitBias], vocab_size: int, faults: _Violations
) -> tuple[tuple[int, float], ...]:
    path = "sampling.logit_bias"
    if len(entries) > MAX_LOGIT_BIAS:
        faults.add(path, f"has more than {MAX_LOGIT_BIAS} entries")
        return ()
    seen: set[int] = set()
    for index, entry in enumerate(entries):
        if entry.token_id >= vocab_size:
            _add_out_of_vocabulary(f"{path}[{index}].token_id", vocab_size, faults)
        elif entry.token_id in seen:
            faults.add(f"{path}[{index}].token_id", "is the token of an earlier entry")
        seen.add(entry.token_id)
        if entry.bias not in BIAS_RANGE:
            faults.add(f"{path}[{index}].bias", f"must be {BIAS_RANGE}")
    return tuple((entry.token_id, entry.bias) for entry in entries)


def _ids(path: str, ids: Sequence[int], limit: int, vocab_size: int, faults: _Violations) -> tuple[int, ...]:
    if len(ids) > limit:
        faults.add(path, f"has more than {limit} entries")
        return ()
    _check_vocabulary(path, ids, vocab_size, faults)
    return tuple(ids)


def _check_vocabulary(path: str, ids: Sequence[int], vocab_size: int, faults: _Violations, start: int = 0) -> None:
    if not ids or max(ids) < vocab_size:
        return
    index = next(index for index, token_id in enumerate(ids, start) if token_id >= vocab_size)
    _add_out_of_vocabulary(f"{path}[{index}]", vocab_size, faults)


def _add_out_of_vocabulary(path: str, vocab_size: int, faults: _Violations) -> None:
    description = f"must be in [0, vocabulary), which is {vocab_size}"
    faults.add(path, description, TokenOutOfVocabulary, vocab_size=vocab_size)


def _check_choice(sampling: Sampling, stop_ids: frozenset[int], vocab_size: int, faults: _Violations) -> None:
    """Some token must be left to sample, also while stop tokens are not allowed yet."""
    banned = set(sampling.banned_ids) | (stop_ids if sampling.min_tokens > 0 else set())
    if sampling.allowed_ids:
        if banned.issuperset(sampling.allowed_ids):
            faults.add("sampling.allowed_token_ids", "leaves no token to sample, after bans and min_tokens")
    elif len(banned) >= vocab_size:
        faults.add("sampling.banned_token_ids", "leaves no token to sample")


def _received(
    request: pb.GenerateRequest, sampling: Sampling, ends: frozenset[int], bounds: ModelBounds, faults: _Violations
) -> tuple[int, ...]:
    if not request.HasField("resume"):
        return ()
    if sampling.temperature != 0 and not request.sampling.HasField("seed"):
        faults.add("sampling.seed", "is missing: without the one that Started told, the answer would be another")
    received = _ids("resume.token_ids", request.resume.token_ids, bounds.context_length, bounds.vocab_size, faults)
    if not ends.isdisjoint(received[sampling.min_tokens : -1]):
        faults.add("resume.token_ids", "goes on after a token that ends the answer")
    return received


def _model_fingerprint(request: pb.GenerateRequest, faults: _Violations) -> str:
    named = [("model_fingerprint", request.model_fingerprint)] if request.HasField("model_fingerprint") else []
    if request.HasField("resume"):
        named.append(("resume.model_fingerprint", request.resume.model_fingerprint))
        if len(request.resume.prompt_digest) > MAX_FINGERPRINT or not request.resume.prompt_digest.isascii():
            faults.add("resume.prompt_digest", "must be what Started told")
        if not 0 <= request.resume.chat_time_us < _MAX_CHAT_TIME_US:
            faults.add("resume.chat_time_us", "must be what Started told")
    for path, value in named:
        if not _FINGERPRINT.fullmatch(value):
            missing = "is missing: without the one that Started told, another model could go on"
            faults.add(path, "must be what GetModel and Started tell" if value else missing)
    if len({value for _, value in named}) > 1:
        faults.add("model_fingerprint", "is another one than that of resume")
    return named[-1][1] if named else ""


def _stop_strings(strings: Sequence[str], faults: _Violations) -> tuple[str, ...]:
    if len(strings) > MAX_STOP_STRINGS:
        faults.add("stop.strings", f"has more than {MAX_STOP_STRINGS} entries")
        return ()
    for index, string in enumerate(strings):
        if not 1 <= len(string.encode()) <= MAX_STOP_STRING_BYTES:
            faults.add(f"stop.strings[{index}]", f"must have 1 to {MAX_STOP_STRING_BYTES} bytes")
    return tuple(strings)


def _logprobs(output: pb.OutputOptions, faults: _Violations) -> int:
    if output.top_logprobs > MAX_TOP_LOGPROBS:
        faults.add("output.top_logprobs", f"must be in [0, {MAX_TOP_LOGPROBS}]")
    if output.top_logprobs > 0 and output.HasField("logprobs") and not output.logprobs:
        faults.add("output.top_logprobs", "must be 0 when logprobs is false")
    return output.top_logprobs if output.logprobs or output.top_logprobs > 0 else -1


# --- errors ----------------------------------------------------------------------------------------------------------


def _too_long(path: str, prompt_tokens: int, max_tokens: int | None, context_length: int) -> PromptTooLong:
    figures = {"prompt_tokens": str(prompt_tokens), "context_length": str(context_length)}
    if max_tokens is None or prompt_tokens >= context_length:
        output = "output needs one more"
    else:
        path, output = "sampling.max_tokens", f"max_tokens is {max_tokens}"
        figures["max_tokens"] = str(max_tokens)
    description = f"the prompt has {prompt_tokens} tokens and {output}; the context is {context_length}"
    return PromptTooLong(description, violations=[Violation(path, description)], metadata=figures)
