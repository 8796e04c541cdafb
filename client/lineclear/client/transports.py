"""The interface between a client and gRPC, once for asyncio and once for threads.

A transport sends one request, returns its responses and raises a LineclearError for whatever goes wrong. It never
retries. `lineclear.client.testing.FakeTransport` is a transport without a server.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from .channel import Pairs
from .rpc_methods import Method

Req = TypeVar("Req")
Res = TypeVar("Res")
Res_co = TypeVar("Res_co", covariant=True)


class AsyncCall(Protocol[Res_co]):
    """A running call: iterate for its responses. Raises a LineclearError if the call fails."""

    async def __anext__(self) -> Res_co: ...
    def cancel(self) -> None:
        """End the call now. Its reader gets Cancelled. May be called again, and after the end."""


class Call(Protocol[Res_co]):
    """`AsyncCall` for threads."""

    def __next__(self) -> Res_co: ...
    def cancel(self) -> None: ...


class AsyncTransport(Protocol):
    """The calls that a client makes. `target` names the server in error messages."""

    @property
    def target(self) -> str: ...
    def stream_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> AsyncCall[Res]: ...
    async def unary_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Res: ...
    async def close_async(self) -> None: ...


class Transport(Protocol):
    """`AsyncTransport` for threads."""

    @property
    def target(self) -> str: ...
    def stream(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Call[Res]: ...
    def unary(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Res: ...
    def close(self) -> None: ...
