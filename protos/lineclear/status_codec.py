"""Convert a LineclearError to a google.rpc.Status and back.

gRPC carries the Status in the trailer `grpc-status-details-bin` (the `grpc_status` package packs and unpacks it). A
Session and GetResult carry it in their messages. Every gRPC language reads it with its own google.rpc types.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

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

TRAILER = "grpc-status-details-bin"


def to_status(error: LineclearError) -> Status:
    """Return a Status with ErrorInfo, and with BadRequest and RetryInfo where they apply."""
    status = Status(code=Code.Value(error.code), message=str(error))
    status.details.add().Pack(ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    if error.violations:
        violations = [BadRequest.FieldViolation(field=f, description=d) for f, d in error.violations]
        status.details.add().Pack(BadRequest(field_violations=violations))
    if error.retry_after_seconds is not None:
        retry = RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_seconds * 1e9))
        status.details.add().Pack(retry)
    return status


def from_status(status: Status) -> LineclearError:
    """Return the error of a Status.

    A Status without a reason of the domain `lineclear` becomes the class that fits its code. Details of unknown types
    are ignored, and so are details that cannot be parsed.
    """
    info, request, retry = ErrorInfo(), BadRequest(), RetryInfo()
    for detail in status.details:
        for message in (info, request, retry):
            if detail.Is(message.DESCRIPTOR):
                try:
                    message.ParseFromString(detail.value)
                except DecodeError:
                    message.Clear()
    code = Code.Name(status.code) if status.code in Code.values() else "UNKNOWN"
    is_known = info.domain == DOMAIN
    error = _class_of(code, info.reason if is_known else "")(
        status.message,
        retry_after_seconds=retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None,
        metadata=info.metadata if is_known else {},
        violations=[Violation(v.field, v.description) for v in request.field_violations],
    )
    if isinstance(error, UnknownStatus):
        error.code, error.reason = code, info.reason if is_known else code
    return error


def from_trailer(code: str, message: str, trailer: bytes | None) -> LineclearError:
    """Return the error of a call: `code` is the name of its gRPC code, `trailer` the serialized Status, if any.

    The code and the message of the call win over those in the trailer, which a proxy may have written.
    """
    try:
        status = Status.FromString(trailer or b"")
    except DecodeError:
        status = Status()
    status.code, status.message = Code.Value(code), message
    return from_status(status)


# The class of a status without a known reason, by its code. All other codes become an UnknownStatus.
_BY_CODE: dict[str, type[LineclearError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "UNAVAILABLE": Unreachable,
    "UNIMPLEMENTED": Unsupported,
    "UNAUTHENTICATED": Unauthenticated,
    "INTERNAL": InternalError,
}


def _class_of(code: str, reason: str) -> type[LineclearError]:
    known = {kind.reason: kind for kind in tree()}.get(reason)
    return known if known is not None and known.code == code else _BY_CODE.get(code, UnknownStatus)
