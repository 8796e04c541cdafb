"""Errors over the wire: a LineclearError to the bytes of a google.rpc.Status and back.

The bytes travel in the trailer `grpc-status-details-bin`, where every gRPC language looks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf.message import DecodeError, Message

from lineclear.errors import (
    DOMAIN,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LineclearError,
    Unauthenticated,
    UnknownStatus,
    Unreachable,
    Unsupported,
    Violation,
    tree,
)
from lineclear.wire.v1 import status_pb2

TRAILER = "grpc-status-details-bin"
CODE_NUMBERS = {
    "OK": 0, "CANCELLED": 1, "UNKNOWN": 2, "INVALID_ARGUMENT": 3, "DEADLINE_EXCEEDED": 4, "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6, "PERMISSION_DENIED": 7, "RESOURCE_EXHAUSTED": 8, "FAILED_PRECONDITION": 9, "ABORTED": 10,
    "OUT_OF_RANGE": 11, "UNIMPLEMENTED": 12, "INTERNAL": 13, "UNAVAILABLE": 14, "DATA_LOSS": 15, "UNAUTHENTICATED": 16,
}  # fmt: skip
_PREFIX = "type.googleapis.com/google.rpc."


def to_trailer(error: LineclearError) -> bytes:
    """A serialized google.rpc.Status: ErrorInfo always, BadRequest and RetryInfo where they apply."""
    status = status_pb2.Status(code=CODE_NUMBERS[error.code], message=str(error))

    def add(name: str, detail: Message) -> None:
        status.details.add(type_url=_PREFIX + name, value=detail.SerializeToString())

    add("ErrorInfo", status_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    if error.violations:
        violations = [status_pb2.BadRequest.FieldViolation(field=f, description=d) for f, d in error.violations]
        add("BadRequest", status_pb2.BadRequest(field_violations=violations))
    if error.retry_after_seconds is not None:
        retry = status_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_seconds * 1e9))
        add("RetryInfo", retry)
    return status.SerializeToString()


def from_trailer(code: str, message: str, trailer: bytes | None) -> LineclearError:
    """The error a call ended with: `code` is the name of its gRPC code, `trailer` the details, if any came.

    A status that no lineclear server wrote (a proxy's, the transport's) becomes the class that fits its code.
    """
    reason, retry = "", None
    metadata: dict[str, str] = {}
    violations: list[Violation] = []
    try:
        for detail in status_pb2.Status.FromString(trailer or b"").details:
            if detail.type_url == _PREFIX + "ErrorInfo":
                info = status_pb2.ErrorInfo.FromString(detail.value)
                if info.domain == DOMAIN:
                    reason, metadata = info.reason, dict(info.metadata)
            elif detail.type_url == _PREFIX + "BadRequest":
                found = status_pb2.BadRequest.FromString(detail.value).field_violations
                violations = [Violation(v.field, v.description) for v in found]
            elif detail.type_url == _PREFIX + "RetryInfo":
                retry = status_pb2.RetryInfo.FromString(detail.value).retry_delay.ToNanoseconds() / 1e9
    except DecodeError:
        pass  # somebody else's trailer: the code and the sentence are all there is
    return make(code, reason, message, retry_after_seconds=retry, metadata=metadata, violations=violations)


def make(
    code: str,
    reason: str,
    message: str,
    *,
    retry_after_seconds: float | None,
    metadata: Mapping[str, str],
    violations: Sequence[Violation],
) -> LineclearError:
    """The error of these parts, however they travelled."""
    error = _kind(code, reason)(
        message, retry_after_seconds=retry_after_seconds, metadata=metadata, violations=violations
    )
    if isinstance(error, UnknownStatus):
        error.code, error.reason = code, reason or code
    return error


# What a status without our reason most likely is. Codes that are not here stay a Foreign error.
_BY_CODE: dict[str, type[LineclearError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "UNAVAILABLE": Unreachable,
    "UNIMPLEMENTED": Unsupported,
    "UNAUTHENTICATED": Unauthenticated,
    "INTERNAL": InternalError,
}


def _kind(code: str, reason: str) -> type[LineclearError]:
    known = {kind.reason: kind for kind in tree()}.get(reason)
    return known if known is not None and known.code == code else _BY_CODE.get(code, UnknownStatus)
