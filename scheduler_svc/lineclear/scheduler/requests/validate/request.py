"""Validate GenerateRequest and convert it to a core Request.

All violations of a request are reported together, with the path of each field and never its value. `check` validates
everything but the length of the prompt, `resolve` the rest after tokenization.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from google.protobuf.duration_pb2 import Duration

from lineclear.errors import InvalidRequest, ModelChanged, PromptTooLong, TokenOutOfVocabulary, Violation
from lineclear.scheduler.core.sequence import Scoring
from lineclear.scheduler.requests.beam_search import BeamSettings
from lineclear.scheduler.requests.validate import branching, resume, tools
from lineclear.scheduler.requests.validate.form import check_forced, check_form
from lineclear.scheduler.requests.validate.sampling import check_allowed, end_ids, read_sampling, text_options
from lineclear.scheduler.requests.validate.tools import AnswerTools
from lineclear.scheduler.requests.validate.violations import (
    Rule,
    Violations,
    check_rules,
    check_vocabulary,
    checked_ids,
    checked_texts,
    given_fields,
)
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import sampling_pb2
from lineclear.wire.messages import Sampling

MAX_REQUEST_ID = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_BYTES = 128
MAX_BREAKERS = 16
MAX_BREAKER_BYTES = 64
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
MAX_PROMPT_LOGPROBS = 65536
MAX_PRIORITY = 255
MAX_SALT_CHARACTERS = 64
MAX_ROLE = 32
_MAX_DURATION_SECONDS = 315_576_000_000  # of google.protobuf.Duration: about 10,000 years

_NO_ENDS: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
_PROMPT_PATHS = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_REQUEST_ID}}}")
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,32}")

AT_LEAST_ONE = Rule(lambda value: value >= 1, "must be at least 1")
TOP_LOGPROBS = Rule(lambda value: value <= MAX_TOP_LOGPROBS, f"must be in [0, {MAX_TOP_LOGPROBS}]")
_RULES = {
    "request_id": Rule(
        lambda value: _REQUEST_ID.fullmatch(value) is not None, f"must be 1 to {MAX_REQUEST_ID} of [A-Za-z0-9._:-]"
    ),
    "priority": Rule(lambda value: value <= MAX_PRIORITY, f"must be in [0, {MAX_PRIORITY}]"),
    "cache_salt": Rule(
        lambda value: len(value) <= MAX_SALT_CHARACTERS, f"has more than {MAX_SALT_CHARACTERS} characters"
    ),
    "expected_tokens": AT_LEAST_ONE,
    "truncate_prompt_tokens": AT_LEAST_ONE,
}
_OUTPUT_RULES = {"top_logprobs": TOP_LOGPROBS, "prompt_logprobs": TOP_LOGPROBS}
_TEXTS = (
    ("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_BYTES),
    ("dry_sequence_breakers", MAX_BREAKERS, MAX_BREAKER_BYTES),
)
"""Lists of texts among the sampling parameters: how many, and bytes of each."""


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """Limits of a request: figures of the model, and settings."""

    context_length: int
    vocab_size: int
    settings: SchedulerSettings
    step_tokens: int
    """Most tokens of a step."""
    eos_ids: frozenset[int] = frozenset()
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Defaults from the model's generation_config.json."""
    model: str = ""
    """The served model name."""
    model_fingerprint: str = ""
    vocabulary: tuple[int, tuple[int, ...]] | None = None
    """`vocab_size` and the end-of-sequence ids, compared with those of the worker that runs the request."""


class ValidatedRequest(NamedTuple):
    """A valid request, except for the length of its prompt, and without what only its preparation reads."""

    request_id: str
    sampling: Sampling
    """Without what its texts and the form become once they are tokenized and compiled."""
    max_tokens: int | None
    fields: dict[str, Any]
    """Of the core's requests: those that do not depend on the prompt, but `sampling`."""
    is_prepared: bool
    """Nothing is text, and nothing is compiled or computed again: its submission does not wait."""
    wants_text: bool
    text_options: dict[str, Any]
    """The options of AnswerText."""
    token_timings: bool
    received: tuple[tuple[int, ...] | None, ...]
    """Tokens of each output that a resumed answer begins with; None for an output that is complete."""
    best_of: int
    """Number of candidates that the outputs are chosen from; 0: there are no others."""
    beams: BeamSettings | None
    """Settings of a beam search, without the number of tokens."""
    prompt_logprobs: int
    """-1: none. k >= 0: those of the prompt's tokens, and of the k most likely in their places."""
    tools: AnswerTools | None
    """None without a conversation."""
    echoes_prompt: bool

    @property
    def num_held(self) -> int:
        """Number of outputs that are kept to be chosen from at the end; 0 if each is delivered as it grows."""
        return self.best_of if self.beams is None else self.beams.num_beams


def check(request: pb.GenerateRequest, bounds: ModelBounds) -> ValidatedRequest:
    """Validate everything that does not depend on the tokens of the prompt.

    Raises InvalidRequest with all violations, or its subclass PromptTooLong or TokenOutOfVocabulary if all are of it.
    """
    violations = Violations()
    # What a request does not set is not looked at. Held: each access of a message would make it again.
    fields, params, output = given_fields(request), request.sampling, request.output
    given, has_resume = given_fields(params), "resume" in fields
    check_rules(fields, _RULES, violations)
    check_prompt(request, bounds, violations)
    named_ends = end_ids(request, bounds.vocab_size, violations) if "stop" in fields else _NO_ENDS
    stop_ids, own_eos_ids = named_ends
    eos_ids = frozenset() if params.ignore_eos else own_eos_ids or bounds.eos_ids
    sampling, max_tokens = _sampling(given, params, output, eos_ids | stop_ids, bounds, violations)
    answer_tools = tools.answer_tools(request.chat) if "chat" in fields else None
    has_form = "structured_output" in given
    if answer_tools is not None and answer_tools.is_call_forced:
        has_form = True
        check_forced(request, bool(sampling.stop_ids), bounds.settings.max_grammar_bytes, violations)
    received = _received(request, given.get("n", 1), sampling, bounds, violations)
    best_of, beams = 0, None
    if not branching.FIELDS.isdisjoint(given):
        best_of = branching.best_of(request, len(received), bounds.settings.max_outputs, violations)
        beams = branching.beams(request, len(received), eos_ids | stop_ids, bounds.vocab_size, violations)
    is_resumed = has_resume or "model_fingerprint" in fields
    model_fingerprint = resume.model_fingerprint(request, violations) if is_resumed else ""
    text_options = _text_options(request, sampling, has_form, violations)
    is_text = "token_ids" not in fields or "bad_words" in given or bool(sampling.dry_multiplier)
    violations.raise_if_any()
    return ValidatedRequest(
        request_id=request.request_id if "request_id" in fields else os.urandom(16).hex(),
        sampling=sampling,
        max_tokens=max_tokens,
        fields={
            "eos_ids": eos_ids,
            "stop_ids": stop_ids,
            "priority": fields.get("priority", 128),
            "wants_position": output.queue_position,
            "model_fingerprint": model_fingerprint,
            "vocabulary": bounds.vocabulary,
        },
        is_prepared=not (is_text or has_form or output.echo or any(received)),
        wants_text=not output.omit_text,
        text_options=text_options | {"silent_ids": stop_ids | own_eos_ids},
        token_timings=output.token_timings,
        received=received,
        best_of=best_of,
        beams=beams,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else -1,
        tools=answer_tools,
        echoes_prompt=output.echo and received[:1] == ((),),
    )


def resolve(
    validated: ValidatedRequest,
    message: pb.GenerateRequest,
    prompt: Sequence[int],
    digest: str,
    sampling: Sampling,
    bounds: ModelBounds,
) -> dict[str, Any]:
    """Return the fields of the core's requests that follow from the request alone. Their `scoring` is of the first.

    `digest` is that of the prompt; `sampling` is complete. Raises PromptTooLong if prompt and output exceed the
    context, InvalidRequest if the prompt has no token, min_tokens exceeds max_tokens or too much is held until the end,
    TokenOutOfVocabulary if the tokenizer does not fit the model, ModelChanged if a resumed prompt has other tokens.
    """
    if not prompt or max(prompt) >= bounds.vocab_size:
        raise _unusable(message, prompt)
    if message.HasField("resume") and message.resume.prompt_digest not in ("", digest):
        raise ModelChanged(
            "the prompt has other tokens on this server than at the start of the answer, so it cannot be resumed here; "
            "send a new request",
            metadata={"prompt_digest": digest, "expected_prompt_digest": message.resume.prompt_digest},
        )
    max_output, requested = bounds.context_length - len(prompt), validated.max_tokens
    if max_output < 1 or (requested is not None and requested > max_output):
        raise _too_long(_prompt_path(message), len(prompt), requested, bounds.context_length)
    max_tokens = min(bounds.settings.default_max_tokens, max_output) if requested is None else requested
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest.at("sampling.min_tokens", f"must be in [0, max_tokens], which is {max_tokens} here")
    if any(validated.received):
        resume.check_length(validated.received, max_tokens)
    if validated.num_held:
        branching.check_held(
            validated.num_held, validated.beams is not None, max_tokens, bounds.settings.max_held_tokens
        )
    scoring = None if validated.prompt_logprobs < 0 else _scoring(validated.prompt_logprobs, len(prompt))
    own = {"prompt": tuple(prompt), "sampling": sampling, "max_tokens": max_tokens, "scoring": scoring}
    return validated.fields | own


def check_echo(text: str, bounds: ModelBounds) -> None:
    """Raises PromptTooLong for the text of a prompt that is too long to be sent."""
    violations = Violations()
    check_text_size("output.echo", [text], bounds.settings.max_prompt_bytes, violations)
    violations.raise_if_any()


def check_tokenize(request: pb.TokenizeRequest, settings: SchedulerSettings) -> None:
    """Raises InvalidRequest or PromptTooLong for an invalid request."""
    violations = Violations()
    kind = request.WhichOneof("input")
    if kind is None:
        violations.add("input", "is missing: set text or chat")
    elif kind == "text":
        check_text_size("text", [request.text], settings.max_prompt_bytes, violations)
    else:
        _check_chat(request.chat, settings, violations)
    violations.raise_if_any()


def check_roles(chat: pb.ChatMessages, knows_role: Callable[[str], bool]) -> None:
    """Raises InvalidRequest for roles that the chat template does not accept."""
    violations = Violations()
    roles = [message.role for message in chat.messages]
    unknown = {role for role in set(roles) if not knows_role(role)}
    for index, role in enumerate(roles) if unknown else ():
        if role in unknown:
            violations.add(f"chat.messages[{index}].role", "is not a role of the model's chat template")
    violations.raise_if_any()


def check_detokenize(request: pb.DetokenizeRequest, max_tokens: int) -> None:
    """Raises InvalidRequest for too many tokens. `check_token_ids` validates the tokens themselves."""
    violations = Violations()
    if len(request.token_ids) > max_tokens:
        violations.add("token_ids", f"has more than {max_tokens} entries")
    violations.raise_if_any()


def check_token_ids(ids: Sequence[int], start: int, vocab_size: int) -> None:
    """Raises TokenOutOfVocabulary. `start` is the index of `ids[0]` in the request's `token_ids`."""
    violations = Violations()
    check_vocabulary("token_ids", ids, vocab_size, violations, start)
    violations.raise_if_any()


def seconds(duration: Duration, path: str) -> float:
    """Convert a Duration to seconds, which may be negative. Raises InvalidRequest for an invalid Duration."""
    whole, nanos = duration.seconds, duration.nanos
    if abs(whole) > _MAX_DURATION_SECONDS or abs(nanos) > 999_999_999 or whole * nanos < 0:
        raise InvalidRequest.at(
            path,
            f"is no valid Duration; send seconds in ±{_MAX_DURATION_SECONDS} and nanos in ±999999999 of the same sign",
        )
    return whole + nanos / 1e9


def _prompt_path(request: pb.GenerateRequest) -> str:
    return _PROMPT_PATHS.get(request.WhichOneof("prompt") or "", "prompt")


def check_prompt(request: pb.GenerateRequest, bounds: ModelBounds, violations: Violations) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        violations.add("prompt", "is missing: set text, token_ids or chat")
    elif kind == "text":
        if not request.text:
            violations.add("text", "is empty")
        check_text_size("text", [request.text], bounds.settings.max_prompt_bytes, violations)
    elif kind == "chat":
        _check_chat(request.chat, bounds.settings, violations)
    else:
        ids = request.token_ids.ids
        if not ids:
            violations.add("token_ids.ids", "is empty")
        elif min(len(ids), request.truncate_prompt_tokens or len(ids)) >= bounds.context_length:
            description = f"has {len(ids)} tokens; the context is {bounds.context_length}, and output needs one"
            figures = {"prompt_tokens": len(ids), "context_length": bounds.context_length}
            violations.add("token_ids.ids", description, PromptTooLong, **figures)
        else:
            check_vocabulary("token_ids.ids", ids, bounds.vocab_size, violations)


def _check_chat(chat: pb.ChatMessages, settings: SchedulerSettings, violations: Violations) -> None:
    if not chat.messages:
        violations.add("chat.messages", "is empty")
    limit = settings.max_chat_messages
    if len(chat.messages) > limit:
        violations.add("chat.messages", f"has {len(chat.messages)} entries, the limit is {limit}")
        return
    roles = [message.role for message in chat.messages]
    invalid = {role for role in set(roles) if not _ROLE.fullmatch(role)}
    for index, role in enumerate(roles) if invalid else ():
        if role in invalid:
            violations.add(f"chat.messages[{index}].role", f"must be 1 to {MAX_ROLE} of [A-Za-z0-9_.-]")
    messages = tools.with_more_than_content(chat)
    check_text_size("chat.messages", tools.texts(chat, messages), settings.max_prompt_bytes, violations)
    tools.check_tools("chat", chat, messages, violations)


def check_text_size(path: str, texts: Iterable[str], max_bytes: int, violations: Violations) -> None:
    """Add a violation if the texts together have more than `max_bytes`."""
    size = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    if size > max_bytes:
        description = f"has {size} bytes, the limit is {max_bytes}"
        violations.add(path, description, PromptTooLong, prompt_bytes=size, max_prompt_bytes=max_bytes)


def _sampling(
    given: Mapping[str, Any],
    params: sampling_pb2.SamplingParams,
    output: pb.OutputOptions,
    ends: frozenset[int],
    bounds: ModelBounds,
    violations: Violations,
) -> tuple[Sampling, int | None]:
    """Return the sampling parameters, and max_tokens if it is set. `ends` are the tokens that end the answer."""
    values, max_tokens = read_sampling(given, bounds.vocab_size, bounds.context_length, bounds.defaults, violations)
    options = given_fields(output)
    check_rules(options, _OUTPUT_RULES, violations, "output.")
    if output.echo and output.omit_text:
        violations.add("output.echo", "must be false with output.omit_text")
    for name, value in (("top_logprobs", "0"), ("logprob_token_ids", "empty")):
        if options.get(name) and options.get("logprobs") is False:
            violations.add(f"output.{name}", f"must be {value} when logprobs is false")
    ids = options.get("logprob_token_ids", ())
    ids = checked_ids("output.logprob_token_ids", ids, MAX_LOGPROB_IDS, bounds.vocab_size, violations)
    values["logprobs"] = output.top_logprobs if output.logprobs or output.top_logprobs > 0 or ids else -1
    values["logprob_ids"] = ids
    for name, max_count, max_bytes in _TEXTS:
        checked_texts(f"sampling.{name}", given.get(name, ()), max_count, max_bytes, violations)
    if "structured_output" in given:
        values["grammar_start"] = check_form(params, bool(ends), bounds.settings.max_grammar_bytes, violations)
    sampling = Sampling(**values, stop_ids=tuple(sorted(ends)))
    check_allowed(sampling, ends, bounds.vocab_size, violations)
    return sampling, max_tokens


def _text_options(
    request: pb.GenerateRequest, sampling: Sampling, has_form: bool, violations: Violations
) -> dict[str, Any]:
    """Return the options of AnswerText, but the tokens without text."""
    output = request.output
    return {
        **(text_options(request.stop, violations) if request.HasField("stop") else {}),
        "min_tokens": sampling.min_tokens,
        "keep_special": output.keep_special_tokens,
        # Grammars do not know the rule for the start of a text. An answer behind its prompt is no start.
        "is_start": not output.echo and (bool(sampling.grammar_start) or not has_form),
    }


def _received(
    request: pb.GenerateRequest, num_outputs: int, sampling: Sampling, bounds: ModelBounds, violations: Violations
) -> tuple[tuple[int, ...] | None, ...]:
    if not 1 <= num_outputs <= bounds.settings.max_outputs:
        violations.add("sampling.n", f"must be in [1, {bounds.settings.max_outputs}], as --max-outputs says")
        num_outputs = 1
    if not request.HasField("resume"):
        return ((),) * num_outputs
    return resume.received(request, num_outputs, sampling, bounds.context_length, bounds.vocab_size, violations)


def _scoring(num_top: int, prompt_len: int) -> Scoring | None:
    entries = prompt_len * (num_top + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        description = f"asks for {entries} log-probabilities, the limit is {MAX_PROMPT_LOGPROBS}; ask for fewer"
        raise InvalidRequest.at("output.prompt_logprobs", description)
    return Scoring(0, num_top) if prompt_len > 1 else None


def _unusable(message: pb.GenerateRequest, prompt: Sequence[int]) -> InvalidRequest:
    path = _prompt_path(message)
    if not prompt:
        return InvalidRequest.at(path, "has no tokens")
    description = "the tokenizer produced a token that is not in the model's vocabulary"
    return TokenOutOfVocabulary(description, violations=[Violation(path, description)])


def _too_long(path: str, prompt_tokens: int, max_tokens: int | None, context_length: int) -> PromptTooLong:
    figures = {"prompt_tokens": str(prompt_tokens), "context_length": str(context_length)}
    if max_tokens is None or prompt_tokens >= context_length:
        output = "output needs one more"
    else:
        path, output = "sampling.max_tokens", f"max_tokens is {max_tokens}"
        figures["max_tokens"] = str(max_tokens)
    description = f"the prompt has {prompt_tokens} tokens and {output}; the context is {context_length}"
    return PromptTooLong(description, violations=[Violation(path, description)], metadata=figures)
