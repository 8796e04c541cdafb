"""The Python client of lineclear: `Client` for threads, `AsyncClient` for asyncio.

    from lineclear.client import Client

    with Client("127.0.0.1:50051") as client:
        with client.stream("Once upon a time", max_tokens=64) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.result.usage)

Needs only the packages of gRPC and protobuf. `lineclear.client.testing` replaces a server in your own tests.
docs/client.md shows errors, retries, batches, TLS, threads and forks.
"""

from lineclear.extras import installed_version

from ._async.admin_client import AsyncAdminClient
from ._async.answer_stream import AsyncStream
from ._async.batch_workers import AsyncBatchResults
from ._async.client import AsyncClient, AsyncSubmitted
from ._sync.admin_client import AdminClient
from ._sync.answer_stream import Stream
from ._sync.batch_workers import BatchResults
from ._sync.client import Client, Submitted
from .admin_results import StepRow, step_rows
from .chat_messages import ChatMessage, ToolCall, ToolCallDelta
from .local_server import LocalServer, ServerStartError
from .message_classes import Limits, Model, Quantiles, Started, Stats, Timings, TopLogprob, Usage
from .parameters import OnModelChange, RepetitionDetection, Sampling
from .prompt_calls import ContinuationScore, Embeddings, Scores
from .requests import Request
from .results import (
    Delta,
    FinishReason,
    Generation,
    HealthStatus,
    Output,
    Queued,
    SubmittedStatus,
    TokenLogprobs,
)
from .retry import RetryPolicy
from .step_profile import Operation, StepProfile

__version__ = installed_version()
"""The version of lineclear. `lineclear` itself is a namespace of several folders and has no attributes."""

__all__ = [
    "AdminClient",
    "AsyncAdminClient",
    "AsyncBatchResults",
    "AsyncClient",
    "AsyncStream",
    "AsyncSubmitted",
    "BatchResults",
    "ChatMessage",
    "Client",
    "ContinuationScore",
    "Delta",
    "Embeddings",
    "FinishReason",
    "Generation",
    "HealthStatus",
    "Limits",
    "LocalServer",
    "Model",
    "OnModelChange",
    "Operation",
    "Output",
    "Quantiles",
    "Queued",
    "RepetitionDetection",
    "Request",
    "RetryPolicy",
    "Sampling",
    "Scores",
    "ServerStartError",
    "Started",
    "Stats",
    "StepProfile",
    "StepRow",
    "Stream",
    "Submitted",
    "SubmittedStatus",
    "Timings",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "Usage",
    "__version__",
    "step_rows",
]
