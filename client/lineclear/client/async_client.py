"""The client for asyncio. The same calls as `sync`, awaited; an AsyncClient belongs to one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack, overload

import grpc

from lineclear.errors import DuplicateRequest, LineclearError
from lineclear.v1 import inference_pb2 as pb

from . import rpc_methods
from .answer_stream import AsyncStream
from .batch_window import ALL_AT_ONCE, OrderedWindow, Outcome, checked_concurrency
from .batch_workers import AsyncBatchWorkers
from .call_settings import DEFAULT_TIMEOUT_SECONDS, client_config
from .channel import Options, Pairs, default_target
from .progress import Progress, display
from .requests import (
    UNSET,
    ChatMessage,
    Metadata,
    OnModelChange,
    Params,
    Prompt,
    Request,
    Sampling,
    Unset,
    authorized,
    detokenize_request,
    pairs,
    tokenize_request,
)
from .results import Generation, HealthStatus, Model, Stats, from_proto
from .retry import RetryPolicy
from .submitted import SubmittedStatus, snapshot, submission
from .transport import AioTransport, AsyncTransport

Req = TypeVar("Req")
Res = TypeVar("Res")


class AsyncSubmitted:
    """A submitted request: the server makes the answer whether or not anybody listens, and keeps it for a while.

    Another process finds it by `request_id`: `client.submitted(request_id)`.
    """

    def __init__(self, client: AsyncClient, request_id: str, metadata: Pairs) -> None:
        self.request_id = request_id
        self._client = client
        self._metadata = metadata

    def __repr__(self) -> str:
        return f"AsyncSubmitted({self.request_id!r})"

    def attach(self, from_index: int = 0, *, timeout_seconds: float | None = None) -> AsyncStream:
        """The answer from that token on, as far as it is there and then as it is made. Leaving it changes nothing."""
        settings = self._client._settings
        outgoing = settings.attaching(self.request_id, from_index, self._metadata, timeout_seconds)
        return AsyncStream(self._client._transport, outgoing)

    async def result(self, *, timeout_seconds: float | None = None) -> Generation:
        """The whole answer, waited for. Raises the LineclearError the request ended with."""
        return await self.attach(timeout_seconds=timeout_seconds).read_all()

    async def poll(self, *, timeout_seconds: float | Unset | None = UNSET) -> SubmittedStatus:
        """What there is of the answer now. Raises UnknownRequest where nothing is kept (any more)."""
        request = pb.GetResultRequest(request_id=self.request_id)
        return snapshot(await self._client._unary(rpc_methods.GET_RESULT, request, timeout_seconds, self._metadata))

    async def cancel(self, *, timeout_seconds: float | Unset | None = UNSET) -> bool:
        """End it, or forget its answer. Whether there was anything."""
        request = pb.CancelRequest(request_id=self.request_id)
        return (await self._client._unary(rpc_methods.CANCEL, request, timeout_seconds, self._metadata)).found


class AsyncClient:
    """Speaks to one lineclear server from an event loop. The arguments are those of `Client`."""

    def __init__(
        self,
        target: str | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        metadata: Metadata = (),
        timeout_seconds: float | None = DEFAULT_TIMEOUT_SECONDS,
        max_attempts: int | None = None,
        retry: RetryPolicy | None = None,
        sampling: Sampling | None = None,
        options: Options = (),
        sessions: bool | None = None,
        on_model_change: OnModelChange = "error",
        transport: AsyncTransport | None = None,
    ) -> None:
        own = authorized(metadata, token)
        self._settings = client_config(timeout_seconds, max_attempts, retry, own, sampling, on_model_change)
        self._transport = transport or AioTransport(
            default_target() if target is None else target, credentials, options, sessions
        )

    @property
    def target(self) -> str:
        return self._transport.target

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is running and disconnect."""
        await self._transport.close_async()

    def stream(
        self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> AsyncStream:
        """The answer piece by piece; see `AsyncStream`. Parameters are those of `Sampling` and of `Request`."""
        return AsyncStream(self._transport, self._settings.outgoing(prompt, sampling, **params))

    async def generate(
        self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> Generation:
        """The whole answer. Raises the LineclearError the call ended with."""
        return await self.stream(prompt, sampling, **params).read_all()

    @overload
    def generate_each(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int = 32,
        window: int | None = None,
        return_exceptions: Literal[False],
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> AsyncGenerator[Generation, None]: ...
    @overload
    def generate_each(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int = 32,
        window: int | None = None,
        return_exceptions: bool = True,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> AsyncGenerator[Outcome, None]: ...
    async def generate_each(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int = 32,
        window: int | None = None,
        return_exceptions: bool = True,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> AsyncGenerator[Outcome, None]:
        """Answers in the order of the prompts, each as soon as it and all before it are there.

        As `Client.generate_each`. Where a loop over it may end early, wrap it in `contextlib.aclosing`, so that the
        rest is cancelled at once.
        """
        batch = OrderedWindow(prompts, checked_concurrency(concurrency, window), return_exceptions)
        async with contextlib.aclosing(self._each(batch, concurrency, progress, sampling, params)) as outcomes:
            async for outcome in outcomes:
                yield outcome

    @overload
    async def generate_many(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int = 32,
        return_exceptions: Literal[False] = False,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> list[Generation]: ...
    @overload
    async def generate_many(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int = 32,
        return_exceptions: bool,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> list[Outcome]: ...
    async def generate_many(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int = 32,
        return_exceptions: bool = False,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> list[Generation] | list[Outcome]:
        """All answers, in the order of the prompts, `concurrency` at a time. As `Client.generate_many`."""
        checked_concurrency(concurrency, None)
        batch = OrderedWindow(prompts, ALL_AT_ONCE, return_exceptions)
        return [outcome async for outcome in self._each(batch, concurrency, progress, sampling, params)]

    async def submit(
        self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> AsyncSubmitted:
        """Begin an answer and leave it to the server; see `AsyncSubmitted`.

        The answer may take `timeout_seconds`; the call itself returns when the request is in the queue.
        """
        outgoing = self._settings.outgoing(prompt, sampling, **params)
        request = submission(outgoing)
        try:
            await self._unary(rpc_methods.SUBMIT, request, UNSET, outgoing.metadata)
        except DuplicateRequest:
            # The name is ours alone where the caller gave none: then an earlier attempt did arrive.
            if outgoing.names_itself:
                raise
        return self.submitted(request.request.request_id, metadata=outgoing.metadata)

    def submitted(self, request_id: str, *, metadata: Metadata | None = None) -> AsyncSubmitted:
        """A request that was submitted, by this client or another one. Asks nobody."""
        return AsyncSubmitted(self, request_id, self._settings.metadata if metadata is None else pairs(metadata))

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage] | Sequence[dict[str, str]],
        *,
        timeout_seconds: float | Unset | None = UNSET,
    ) -> list[int]:
        """The token ids `generate` would make of this."""
        return list((await self._unary(rpc_methods.TOKENIZE, tokenize_request(prompt), timeout_seconds)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool | None = None,
        timeout_seconds: float | Unset | None = UNSET,
    ) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        request = detokenize_request(token_ids, keep_special_tokens)
        return (await self._unary(rpc_methods.DETOKENIZE, request, timeout_seconds)).text

    async def model(self, *, timeout_seconds: float | Unset | None = UNSET) -> Model:
        """What is served, and within which limits."""
        answer = await self._unary(rpc_methods.GET_MODEL, pb.GetModelRequest(), timeout_seconds)
        return from_proto(Model, answer)

    async def stats(self, *, timeout_seconds: float | Unset | None = UNSET) -> Stats:
        """What the server is doing and how it has been doing."""
        answer = await self._unary(rpc_methods.GET_STATS, pb.GetStatsRequest(), timeout_seconds)
        return from_proto(Stats, answer)

    async def health(
        self, service: str = rpc_methods.SERVICE, *, timeout_seconds: float | Unset | None = UNSET
    ) -> HealthStatus:
        """What the server says of `service` ("" is the process as a whole). Raises Unreachable if nobody answers."""
        return await self._unary(rpc_methods.HEALTH, service, timeout_seconds)

    async def _unary(
        self,
        method: rpc_methods.Method[Req, Res],
        request: Req,
        timeout_seconds: float | Unset | None,
        metadata: Pairs | None = None,
    ) -> Res:
        attempts = self._settings.short(timeout_seconds)
        own = self._settings.metadata if metadata is None else metadata
        while True:
            try:
                return await self._transport.unary_async(
                    method, request, timeout_seconds=attempts.begin(), metadata=own
                )
            except LineclearError as error:
                if error.code in method.meanings:
                    return method.meanings[error.code]
                await asyncio.sleep(attempts.pause_after(error))

    def _each(
        self,
        batch: OrderedWindow[Prompt | Request],
        concurrency: int,
        progress: Progress,
        sampling: Sampling | None,
        params: Params,
    ) -> AsyncGenerator[Outcome, None]:
        async def run(prompt: Prompt | Request) -> Generation:
            return await self.generate(prompt, sampling, **params)

        return AsyncBatchWorkers(batch, concurrency, run).outcomes(display(progress))
