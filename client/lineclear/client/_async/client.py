"""The client of one lineclear server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack, cast, overload

from lineclear.errors import DuplicateRequest
from lineclear.v1 import inference_pb2 as pb

from .. import rpc_methods
from ..batch_window import ALL_AT_ONCE, AsyncItems, BatchWindow, ScoreBatchParams, ScoreOutcome, checked_window
from ..call_params import Params
from ..call_settings import submit_request, submittable
from ..chat_messages import ChatMessage
from ..concurrency import AsyncCancellable
from ..message_classes import Stats
from ..message_fields import filled
from ..parameters import UNSET, Metadata, OnQueued, Prompt, Sampling, Unset
from ..prompt_calls import (
    Embeddings,
    EmbedParams,
    PoolingName,
    ScoreItem,
    ScoreParams,
    Scores,
    TextOrIds,
    embed_request,
    embeddings_from,
    of_call,
    score_request,
    scores_from,
)
from ..requests import Request, detokenize_request, pairs, tokenize_request
from ..results import Generation, HealthStatus, Queued, SubmittedStatus, from_proto, queued_from_proto, submitted_status
from ..rpc_methods import Pairs
from .answer_stream import AsyncStream
from .batches import AsyncBatches, all_of, outcome_alone
from .connection import AsyncConnection


class AsyncSubmitted:
    """A submitted request: the server generates the answer with or without a reader, and keeps it for a while.

    Another process finds it by its `request_id`: `client.submitted(request_id)`.
    """

    def __init__(
        self, connection: AsyncConnection, request_id: str, metadata: Pairs, queued: Queued | None = None
    ) -> None:
        self.request_id = request_id
        self.queued = queued
        """Its place in the queue on arrival, if it waited and `queue_position=True` was given to `submit`."""
        self._connection = connection
        self._metadata = metadata

    def __repr__(self) -> str:
        return f"AsyncSubmitted({self.request_id!r})"

    def attach(
        self, from_index: int = 0, *, timeout_seconds: float | None = None, on_queued: OnQueued | None = None
    ) -> AsyncStream:
        """Stream the answer from token `from_index` on. Leaving the stream does not cancel the request.

        `on_queued` is called at once with the request's place on arrival if it waits and asked for that in `submit`.
        """
        config = self._connection._config
        options = config.attaching(self.request_id, from_index, self._metadata, timeout_seconds, on_queued)
        return AsyncStream(self._connection._transport, options)

    async def result(self, *, timeout_seconds: float | None = None) -> Generation:
        """Wait for the complete answer. Raises the LineclearError that the request ended with."""
        return await self.attach(timeout_seconds=timeout_seconds).read_all()

    async def poll(self, *, timeout_seconds: float | Unset | None = UNSET) -> SubmittedStatus:
        """Return the state and the answer so far. Raises UnknownRequest if the server does not have the request."""
        request = filled(pb.GetResultRequest(), request_id=self.request_id)
        found = await self._connection._unary(rpc_methods.GET_RESULT, request, timeout_seconds, self._metadata)
        return submitted_status(found)

    async def cancel(self, *, index: int | None = None, timeout_seconds: float | Unset | None = UNSET) -> bool:
        """Cancel the request or drop its answer, or cancel one output. Returns False if the server does not have it."""
        request = filled(pb.CancelRequest(), request_id=self.request_id, index=index)
        return (await self._connection._unary(rpc_methods.CANCEL, request, timeout_seconds, self._metadata)).found


class AsyncClient(AsyncBatches):
    """A client of one server, for any number of tasks of one event loop. Close it, or use it as a context manager.

        async with AsyncClient("127.0.0.1:50051") as client:
            answer = await client.generate("Once upon a time", max_tokens=64)

    Args:
        target: `host:port` or `unix:/path`. Default: the environment variable LINECLEAR_TARGET, or 127.0.0.1:50051.
        credentials: of `grpc.ssl_channel_credentials`; switches TLS on.
        token: sent with every call to a server that requires one. Without TLS it travels as plain text.
        metadata: key-value pairs sent with every call.
        timeout_seconds: deadline of a generating call, retries included. With None the server applies its own,
            `model().limits.default_deadline_seconds` (600 s by default).
        max_attempts: how often a call that the server did not accept is tried. Short for `retry=RetryPolicy(...)`.
        retry: the policy of retries and resumes.
        sampling: defaults for the sampling parameters that a call leaves open.
        options: gRPC channel options; they override those of this library.
        sessions: whether requests that run at the same time share one stream, which costs the server less. Default:
            if `target` is the address of a single server, not a host name.
        on_model_change: what happens to an answer whose model is replaced during generation. "error" raises
            ModelChanged with the answer so far; "restart" generates a new answer (see `Delta.restarted`).
        transport: replaces gRPC, as `lineclear.client.testing.FakeTransport` does.

    Every call raises a LineclearError if it fails, and RuntimeError after `close`.
    """

    async def submit(
        self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> AsyncSubmitted:
        """Submit a request and return once it is queued. The server generates the answer without a reader.

        `timeout_seconds` is the deadline of the answer, not of this call.
        """
        options = self._config.outgoing(submittable(prompt, sampling, **params))
        request = submit_request(options)
        queued = None
        try:
            answer = await self._unary(rpc_methods.SUBMIT, request, UNSET, options.metadata)
            queued = queued_from_proto(answer.queued) if answer.HasField("queued") else None
        except DuplicateRequest:
            if options.has_own_id:
                raise
            # The id is random: an earlier attempt of this call did arrive.
        return AsyncSubmitted(self, request.request.request_id, options.metadata, queued)

    def submitted(self, request_id: str, *, metadata: Metadata | None = None) -> AsyncSubmitted:
        """Return the request that this or another client submitted. Makes no call."""
        return AsyncSubmitted(self, request_id, self._config.metadata if metadata is None else pairs(metadata))

    async def cancel(
        self, request_id: str, *, index: int | None = None, timeout_seconds: float | Unset | None = UNSET
    ) -> bool:
        """Cancel a request of this client or of another one with the same token. Returns False for an unknown one.

        `request_id` is that of the request, or of `Started`. The reader of the answer gets Cancelled. A submitted
        request that has ended is deleted. With `index` that output alone is cancelled, and the others continue.
        """
        return await self.submitted(request_id).cancel(index=index, timeout_seconds=timeout_seconds)

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[TextOrIds],
        *,
        top_logprobs: int | None = None,
        **params: Unpack[ScoreParams],
    ) -> Scores:
        """Return the log-probability of each token of each continuation of `prompt`.

        A text that continues the prompt is tokenized by itself. `top_logprobs`: also those of this many most likely
        tokens in the place of each token. `params` are fields of `Request`. Raises TypeError for one that has no
        meaning for a score.
        """
        options = self._config.outgoing(prompt, **of_call("score", ScoreParams, prompt, params))
        request = score_request(cast("pb.GenerateRequest", options.message), continuations, top_logprobs)
        return scores_from(await self._unary(rpc_methods.SCORE, request, options.timeout_seconds, options.metadata))

    @overload
    async def score_batch(
        self,
        items: AsyncItems[ScoreItem],
        *,
        return_exceptions: Literal[False] = False,
        **params: Unpack[ScoreBatchParams],
    ) -> list[Scores]: ...
    @overload
    async def score_batch(
        self, items: AsyncItems[ScoreItem], *, return_exceptions: bool, **params: Unpack[ScoreBatchParams]
    ) -> list[ScoreOutcome]: ...
    async def score_batch(
        self, items: AsyncItems[ScoreItem], *, return_exceptions: bool = False, **params: Unpack[ScoreBatchParams]
    ) -> list[Scores] | list[ScoreOutcome]:
        """Return the scores of many prompts, in the order of `items`: pairs of a prompt and its continuations.

        Errors, `concurrency` and `progress` are as in `generate_batch`, the other `params` as in `score`.
        """
        checked_window(params.get("concurrency"), None)
        window = BatchWindow(items, ALL_AT_ONCE, return_exceptions)

        def open_call(item: ScoreItem) -> AsyncCancellable[Scores]:
            return AsyncCancellable(lambda: self.score(*item, **of_score))

        results = self._batch(window, open_call, outcome_alone, params)
        of_score = cast("ScoreParams", params)  # what _batch leaves
        return await all_of(results)

    async def embed(
        self,
        inputs: Sequence[TextOrIds],
        *,
        pooling: PoolingName = "last_token",
        normalize: bool | None = None,
        dimensions: int | None = None,
        **params: Unpack[EmbedParams],
    ) -> Embeddings:
        """Return a vector for each of `inputs`, texts or lists of token ids: its pooled last hidden states.

        `normalize`: scale vectors to length 1, by default true. `dimensions`: keep the leading ones. `params` are
        fields of `Request`. Raises TypeError for one that has no meaning for a vector.
        """
        options = self._config.outgoing("", **of_call("embed", EmbedParams, inputs, params))
        fields = cast("pb.GenerateRequest", options.message)
        request = embed_request(inputs, fields, pooling, normalize, dimensions)
        return embeddings_from(await self._unary(rpc_methods.EMBED, request, options.timeout_seconds, options.metadata))

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage] | Sequence[dict[str, str]],
        *,
        timeout_seconds: float | Unset | None = UNSET,
    ) -> list[int]:
        """Return the token ids of a text or of chat messages, as `generate` makes them."""
        return list((await self._unary(rpc_methods.TOKENIZE, tokenize_request(prompt), timeout_seconds)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool | None = None,
        timeout_seconds: float | Unset | None = UNSET,
    ) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        request = detokenize_request(token_ids, keep_special_tokens)
        return (await self._unary(rpc_methods.DETOKENIZE, request, timeout_seconds)).text

    async def stats(self, *, timeout_seconds: float | Unset | None = UNSET) -> Stats:
        """Return the statistics of the server."""
        answer = await self._unary(rpc_methods.GET_STATS, pb.GetStatsRequest(), timeout_seconds)
        return from_proto(Stats, answer)

    async def health(
        self, service: str = rpc_methods.SERVICE, *, timeout_seconds: float | Unset | None = UNSET
    ) -> HealthStatus:
        """Return the health of `service`; "" is the server process. Raises Unreachable if no server answers."""
        return await self._unary(rpc_methods.HEALTH, service, timeout_seconds)
