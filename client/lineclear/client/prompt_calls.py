"""Score and Embed: their messages and results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, cast, get_args

from lineclear.errors import InvalidRequest
from lineclear.v1 import inference_pb2 as pb

from .call_params import Params
from .chat_messages import Tool
from .message_fields import set_field
from .parameters import Metadata, Prompt, Unset
from .requests import Request
from .results import TokenLogprobs, token_logprobs

TextOrIds: TypeAlias = str | Sequence[int]
ScoreItem: TypeAlias = tuple[Prompt, Sequence[TextOrIds]]
"""A prompt and its continuations."""
PoolingName: TypeAlias = Literal["last_token", "mean"]


class EmbedParams(TypedDict, total=False):
    """Keyword arguments of `embed`: fields of `Request`. `truncate_prompt_tokens` is that of each input."""

    truncate_prompt_tokens: int | None
    priority: int | None
    cache_salt: str | None
    model: str | None
    model_fingerprint: str | None
    adapter: str | None
    timeout_seconds: float | Unset | None
    tenant: str | None
    metadata: Metadata


class ScoreParams(EmbedParams, total=False):
    """Keyword arguments of `score`: fields of `Request`. The last two are of conversations."""

    add_generation_prompt: bool | None
    tools: Sequence[Tool] | None


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """The log-probabilities of one continuation. `total_logprob` is the sum of those of its tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    total_logprob: float


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of the continuations of one prompt, in their order.

    `cached_tokens`: prompt tokens that continuations found in the prefix cache, summed over all of them.
    """

    scores: tuple[ContinuationScore, ...]
    prompt_tokens: int
    cached_tokens: int
    model_fingerprint: str

    @property
    def best(self) -> int:
        """The index of the most probable continuation."""
        return max(range(len(self.scores)), key=lambda index: self.scores[index].total_logprob)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of inputs, in their order. `prompt_tokens`: tokens of all inputs."""

    vectors: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    model_fingerprint: str


def of_call(method: str, kind: type[EmbedParams], prompt: Any, params: EmbedParams) -> Params:
    """Return the parameters of `score` or `embed`. Raises TypeError for one that it does not use."""
    if isinstance(prompt, Request):
        raise TypeError(f"{method}() takes no Request; give the prompt and the parameters by themselves")
    if unknown := sorted(params.keys() - kind.__annotations__.keys()):
        known = ", ".join(sorted(kind.__annotations__))
        raise TypeError(f"{method}() has no parameter {', '.join(unknown)}; it has {known}")
    return cast("Params", params)


def score_request(
    prompt: pb.GenerateRequest, continuations: Sequence[TextOrIds], top_logprobs: int | None
) -> pb.ScoreRequest:
    """Return the message of Score. Raises InvalidRequest."""
    parts = _parts("continuations", continuations)
    message = pb.ScoreRequest(continuations=[pb.Continuation(**part) for part in parts])
    if prompt.HasField("chat"):
        message.chat.CopyFrom(prompt.chat)
    elif prompt.HasField("token_ids"):
        message.token_ids.CopyFrom(prompt.token_ids)
    else:
        message.text = prompt.text
    set_field(message, "top_logprobs", top_logprobs)
    _copy_fields(message, prompt)
    return message


def embed_request(
    inputs: Sequence[TextOrIds],
    fields: pb.GenerateRequest,
    pooling: PoolingName,
    normalize: bool | None,
    dimensions: int | None,
) -> pb.EmbedRequest:
    """Return the message of Embed. `fields` has its other fields. Raises InvalidRequest."""
    if pooling not in get_args(PoolingName):
        raise InvalidRequest.at("pooling", f"must be one of {', '.join(get_args(PoolingName))}")
    kind = pb.Pooling.Value(f"POOLING_{pooling.upper()}")
    message = pb.EmbedRequest(inputs=[pb.EmbedInput(**part) for part in _parts("inputs", inputs)], pooling=kind)
    set_field(message, "normalize", normalize)
    set_field(message, "dimensions", dimensions)
    _copy_fields(message, fields)
    return message


def scores_from(response: pb.ScoreResponse) -> Scores:
    scores = (
        ContinuationScore(tuple(x.token_ids), tuple(map(token_logprobs, x.logprobs)), x.total_logprob)
        for x in response.scores
    )
    return Scores(tuple(scores), response.prompt_tokens, response.cached_tokens, response.model_fingerprint)


def embeddings_from(response: pb.EmbedResponse) -> Embeddings:
    vectors = tuple(tuple(x.values) for x in response.embeddings)
    return Embeddings(vectors, response.prompt_tokens, response.model_fingerprint)


def _parts(path: str, values: Iterable[TextOrIds]) -> list[dict[str, Any]]:
    """Return the fields of each text or list of token ids. Raises InvalidRequest."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidRequest.at(path, "must be a list of texts or of lists of token ids")
    parts = []
    for index, value in enumerate(values):
        try:
            message = Request(prompt=value).to_proto()
        except InvalidRequest as error:
            raise type(error).at(f"{path}[{index}]", error.violations[0].description) from None
        if message.HasField("chat"):
            raise InvalidRequest.at(f"{path}[{index}]", "must be a text or a list of token ids")
        parts.append({"text": message.text} if isinstance(value, str) else {"token_ids": message.token_ids})
    return parts


def _copy_fields(message: Any, source: Any) -> None:
    """Set the fields of a prompt that both messages have."""
    for name in _SHARED & set(message.DESCRIPTOR.fields_by_name):
        if source.HasField(name):
            setattr(message, name, getattr(source, name))


_SHARED = set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - {"text", "token_ids", "chat"}
