"""Errors over the wire: every class comes back as itself, and other languages read it with google.rpc."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from google.rpc import status_pb2 as rpc
from hypothesis import given
from hypothesis import strategies as st

from lineclear.errors import (
    DOMAIN,
    InvalidRequest,
    LineclearError,
    QueueFull,
    UnknownStatus,
    Unreachable,
    Violation,
    tree,
)
from lineclear.grpc_status import CODE_NUMBERS, from_trailer, to_trailer

# The root is a name for all of them and Foreign is for other people's errors: neither is raised by us.
CLASSES = [kind for kind in tree() if kind not in (LineclearError, UnknownStatus)]


def _full(kind: type[LineclearError]) -> LineclearError:
    """An instance with everything an error can carry."""
    return kind(
        f"a sentence about {kind.__name__}",
        retry_after_seconds=1.25,
        metadata={"limit": "512", "waiting": "513"},
        violations=[Violation("sampling.top_p", "must be in (0, 1]"), Violation("stop.strings[0]", "is empty")],
    )


def _through_the_wire(error: LineclearError) -> LineclearError:
    return from_trailer(error.code, str(error), to_trailer(error))


def _as_dict(error: LineclearError) -> dict[str, object]:
    return {"type": type(error), "message": str(error), "code": error.code, "reason": error.reason, **vars(error)}


def test_there_are_errors() -> None:
    assert len(CLASSES) >= 20


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_survives(kind: type[LineclearError]) -> None:
    for error in (_full(kind), kind("only a sentence")):
        assert _as_dict(_through_the_wire(error)) == _as_dict(error)


def test_no_two_classes_share_a_reason() -> None:
    reasons = [kind.reason for kind in CLASSES]
    assert sorted(set(reasons)) == sorted(reasons)


@pytest.mark.parametrize("kind", [*CLASSES, LineclearError], ids=lambda kind: kind.__name__)
def test_codes_and_reasons_are_what_grpc_and_google_ask_for(kind: type[LineclearError]) -> None:
    assert kind.code in {code.name for code in grpc.StatusCode} - {"OK"}
    assert kind.reason.replace("_", "").isalnum()
    assert kind.reason == kind.reason.upper()
    assert len(kind.reason) <= 63
    assert kind.__doc__


def test_code_numbers_are_those_of_grpc() -> None:
    assert {code.name: code.value[0] for code in grpc.StatusCode} == CODE_NUMBERS


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_google_rpc_reads_the_same(kind: type[LineclearError]) -> None:
    error = _full(kind)
    status = rpc.Status.FromString(to_trailer(error))
    assert status.code == getattr(grpc.StatusCode, kind.code).value[0]
    assert status.message == str(error)
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    assert [d.Unpack(m) for d, m in zip(status.details, (info, bad, retry), strict=True)] == [True, True, True]
    assert (info.reason, info.domain, dict(info.metadata)) == (kind.reason, "lineclear", error.metadata)
    assert [(v.field, v.description) for v in bad.field_violations] == list(error.violations)
    assert retry.retry_delay.ToNanoseconds() == 1_250_000_000


def test_details_that_do_not_apply_are_absent() -> None:
    (only,) = rpc.Status.FromString(to_trailer(QueueFull("512 requests are waiting"))).details
    assert only.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_it_fits_into_the_metadata_of_grpc(kind: type[LineclearError]) -> None:
    """gRPC drops a call's trailers past 8 KiB, in base64, beside the rest of the metadata."""
    assert len(to_trailer(_full(kind))) < 4096


# --- statuses that no lineclear server wrote ------------------------------------------------------------------------


@pytest.mark.parametrize("trailer", [None, b"", b"\xff\xff\xff", b"not a message at all"])
def test_a_status_without_our_details_becomes_the_class_of_its_code(trailer: bytes | None) -> None:
    error = from_trailer("UNAVAILABLE", "failed to connect", trailer)
    assert type(error) is Unreachable
    assert str(error) == "failed to connect"


def test_a_code_that_no_class_has_becomes_foreign_and_keeps_its_name() -> None:
    error = from_trailer("PERMISSION_DENIED", "not for you", None)
    assert type(error) is UnknownStatus
    assert (error.code, error.reason) == ("PERMISSION_DENIED", "PERMISSION_DENIED")


def test_a_foreign_error_may_be_passed_on() -> None:
    error = from_trailer("PERMISSION_DENIED", "not for you", None)
    assert _as_dict(_through_the_wire(error)) == _as_dict(error)


def test_a_reason_of_another_domain_is_not_ours() -> None:
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="proxy.example", metadata={"a": "b"})
    status = rpc.Status(code=8, message="busy")
    status.details.add().Pack(info)
    error = from_trailer("RESOURCE_EXHAUSTED", "busy", status.SerializeToString())
    assert type(error) is UnknownStatus
    assert error.metadata == {}


def test_a_reason_of_ours_under_another_code_is_believed_by_the_code() -> None:
    error = from_trailer("INVALID_ARGUMENT", "odd", to_trailer(QueueFull("odd")))
    assert type(error) is InvalidRequest


def test_a_newer_servers_reason_becomes_the_class_of_its_code() -> None:
    status = rpc.Status(code=3, message="tool schema too deep")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="SCHEMA_TOO_DEEP", domain=DOMAIN))
    assert type(from_trailer("INVALID_ARGUMENT", "m", status.SerializeToString())) is InvalidRequest


@given(trailer=st.binary(max_size=300), code=st.sampled_from(sorted(CODE_NUMBERS)))
def test_any_trailer_gives_an_error(trailer: bytes, code: str) -> None:
    error = from_trailer(code, "a sentence", trailer)
    assert (error.code, str(error)) == (code, "a sentence")


@given(data=st.data())
def test_any_damaged_trailer_gives_an_error(data: st.DataObject) -> None:
    whole = bytearray(to_trailer(_full(data.draw(st.sampled_from(CLASSES)))))
    for _ in range(data.draw(st.integers(1, 5))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    from_trailer("INTERNAL", "a sentence", bytes(whole))


@given(text=st.text(st.characters(exclude_categories=())))
def test_any_sentence_travels(text: str) -> None:
    """Also one with a lone surrogate, as in the name of a file that is not UTF-8."""
    error = InvalidRequest(text, metadata={"path": text}, violations=[Violation("stop", text)])
    assert _as_dict(_through_the_wire(error)) == _as_dict(error)
