"""The client for threads: every call blocks its caller, and one Client may serve many threads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar, Unpack, overload

import grpc

from lineclear.errors import DuplicateRequest, LineclearError
from lineclear.v1 import inference_pb2 as pb

from . import rpc_methods, sigint
from .answer_stream import Stream
from .batch_window import ALL_AT_ONCE, OrderedWindow, Outcome, checked_concurrency
from .batch_workers import BatchResults, BatchWorkers
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
from .transport import GrpcTransport, Transport

Req = TypeVar("Req")
Res = TypeVar("Res")


class Submitted:
    """A submitted request: the server makes the answer whether or not anybody listens, and keeps it for a while.

    Another process finds it by `request_id`: `client.submitted(request_id)`.
    """

    def __init__(self, client: Client, request_id: str, metadata: Pairs) -> None:
        self.request_id = request_id
        self._client = client
        self._metadata = metadata

    def __repr__(self) -> str:
        return f"Submitted({self.request_id!r})"

    def attach(self, from_index: int = 0, *, timeout_seconds: float | None = None) -> Stream:
        """The answer from that token on, as far as it is there and then as it is made. Leaving it changes nothing."""
        settings = self._client._settings
        outgoing = settings.attaching(self.request_id, from_index, self._metadata, timeout_seconds)
        return Stream(self._client._transport, outgoing)

    def result(self, *, timeout_seconds: float | None = None) -> Generation:
        """The whole answer, waited for. Raises the LineclearError the request ended with."""
        return self.attach(timeout_seconds=timeout_seconds).read_all()

    def poll(self, *, timeout_seconds: float | Unset | None = UNSET) -> SubmittedStatus:
        """What there is of the answer now. Raises UnknownRequest where nothing is kept (any more)."""
        request = pb.GetResultRequest(request_id=self.request_id)
        return snapshot(self._client._unary(rpc_methods.GET_RESULT, request, timeout_seconds, self._metadata))

    def cancel(self, *, timeout_seconds: float | Unset | None = UNSET) -> bool:
        """End it, or forget its answer. Whether there was anything."""
        request = pb.CancelRequest(request_id=self.request_id)
        return self._client._unary(rpc_methods.CANCEL, request, timeout_seconds, self._metadata).found


class Client:
    """Speaks to one lineclear server. Close it, or use it as a context manager.

    `target` is host:port or unix:/path; None is what LINECLEAR_TARGET says, or else 127.0.0.1:50051.
    `credentials` (of `grpc.ssl_channel_credentials`) switches TLS on.
    `token` is shown with every call to servers that ask for one; without TLS whoever is on the way can read it.
    `timeout_seconds` is the deadline of a generating call, retries included, unless the call names its own. None sends
    no deadline; the server then ends the answer after its own, `model().limits.default_deadline_seconds` (600 s by
    default). `Started.timeout_seconds`, in the first delta and the result, is the deadline in force on the server.
    `max_attempts` (or a whole RetryPolicy as `retry`) says how often a call that was not taken is tried; a server that
    was there and is gone is waited for.
    `sampling` fills what a call leaves open. `options` are gRPC channel options; they override ours. With `sessions`
    answers at the same time share one stream, which costs the server less; None: where the target is one server's own
    address, not a name that may stand for many.
    `on_model_change` says what becomes of an answer whose model is replaced while it is made: "error" raises
    ModelChanged, which has the answer so far; "restart" asks for a new answer from the beginning (`Delta.restarted`).
    """

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
        transport: Transport | None = None,
    ) -> None:
        own = authorized(metadata, token)
        self._settings = client_config(timeout_seconds, max_attempts, retry, own, sampling, on_model_change)
        self._transport = transport or GrpcTransport(
            default_target() if target is None else target, credentials, options, sessions
        )

    @property
    def target(self) -> str:
        return self._transport.target

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is running and disconnect."""
        self._transport.close()

    def stream(self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]) -> Stream:
        """The answer piece by piece; see `Stream`. Parameters are those of `Sampling` and of `Request`."""
        return Stream(self._transport, self._settings.outgoing(prompt, sampling, **params))

    def generate(
        self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> Generation:
        """The whole answer. Raises the LineclearError the call ended with. Ctrl-C cancels it on the server too."""
        return self.stream(prompt, sampling, **params).read_all()

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
    ) -> BatchResults[Generation]: ...
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
    ) -> BatchResults[Outcome]: ...
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
    ) -> BatchResults[Generation] | BatchResults[Outcome]:
        """Answers in the order of the prompts, each as soon as it and all before it are there.

        Prompts are read as they are needed: at most `window` (default: the larger of 256 and 8 * concurrency) are
        under way or waiting for an earlier one. A request that fails yields its LineclearError, or raises it and
        cancels the rest if not `return_exceptions`. Stopping early cancels the rest, and so does `Outcomes.cancel`.
        """
        batch = OrderedWindow(prompts, checked_concurrency(concurrency, window), return_exceptions)
        return self._each(batch, concurrency, progress, sampling, params)

    @overload
    def generate_many(
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
    def generate_many(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int = 32,
        return_exceptions: bool,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> list[Outcome]: ...
    def generate_many(
        self,
        prompts: Iterable[Prompt | Request],
        sampling: Sampling | None = None,
        *,
        concurrency: int = 32,
        return_exceptions: bool = False,
        progress: Progress = None,
        **params: Unpack[Params],
    ) -> list[Generation] | list[Outcome]:
        """All answers, in the order of the prompts, `concurrency` at a time.

        `progress` is True for a bar on a terminal, or a function of (done, total). The first failure is raised and
        cancels the rest, or takes the place of its answer if `return_exceptions`. Ctrl-C cancels all.
        """
        checked_concurrency(concurrency, None)
        outcomes = self._each(
            OrderedWindow(prompts, ALL_AT_ONCE, return_exceptions), concurrency, progress, sampling, params
        )
        with sigint.cancel_on_sigint(outcomes.cancel):
            return list(outcomes)

    def submit(self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]) -> Submitted:
        """Begin an answer and leave it to the server; see `Submitted`.

        The answer may take `timeout_seconds`; the call itself returns when the request is in the queue.
        """
        outgoing = self._settings.outgoing(prompt, sampling, **params)
        request = submission(outgoing)
        try:
            self._unary(rpc_methods.SUBMIT, request, UNSET, outgoing.metadata)
        except DuplicateRequest:
            # The name is ours alone where the caller gave none: then an earlier attempt did arrive.
            if outgoing.names_itself:
                raise
        return self.submitted(request.request.request_id, metadata=outgoing.metadata)

    def submitted(self, request_id: str, *, metadata: Metadata | None = None) -> Submitted:
        """A request that was submitted, by this client or another one. Asks nobody."""
        return Submitted(self, request_id, self._settings.metadata if metadata is None else pairs(metadata))

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage] | Sequence[dict[str, str]],
        *,
        timeout_seconds: float | Unset | None = UNSET,
    ) -> list[int]:
        """The token ids `generate` would make of this."""
        return list(self._unary(rpc_methods.TOKENIZE, tokenize_request(prompt), timeout_seconds).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool | None = None,
        timeout_seconds: float | Unset | None = UNSET,
    ) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._unary(
            rpc_methods.DETOKENIZE, detokenize_request(token_ids, keep_special_tokens), timeout_seconds
        ).text

    def model(self, *, timeout_seconds: float | Unset | None = UNSET) -> Model:
        """What is served, and within which limits."""
        return from_proto(Model, self._unary(rpc_methods.GET_MODEL, pb.GetModelRequest(), timeout_seconds))

    def stats(self, *, timeout_seconds: float | Unset | None = UNSET) -> Stats:
        """What the server is doing and how it has been doing."""
        return from_proto(Stats, self._unary(rpc_methods.GET_STATS, pb.GetStatsRequest(), timeout_seconds))

    def health(
        self, service: str = rpc_methods.SERVICE, *, timeout_seconds: float | Unset | None = UNSET
    ) -> HealthStatus:
        """What the server says of `service` ("" is the process as a whole). Raises Unreachable if nobody answers."""
        return self._unary(rpc_methods.HEALTH, service, timeout_seconds)

    def _unary(
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
                return self._transport.unary(method, request, timeout_seconds=attempts.begin(), metadata=own)
            except LineclearError as error:
                if error.code in method.meanings:
                    return method.meanings[error.code]
                time.sleep(attempts.pause_after(error))

    def _each(
        self,
        batch: OrderedWindow[Prompt | Request],
        concurrency: int,
        progress: Progress,
        sampling: Sampling | None,
        params: Params,
    ) -> BatchResults[Outcome]:
        def open_stream(prompt: Prompt | Request) -> Stream:
            return self.stream(prompt, sampling, **params)

        return BatchResults(BatchWorkers(batch, concurrency, open_stream), display(progress))
