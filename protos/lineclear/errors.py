"""Everything that can go wrong for a caller, as one tree.

Each class names its gRPC code and its reason; `lineclear.grpc_status` carries it over the wire and back. A bug is an
assertion, not an entry here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

DOMAIN = "lineclear"


class Violation(NamedTuple):
    """A field of the request that is wrong. `field` is its path, as in `sampling.top_p`; never the value."""

    field: str
    description: str


class LineclearError(Exception):
    """Any failure of a call. `str()` is the sentence the server wrote.

    `retry_after_seconds` is None where trying the same again cannot help. `metadata` holds the figures behind the
    sentence, as strings. Never holds prompt, completion or token ids.
    """

    code: str = "UNKNOWN"
    reason: str = "UNKNOWN"

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
    """`text` as UTF-8 can carry it. A lone surrogate, as in the name of an odd file, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


class InvalidRequest(LineclearError):
    """The request is wrong and will stay wrong; `violations` says where."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"

    @classmethod
    def at(cls, field: str, description: str) -> Self:
        """One field is wrong; the sentence names it."""
        return cls(f"{field}: {description}", violations=[Violation(field, description)])


class PromptTooLong(InvalidRequest):
    """Prompt, or prompt and max_tokens together, exceed the context or the byte limit. Never truncated."""

    reason = "PROMPT_TOO_LONG"


class TokenOutOfVocabulary(InvalidRequest):
    """A token id is not in [0, vocabulary)."""

    reason = "TOKEN_OUT_OF_VOCABULARY"


class MalformedMessage(InvalidRequest):
    """The message is not what the schema says (for instance a string that is not UTF-8)."""

    reason = "MALFORMED_MESSAGE"


class RequestTooLarge(LineclearError):
    """The request has more bytes than the server takes; send less, or have it raise --max-message-bytes."""

    code = "RESOURCE_EXHAUSTED"
    reason = "REQUEST_TOO_LARGE"


class ResponseTooLarge(LineclearError):
    """The answer to a unary call has more bytes than one message may have."""

    code = "RESOURCE_EXHAUSTED"
    reason = "RESPONSE_TOO_LARGE"


class Unauthenticated(LineclearError):
    """The call shows no token that is valid here."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class DuplicateRequest(LineclearError):
    """A live request or a kept answer of this caller has this request_id."""

    code = "ALREADY_EXISTS"
    reason = "DUPLICATE_REQUEST"


class UnknownRequest(LineclearError):
    """No submitted request of this caller has this request_id, or its answer is kept no longer."""

    code = "NOT_FOUND"
    reason = "UNKNOWN_REQUEST"


class ModelNotFound(LineclearError):
    """The request names a model that is not served here."""

    code = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"


class ModelChanged(LineclearError):
    """Another model is served than the one that the answer began with, or that the request asks for.

    The tokens received so far are right for the first model, and no other model continues them. To get a whole answer,
    send the request again without `resume`. `text` and `token_ids` are what the client library had received.
    """

    code = "ABORTED"
    reason = "MODEL_CHANGED"
    text: str = ""
    token_ids: tuple[int, ...] = ()


class KvCapacityExceeded(LineclearError):
    """The request alone needs more KV blocks than the pool has."""

    code = "FAILED_PRECONDITION"
    reason = "KV_CAPACITY_EXCEEDED"


class NoChatTemplate(LineclearError):
    """A conversation was sent to a model without a chat template."""

    code = "FAILED_PRECONDITION"
    reason = "NO_CHAT_TEMPLATE"


class RecordingFailed(LineclearError):
    """The flight recording could not be written; the message says why."""

    code = "FAILED_PRECONDITION"
    reason = "RECORDING_FAILED"


class QueueFull(LineclearError):
    """The queue is at its limit in requests or in tokens."""

    code = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"


class SlowConsumer(LineclearError):
    """The caller did not read its stream for too long."""

    code = "RESOURCE_EXHAUSTED"
    reason = "SLOW_CONSUMER"


class DeviceOutOfMemory(LineclearError):
    """The request alone needs more device memory than there is."""

    code = "RESOURCE_EXHAUSTED"
    reason = "DEVICE_OUT_OF_MEMORY"


class ServerStarting(LineclearError):
    """No worker has joined yet."""

    code = "UNAVAILABLE"
    reason = "SERVER_STARTING"


class ServerDraining(LineclearError):
    """The server is leaving and takes no new requests."""

    code = "UNAVAILABLE"
    reason = "SERVER_DRAINING"


class ShutdownInterrupted(LineclearError):
    """The server left before the answer was complete."""

    code = "UNAVAILABLE"
    reason = "SHUTDOWN_INTERRUPTED"


class WorkerUnavailable(LineclearError):
    """Workers died too often; the server gave up."""

    code = "UNAVAILABLE"
    reason = "WORKER_UNAVAILABLE"


class ModelReplaced(LineclearError):
    """Another model took over before the request began, with another vocabulary than the request was checked with."""

    code = "UNAVAILABLE"
    reason = "MODEL_REPLACED"


class Unreachable(LineclearError):
    """No answer from a server. Made by the client library, never sent."""

    code = "UNAVAILABLE"
    reason = "UNREACHABLE"


class ConnectionLost(Unreachable):
    """A server that was there is not any more: it died, left, is starting again or was cut off. Found by the client
    library, which waits for it."""

    reason = "CONNECTION_LOST"


class DeadlineExceeded(LineclearError):
    """The deadline of the call passed, in the queue or while running."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class DeadlineUnreachable(DeadlineExceeded):
    """The deadline would pass in the queue; refused at the door, before any work. Only where a setting asks for it."""

    reason = "DEADLINE_UNREACHABLE"


class Cancelled(LineclearError):
    """The caller hung up."""

    code = "CANCELLED"
    reason = "CANCELLED"


class NonFiniteLogits(LineclearError):
    """The model produced NaN or infinity for this request."""

    code = "INTERNAL"
    reason = "NON_FINITE_LOGITS"


class PoisonRequest(LineclearError):
    """Workers died whenever they computed this request, at last while they computed nothing else."""

    code = "INTERNAL"
    reason = "POISON_REQUEST"


class InternalError(LineclearError):
    """A bug of ours. `metadata["incident_id"]` is in the server's log."""

    code = "INTERNAL"
    reason = "INTERNAL_ERROR"


class DataLoss(LineclearError):
    """The stream skipped or repeated a token index. Found by the client library."""

    code = "DATA_LOSS"
    reason = "DATA_LOSS"


class Unsupported(LineclearError):
    """The server does not have, or has switched off, what was asked for."""

    code = "UNIMPLEMENTED"
    reason = "UNSUPPORTED"


class UnknownStatus(LineclearError):
    """A status with no reason of ours and no class that fits it: `code` and `reason` are the instance's own."""


def tree(root: type[LineclearError] = LineclearError) -> Iterator[type[LineclearError]]:
    """Every class of the tree, parents before children."""
    yield root
    for child in root.__subclasses__():
        yield from tree(child)
