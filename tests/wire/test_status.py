"""Errors as google.rpc.Status: every class survives the round trip, and other languages read it with google.rpc."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from google.rpc.code_pb2 import Code
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from lineclear import errors
from lineclear.status_codec import from_status, from_trailer, to_status

# The root is never raised, and UnknownStatus stands for the errors of other servers.
CLASSES = [kind for kind in errors.tree() if kind not in (errors.LineclearError, errors.UnknownStatus)]


def full(kind: type[errors.LineclearError]) -> errors.LineclearError:
    """An error with every attribute set."""
    return kind(
        f"a sentence about {kind.__name__}",
        retry_after_seconds=1.25,
        metadata={"limit": "512", "waiting": "513"},
        violations=[errors.Violation("sampling.top_p", "is above 1"), errors.Violation("stop.strings[0]", "is empty")],
    )


def round_trip(error: errors.LineclearError) -> errors.LineclearError:
    return from_trailer(error.code, str(error), to_status(error).SerializeToString())


def as_dict(error: errors.LineclearError) -> dict[str, object]:
    return {"type": type(error), "message": str(error), "code": error.code, "reason": error.reason, **vars(error)}


def test_every_class_survives_the_round_trip() -> None:
    for kind in CLASSES:
        for error in (full(kind), kind("only a sentence")):
            assert as_dict(round_trip(error)) == as_dict(error)
            assert as_dict(from_status(to_status(error))) == as_dict(error)


def test_codes_and_reasons_fit_grpc() -> None:
    """gRPC drops a call's trailers past 8 KiB, in base64, beside the rest of the metadata."""
    codes = {code.name for code in grpc.StatusCode} - {"OK"}
    for kind in (*CLASSES, errors.LineclearError):
        assert kind.code in codes
        assert kind.__doc__
        assert len(kind.reason) <= 63, "the limit of google.rpc.ErrorInfo"
        assert to_status(full(kind)).ByteSize() < 4096


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_google_rpc_reads_every_detail(kind: type[errors.LineclearError]) -> None:
    error = full(kind)
    status = to_status(error)
    assert status.code == getattr(grpc.StatusCode, kind.code).value[0]
    assert status.message == str(error)
    assert kind.reason.replace("_", "") == kind.__name__.upper()
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    assert [d.Unpack(m) for d, m in zip(status.details, (info, bad, retry), strict=True)] == [True, True, True]
    assert (info.reason, info.domain, dict(info.metadata)) == (kind.reason, "lineclear", error.metadata)
    assert [(v.field, v.description) for v in bad.field_violations] == list(error.violations)
    assert retry.retry_delay.ToNanoseconds() == 1_250_000_000


def test_details_that_do_not_apply_are_absent() -> None:
    (only,) = to_status(errors.QueueFull("512 requests are waiting")).details
    assert only.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)


# --- statuses of other servers and proxies ---------------------------------------------------------------------------


@pytest.mark.parametrize("trailer", [None, b"", b"\xff\xff\xff", b"not a message at all"])
def test_a_status_without_details_becomes_the_class_of_its_code(trailer: bytes | None) -> None:
    error = from_trailer("UNAVAILABLE", "failed to connect", trailer)
    assert type(error) is errors.Unreachable
    assert str(error) == "failed to connect"


def test_an_unknown_status_keeps_its_code() -> None:
    error = from_trailer("PERMISSION_DENIED", "not for you", None)
    assert type(error) is errors.UnknownStatus
    assert (error.code, error.reason) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
    assert as_dict(round_trip(error)) == as_dict(error)


def test_a_reason_of_another_domain_is_ignored() -> None:
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="proxy.example", metadata={"a": "b"})
    status = Status(code=8, message="busy")
    status.details.add().Pack(info)
    error = from_status(status)
    assert type(error) is errors.UnknownStatus
    assert error.metadata == {}


def test_the_code_wins_over_a_reason_of_another_code() -> None:
    error = from_trailer("INVALID_ARGUMENT", "odd", to_status(errors.QueueFull("odd")).SerializeToString())
    assert type(error) is errors.InvalidRequest


def test_an_unknown_reason_becomes_the_class_of_its_code() -> None:
    status = Status(code=3, message="tool schema too deep")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="SCHEMA_TOO_DEEP", domain=errors.DOMAIN))
    assert type(from_status(status)) is errors.InvalidRequest


def test_unknown_details_are_skipped() -> None:
    status = to_status(full(errors.QueueFull))
    status.details.add().Pack(error_details_pb2.Help())
    status.details.add(type_url="type.example/no.such.Message", value=b"\xff")
    assert as_dict(from_status(status)) == as_dict(full(errors.QueueFull))


def test_an_unknown_code_is_unknown() -> None:
    assert from_status(Status(code=99, message="odd")).code == "UNKNOWN"


@given(trailer=st.binary(max_size=300), code=st.sampled_from(sorted(Code.keys())))
def test_any_trailer_gives_an_error(trailer: bytes, code: str) -> None:
    error = from_trailer(code, "a sentence", trailer)
    assert (error.code, str(error)) == (code, "a sentence")


@given(data=st.data())
def test_any_damaged_trailer_gives_an_error(data: st.DataObject) -> None:
    whole = bytearray(to_status(full(data.draw(st.sampled_from(CLASSES)))).SerializeToString())
    for _ in range(data.draw(st.integers(1, 5))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    from_trailer("INTERNAL", "a sentence", bytes(whole))


@given(text=st.text(st.characters(exclude_categories=())))
def test_any_text_survives(text: str) -> None:
    """A lone surrogate, as in the name of a file that is not UTF-8, becomes a question mark."""
    error = errors.InvalidRequest(text, metadata={"path": text}, violations=[errors.Violation("stop", text)])
    assert as_dict(round_trip(error)) == as_dict(error)
