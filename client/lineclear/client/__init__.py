"""The Python client of lineclear: `Client` for threads, `AsyncClient` for asyncio.

    from lineclear.client import Client

    with Client("127.0.0.1:50051") as client:
        with client.stream("Once upon a time", max_tokens=64) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.result.usage)

Needs grpcio and protobuf, and nothing else. `lineclear.client.testing` has a server's stand-in for your own tests.
"""

from .aio import AsyncClient, AsyncSubmitted
from .crew import Outcomes
from .kept import Snapshot
from .local import LocalServer, ServerFailed
from .operator import Operator
from .requests import ChatMessage, OnModelChange, Request, Sampling
from .results import (
    Delta,
    FinishReason,
    Generation,
    HealthStatus,
    Limits,
    Model,
    Quantiles,
    Started,
    Stats,
    Timings,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from .retries import RetryPolicy
from .stream import AsyncStream, Stream
from .sync import Client, Submitted

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "AsyncSubmitted",
    "ChatMessage",
    "Client",
    "Delta",
    "FinishReason",
    "Generation",
    "HealthStatus",
    "Limits",
    "LocalServer",
    "Model",
    "OnModelChange",
    "Operator",
    "Outcomes",
    "Quantiles",
    "Request",
    "RetryPolicy",
    "Sampling",
    "ServerFailed",
    "Snapshot",
    "Started",
    "Stats",
    "Stream",
    "Submitted",
    "Timings",
    "TokenLogprobs",
    "TopLogprob",
    "Usage",
]
