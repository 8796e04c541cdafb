"""The exceptions of calls. Each class has a gRPC code and a reason, which is its name in UPPER_SNAKE_CASE.

`lineclear.status_codec` converts them to google.rpc.Status and back. Bugs are assertions, not classes of this tree.
docs/protocol.md has a table of all classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

DOMAIN = "lineclear"


class Violation(NamedTuple):
    """An invalid field of a request. `field` is its path, such as `sampling.top_p`. Never contains the value."""

    field: str
    description: str


class LineclearError(Exception):
    """Base class of all errors of calls. `str()` is the sentence of the server.

    `retry_after_seconds` is None if a retry cannot help. `metadata` has the figures of the sentence as strings. Never
    contains prompts, answers or token ids.
    """

    code: str = "UNKNOWN"
    reason: str = "UNKNOWN"

    def __init_subclass__(cls) -> None:
        if "reason" not in vars(cls):
            cls.reason = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()

    def __init__(
        self,
        message: str,
        *,
        retry_after_seconds: float | None = None,
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[Violation] = (),
    ) -> None:
        super().__init__(_sendable(message))
        self.retry_after_seconds = retry_after_seconds
        self.metadata = {key: _sendable(value) for key, value in (metadata or {}).items()}
        self.violations = tuple(Violation(v.field, _sendable(v.description)) for v in violations)


def _sendable(text: str) -> str:
    """Return `text` as valid UTF-8. A lone surrogate, as in some file names, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


class InvalidRequest(LineclearError):
    """The request is invalid, and a retry fails too. `violations` has the fields."""

    code = "INVALID_ARGUMENT"

    @classmethod
    def at(cls, field: str, description: str) -> Self:
        """Return an error about one field."""
        return cls(f"{field}: {description}", violations=[Violation(field, description)])


class PromptTooLong(InvalidRequest):
    """The prompt, or the prompt and max_tokens together, exceed the context or the byte limit. Never truncated."""


class AdapterRefused(InvalidRequest):
    """Wrong files, format, rank, shapes or place of an adapter. The sentence says which."""


class AdapterNotFound(LineclearError):
    """No adapter with this name is loaded. ListAdapters and GetModel return the names."""

    code = "NOT_FOUND"


class AdapterLimitReached(LineclearError):
    """As many adapters are in use as the workers may hold. Unload one, or raise the server's --max-loras."""

    code = "RESOURCE_EXHAUSTED"


class TokenOutOfVocabulary(InvalidRequest):
    """A token id is outside [0, vocabulary)."""


class MalformedMessage(InvalidRequest):
    """The message does not match the schema, for instance because a string is not UTF-8."""


class RequestTooLarge(LineclearError):
    """The request has more bytes than the server takes. Send less, or raise the server's --max-message-bytes."""

    code = "RESOURCE_EXHAUSTED"


class ResponseTooLarge(LineclearError):
    """The answer to a unary call has more bytes than one message may have."""

    code = "RESOURCE_EXHAUSTED"


class Unauthenticated(LineclearError):
    """The call has no valid token."""

    code = "UNAUTHENTICATED"


class DuplicateRequest(LineclearError):
    """The request_id is in use by a live request or a kept answer of this client."""

    code = "ALREADY_EXISTS"


class UnknownRequest(LineclearError):
    """No submitted request of this client has this request_id, or its answer was deleted."""

    code = "NOT_FOUND"


class ModelNotFound(LineclearError):
    """The request names a model that the server does not serve."""

    code = "NOT_FOUND"


class ModelChanged(LineclearError):
    """The server has another model than the one that started the answer, or that the request requires.

    The received tokens are correct for the first model, but no other model can continue them. For a complete answer,
    send the request again without `resume`. The client library sets `text` and `token_ids` to what it has received.
    """

    code = "ABORTED"
    text: str = ""
    token_ids: tuple[int, ...] = ()


class KvCapacityExceeded(LineclearError):
    """The request alone needs more KV blocks than the pool has."""

    code = "FAILED_PRECONDITION"


class NoChatTemplate(LineclearError):
    """The request has a conversation, and the model has no chat template."""

    code = "FAILED_PRECONDITION"


class NoStructuredOutput(LineclearError):
    """The request has a form, and the model's tokenizer does not work with grammars."""

    code = "FAILED_PRECONDITION"


class WorkerRestartFailed(LineclearError):
    """The scheduler cannot restart a worker: it did not start it, or it has given it up. The others serve on."""

    code = "FAILED_PRECONDITION"


class RecordingFailed(LineclearError):
    """The flight recording could not be written. The message has the cause."""

    code = "FAILED_PRECONDITION"


class ProfileFailed(LineclearError):
    """No steps could be recorded. The message has the cause."""

    code = "FAILED_PRECONDITION"


class QueueFull(LineclearError):
    """The queue has reached its limit of requests or of tokens."""

    code = "RESOURCE_EXHAUSTED"


class TooManyWatchers(LineclearError):
    """As many calls watch the steps as max_step_watchers allows."""

    code = "RESOURCE_EXHAUSTED"


class SlowConsumer(LineclearError):
    """The client did not read its stream for too long."""

    code = "RESOURCE_EXHAUSTED"


class DeviceOutOfMemory(LineclearError):
    """The request alone needs more device memory than there is."""

    code = "RESOURCE_EXHAUSTED"


class ServerStarting(LineclearError):
    """No worker has joined yet."""

    code = "UNAVAILABLE"


class ServerDraining(LineclearError):
    """The server is shutting down and rejects new requests."""

    code = "UNAVAILABLE"


class ShutdownInterrupted(LineclearError):
    """The server shut down before the answer was complete."""

    code = "UNAVAILABLE"


class WorkerUnavailable(LineclearError):
    """Workers crashed too often, and the server does not restart them."""

    code = "UNAVAILABLE"


class ModelReplaced(LineclearError):
    """A worker with another model joined before the request started, and its vocabulary is different."""

    code = "UNAVAILABLE"


class Unreachable(LineclearError):
    """The server did not answer. Raised by the client library, never sent."""

    code = "UNAVAILABLE"


class ConnectionLost(Unreachable):
    """The connection broke to a server that had answered before. Raised by the client library, which waits for the
    server to return."""


class DeadlineExceeded(LineclearError):
    """The deadline of the call passed, in the queue or while running."""

    code = "DEADLINE_EXCEEDED"


class DeadlineUnreachable(DeadlineExceeded):
    """The request would wait in the queue until its deadline, and was rejected at once. Requires a setting."""


class Cancelled(LineclearError):
    """The client cancelled the request. A CANCELLED without a reason comes from gRPC, which refused the call: retry."""

    code = "CANCELLED"


class NoTokenAllowed(LineclearError):
    """The structured output and the other parameters of the request together allow no further token."""

    code = "FAILED_PRECONDITION"


class NonFiniteLogits(LineclearError):
    """The model produced NaN or infinity for this request."""

    code = "INTERNAL"


class PoisonRequest(LineclearError):
    """Workers crashed each time they computed this request, the last time while they computed nothing else."""

    code = "INTERNAL"


class InternalError(LineclearError):
    """A bug of the server. Its log has `metadata["incident_id"]`."""

    code = "INTERNAL"


class DataLoss(LineclearError):
    """The stream skipped or repeated a token index. Raised by the client library."""

    code = "DATA_LOSS"


class Unsupported(LineclearError):
    """The server does not have this method or feature, or it is disabled."""

    code = "UNIMPLEMENTED"


class UnknownStatus(LineclearError):
    """A status with an unknown reason and a code without a class. `code` and `reason` are those of the instance."""

    reason = "UNKNOWN"


def tree(root: type[LineclearError] = LineclearError) -> Iterator[type[LineclearError]]:
    """Yield every class of the tree, parents before children."""
    yield root
    for child in root.__subclasses__():
        yield from tree(child)
