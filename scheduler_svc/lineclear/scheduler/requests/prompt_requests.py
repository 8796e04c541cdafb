"""Requests without output: the scores and vectors that Score and Embed return.

Each continuation or input is a request of its own, admitted and cancelled as those of Generate. All take places in the
queue's limits at once, but few wait in the engine at a time: a call that comes later waits for those, not for all.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from lineclear.errors import InvalidRequest, PromptTooLong, Violation
from lineclear.scheduler.core.sequence import Scoring
from lineclear.scheduler.requests.admission import Admission
from lineclear.scheduler.requests.logprob_messages import encoded_score
from lineclear.scheduler.requests.output_stream import OutputStream
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.requests.services import Call
from lineclear.scheduler.requests.validate import request as validation
from lineclear.scheduler.requests.validate.request import AT_LEAST_ONE, TOP_LOGPROBS, ModelBounds
from lineclear.scheduler.requests.validate.tools import is_forced
from lineclear.scheduler.requests.validate.violations import Violations, check_rules, check_vocabulary, given_fields
from lineclear.v1 import inference_pb2 as pb
from lineclear.wire.messages import Pooling, PoolingKind

MAX_PARTS = 128
"""Continuations or inputs of one call."""
_POOLING = {
    pb.POOLING_UNSPECIFIED: PoolingKind.LAST,
    pb.POOLING_LAST_TOKEN: PoolingKind.LAST,
    pb.POOLING_MEAN: PoolingKind.MEAN,
}

_RULES = {"top_logprobs": TOP_LOGPROBS, "truncate_prompt_tokens": AT_LEAST_ONE, "dimensions": AT_LEAST_ONE}

_STEPS_AHEAD = 3
"""Steps that the parts of a call in the engine fill: the two in flight, and the next."""

_NO_OUTPUT: Mapping[str, Any] = {"max_tokens": 0, "expected_tokens": 0, "max_drafts": 0}


class _Part(NamedTuple):
    """The tokens of one request, the fields of the core that ask for results, and the path of its input.

    `num_new` is the number of tokens that other parts do not begin with.
    """

    tokens: Sequence[int]
    asks: dict[str, Any]
    path: str
    num_new: int


async def score(request: pb.ScoreRequest, admission: Admission, call: Call) -> bytes:
    """Return the scores of the continuations of a prompt, as an encoded ScoreResponse."""
    tokenizers = admission.services.tokenizers
    _check_score(request, call.bounds)
    prompt = _truncated(list(await tokenizers.ids(_prompt_of(request))), request)
    if not prompt:
        raise InvalidRequest.at(request.WhichOneof("prompt") or "prompt", "has no tokens")
    num_top = request.top_logprobs
    parts = []
    for index, continuation in enumerate(request.continuations):
        tokens = await tokens_of(continuation, tokenizers.encode_continuation)
        asks = {**_NO_OUTPUT, "scoring": Scoring(len(prompt) - 1, num_top)}
        parts.append(_Part([*prompt, *tokens], asks, f"continuations[{index}]", len(tokens)))
        if not tokens:
            raise InvalidRequest.at(f"continuations[{index}]", "has no tokens")
    response = pb.ScoreResponse(prompt_tokens=len(prompt))
    scores = []
    for part, (output, model) in zip(parts, await _run(parts, request, admission, call), strict=True):
        scores.append(await encoded_score(part.tokens[len(prompt) :], output.scores, admission.services.pacer))
        assert output.started is not None
        response.cached_tokens += output.started.cached_tokens
        response.model_fingerprint = model
    return b"".join((*scores, response.SerializeToString()))


async def embed(request: pb.EmbedRequest, admission: Admission, call: Call) -> pb.EmbedResponse:
    _check_embed(request, call.bounds)
    normalize = request.normalize if request.HasField("normalize") else True
    asks = {**_NO_OUTPUT, "pooling": Pooling(_POOLING[request.pooling], request.dimensions, normalize)}
    parts = []
    for index, entry in enumerate(request.inputs):
        tokens = _truncated(await tokens_of(entry, admission.services.tokenizers.encode), request)
        parts.append(_Part(tokens, asks, f"inputs[{index}]", len(tokens)))
        if not tokens:
            raise InvalidRequest.at(f"inputs[{index}]", "has no tokens")
    response = pb.EmbedResponse()
    for part, (output, model) in zip(parts, await _run(parts, request, admission, call), strict=True):
        values = array("f", output.vector)
        if len(values) < request.dimensions:
            raise InvalidRequest.at("dimensions", f"must be in [1, {len(values)}], the model's hidden size")
        response.embeddings.add(values=values, prompt_tokens=len(part.tokens))
        response.prompt_tokens += len(part.tokens)
        response.model_fingerprint = model
    return response


async def _run(
    parts: Sequence[_Part], request: pb.ScoreRequest | pb.EmbedRequest, admission: Admission, call: Call
) -> list[tuple[OutputStream, str]]:
    """Run a request for each part; return their complete outputs, and the fingerprint of the model of each.

    Cancels all if one fails, or the call ends.
    """
    for part in parts:
        if len(part.tokens) >= call.bounds.context_length:
            raise _too_long(part, call.bounds.context_length)
    with ExitStack() as stack:
        live: list[tuple[RequestContext, pb.GenerateRequest, _Part]] = []
        for part in parts:
            message = _message(part, request)
            await admission.pace(message)
            context = stack.enter_context(admission.admit(message, call))
            context.queue_place.add_tokens(len(part.tokens))
            live.append((context, message, part))
            await asyncio.sleep(0)  # 128 of them take 100 ms
        num_complete = tokens_ahead = 0
        for number, (context, message, part) in enumerate(live):
            tokens_ahead += part.num_new
            while num_complete < number and tokens_ahead > _STEPS_AHEAD * call.bounds.step_tokens:
                await _complete(live[num_complete][0])
                tokens_ahead -= live[num_complete][2].num_new
                num_complete += 1
            await context.submit(message, **part.asks, is_sibling=number > 0)
            await asyncio.sleep(0)
        for context, _, _ in live[num_complete:]:
            await _complete(context)
        return [(context.outputs[0], _fingerprint(context)) for context, _, _ in live]


def _fingerprint(context: RequestContext) -> str:
    started = context.outputs[0].started
    assert started is not None
    return context.fingerprint(started.model_fingerprint)


async def _complete(context: RequestContext) -> None:
    """Wait for the end of a request without output. Raises its error."""
    while True:
        await context.wait()
        chunk = context.outputs[0].read_nowait()
        if chunk.error is not None:
            raise chunk.error
        if chunk.end is not None:
            context.end_output(chunk.end.reason)
            context.close()
            return


def _message(part: _Part, request: pb.ScoreRequest | pb.EmbedRequest) -> pb.GenerateRequest:
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=part.tokens), output=pb.OutputOptions(omit_text=True))
    for name in ("priority", "cache_salt", "model", "model_fingerprint", "adapter"):
        if request.HasField(name):
            setattr(message, name, getattr(request, name))
    return message


def _prompt_of(request: pb.ScoreRequest) -> pb.GenerateRequest:
    prompt = pb.GenerateRequest(truncate_prompt_tokens=request.truncate_prompt_tokens)
    kind = request.WhichOneof("prompt")
    if kind == "text":
        prompt.text = request.text
    elif kind == "chat":
        prompt.chat.CopyFrom(request.chat)
    elif kind == "token_ids":
        prompt.token_ids.CopyFrom(request.token_ids)
    return prompt


def _truncated(tokens: Sequence[int], request: pb.ScoreRequest | pb.EmbedRequest) -> Sequence[int]:
    """Return the last tokens of a prompt that the request keeps."""
    return tokens[-request.truncate_prompt_tokens :] if request.truncate_prompt_tokens else tokens


async def tokens_of(
    entry: pb.Continuation | pb.EmbedInput, encode: Callable[[str], Awaitable[list[int]]]
) -> Sequence[int]:
    if entry.HasField("token_ids"):
        return entry.token_ids.ids
    await asyncio.sleep(0)  # `encode` tokenizes a short text at once, and a call may have 128
    return await encode(entry.text)


def _check_score(request: pb.ScoreRequest, bounds: ModelBounds) -> None:
    violations = Violations()
    validation.check_prompt(_prompt_of(request), bounds, violations)
    check_rules(given_fields(request), _RULES, violations)
    if is_forced(request.chat):
        violations.add("chat.tool_choice", "must not force a call: Score generates no answer")
    if request.chat.HasField("parallel_tool_calls"):
        violations.add("chat.parallel_tool_calls", "must be unset: Score generates no answer")
    _check_parts("continuations", request.continuations, "continuation", bounds, violations)
    violations.raise_if_any()


def _check_embed(request: pb.EmbedRequest, bounds: ModelBounds) -> None:
    violations = Violations()
    if request.pooling not in _POOLING:
        violations.add("pooling", "is not one of the known values")
    check_rules(given_fields(request), _RULES, violations)
    if request.dimensions > 2**31 - 1:
        violations.add("dimensions", "is larger than any model's hidden size")
    _check_parts("inputs", request.inputs, "input", bounds, violations)
    violations.raise_if_any()


def _check_parts(path: str, parts: Sequence[Any], name: str, bounds: ModelBounds, violations: Violations) -> None:
    if not 1 <= len(parts) <= MAX_PARTS:
        violations.add(path, f"must have 1 to {MAX_PARTS} entries")
        return
    texts = []
    for index, part in enumerate(parts):
        kind = part.WhichOneof(name)
        if kind is None or (kind == "text" and not part.text):
            violations.add(f"{path}[{index}]", "is empty: set text or token_ids")
        elif kind == "text":
            texts.append(part.text)
        elif not part.token_ids.ids:
            violations.add(f"{path}[{index}].token_ids.ids", "is empty")
        else:
            check_vocabulary(f"{path}[{index}].token_ids.ids", part.token_ids.ids, bounds.vocab_size, violations)
    validation.check_text_size(path, texts, bounds.settings.max_prompt_bytes, violations)


def _too_long(part: _Part, context_length: int) -> PromptTooLong:
    description = f"has {len(part.tokens)} tokens, with its prompt; the limit is {context_length - 1}"
    figures = {"prompt_tokens": str(len(part.tokens)), "context_length": str(context_length)}
    return PromptTooLong(f"{part.path} {description}", violations=[Violation(part.path, description)], metadata=figures)
