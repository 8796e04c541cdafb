"""The connection of a client: its transport, its settings, and the two ways to make a call."""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from lineclear.errors import LineclearError
from lineclear.v1 import inference_pb2 as pb

from .. import rpc_methods
from ..call_params import Params
from ..call_settings import ConfigArguments, client_config
from ..concurrency import async_sleep
from ..message_classes import Model
from ..parameters import UNSET, Prompt, Sampling, Unset
from ..requests import Request
from ..results import Generation, from_proto
from ..rpc_methods import AsyncTransport, Options, Pairs
from ..target import default_target
from .answer_stream import AsyncStream
from .transport import AsyncGrpcTransport

Req = TypeVar("Req")
Res = TypeVar("Res")


class AsyncConnection:
    """A transport and the settings of its calls. `AsyncClient` explains the arguments."""

    def __init__(
        self,
        target: str | None = None,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        options: Options = (),
        sessions: bool | None = None,
        transport: AsyncTransport | None = None,
        **config: Unpack[ConfigArguments],
    ) -> None:
        self._config = client_config(**config)
        self._transport = transport or AsyncGrpcTransport(
            default_target() if target is None else target, credentials, options, sessions
        )

    @property
    def target(self) -> str:
        """The address of the server."""
        return self._transport.target

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel all calls and disconnect."""
        await self._transport.close_async()

    def stream(
        self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> AsyncStream:
        """Return a stream of the answer. `params` are fields of `Sampling` and of `Request`.

        Raises InvalidRequest if a parameter does not fit into the message, TypeError for an unknown parameter.
        """
        return AsyncStream(self._transport, self._config.outgoing(prompt, sampling, **params))

    async def generate(
        self, prompt: Prompt | Request, sampling: Sampling | None = None, **params: Unpack[Params]
    ) -> Generation:
        """Return the complete answer. Arguments and errors are those of `stream`. Ctrl-C cancels the request."""
        return await self.stream(prompt, sampling, **params).read_all()

    async def model(self, *, timeout_seconds: float | Unset | None = UNSET) -> Model:
        """Return the served model and the limits of the server."""
        answer = await self._unary(rpc_methods.GET_MODEL, pb.GetModelRequest(), timeout_seconds)
        return from_proto(Model, answer)

    async def _unary(
        self,
        method: rpc_methods.Method[Req, Res],
        request: Req,
        timeout_seconds: float | Unset | None,
        metadata: Pairs | None = None,
    ) -> Res:
        attempts = self._config.short(timeout_seconds)
        own_metadata = self._config.metadata if metadata is None else metadata
        while True:
            try:
                return await self._transport.unary_async(
                    method, request, timeout_seconds=attempts.begin(), metadata=own_metadata
                )
            except LineclearError as error:
                if error.code in method.error_responses:
                    return method.error_responses[error.code]
                await async_sleep(attempts.pause_after(error))
