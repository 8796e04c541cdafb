"""Score and Embed: their messages and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from lineclear.errors import InvalidRequest
from lineclear.v1 import inference_pb2 as pb

from .requests import Metadata, Request, Unset
from .results import TokenLogprobs, token_logprobs

TextOrIds: TypeAlias = str | Sequence[int]
PoolingName: TypeAlias = Literal["last_token", "mean"]


class PromptParams(TypedDict, total=False):
    """Keyword arguments of `score` and `embed`: fields of `Request`."""

    priority: int | None
    cache_salt: str | None
    model: str | None
    model_fingerprint: str | None
    adapter: str | None
    timeout_seconds: float | Unset | None
    tenant: str | None
    metadata: Metadata


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


def score_request(
    prompt: pb.GenerateRequest, continuations: Sequence[TextOrIds], top_logprobs: int | None
) -> pb.ScoreRequest:
    """Return the message of Score. Raises InvalidRequest."""
    message = pb.ScoreRequest(continuations=[pb.Continuation(**_part(x)) for x in _list(continuations)])
    if prompt.HasField("chat"):
        message.chat.CopyFrom(prompt.chat)
    elif prompt.HasField("token_ids"):
        message.token_ids.CopyFrom(prompt.token_ids)
    else:
        message.text = prompt.text
    if top_logprobs is not None:
        message.top_logprobs = top_logprobs
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
    message = pb.EmbedRequest(inputs=[pb.EmbedInput(**_part(x)) for x in _list(inputs)], pooling=kind)
    if normalize is not None:
        message.normalize = normalize
    if dimensions is not None:
        message.dimensions = dimensions
    _copy_fields(message, fields)
    return message


def scores_from(response: pb.ScoreResponse) -> Scores:
    """Return the result of Score."""
    scores = (
        ContinuationScore(tuple(x.token_ids), tuple(map(token_logprobs, x.logprobs)), x.total_logprob)
        for x in response.scores
    )
    return Scores(tuple(scores), response.prompt_tokens, response.cached_tokens, response.model_fingerprint)


def embeddings_from(response: pb.EmbedResponse) -> Embeddings:
    """Return the result of Embed."""
    vectors = tuple(tuple(x.values) for x in response.embeddings)
    return Embeddings(vectors, response.prompt_tokens, response.model_fingerprint)


def _list(values: Sequence[TextOrIds]) -> Sequence[TextOrIds]:
    if isinstance(values, str | bytes):
        raise InvalidRequest.at("prompt", "must be a list of texts or of lists of token ids")
    return values


def _part(value: TextOrIds) -> dict[str, Any]:
    message = Request(prompt=value).to_proto()
    return {"text": message.text} if isinstance(value, str) else {"token_ids": message.token_ids}


def _copy_fields(message: pb.ScoreRequest | pb.EmbedRequest, source: pb.GenerateRequest) -> None:
    for name in ("priority", "cache_salt", "model", "model_fingerprint", "adapter"):
        if source.HasField(name):
            setattr(message, name, getattr(source, name))
