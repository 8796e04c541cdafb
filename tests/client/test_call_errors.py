"""The translation of gRPC errors, with the texts of gRPC."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from lineclear.client.call_errors import ErrorTranslator
from lineclear.client.rpc_methods import GET_STATS
from lineclear.client.target import DEFAULT_TARGET
from lineclear.errors import Cancelled, ConnectionLost, DataLoss, DeadlineExceeded, ServerDraining, Unreachable
from lineclear.status_codec import TRAILER, to_status

REFUSED = "connections to all backends failing; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote host"
ABSENT = "unix:/x: connect failed: addr: unix:/x error: No such file or directory"
NO_NAME = "errors resolving llm:50051: [field:hostname lookup error:Domain name not found]"
CUT = "Stream removed (Socket closed)"


class Status(grpc.RpcError):
    def __init__(self, code: str, details: str, **trailers: Any) -> None:
        self._code, self._details = grpc.StatusCode[code], details
        self._trailers = tuple((key.replace("_", "-"), value) for key, value in trailers.items())

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers


def failed(peer: ErrorTranslator, code: str, details: str, cancelled: bool = False, **trailers: Any) -> Any:
    return peer.failure(Status(code, details, **trailers), cancelled)


@pytest.mark.parametrize(
    ("details", "cause"),
    [
        (REFUSED, "ipv4:127.0.0.1:9: Failed to connect to remote host"),
        (f"connections to all backends failing; last error: {ABSENT}", ABSENT),
        (NO_NAME, NO_NAME),
    ],
)
def test_never_reached_server_is_unreachable(details: str, cause: str) -> None:
    peer = ErrorTranslator("127.0.0.1:9")
    for _ in range(2):
        error = failed(peer, "UNAVAILABLE", details)
        assert (type(error), str(error)) == (Unreachable, f"no answer from 127.0.0.1:9: {cause}")


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("UNAVAILABLE", CUT),
        ("UNAVAILABLE", "GOAWAY received"),
        ("UNAVAILABLE", "words that a later gRPC may find"),
        ("INTERNAL", "Received RST_STREAM with error code 2"),
        ("UNKNOWN", "Stream removed"),
        ("CANCELLED", "CANCELLED"),
    ],
)
def test_cut_connection_is_connection_lost(code: str, details: str) -> None:
    peer = ErrorTranslator("127.0.0.1:9")
    assert type(failed(peer, code, details)) is ConnectionLost
    assert type(failed(peer, "UNAVAILABLE", REFUSED)) is ConnectionLost


def test_unreachable_after_an_answer_is_connection_lost() -> None:
    peer = ErrorTranslator("127.0.0.1:9")
    peer.decoded(GET_STATS, b"")
    assert type(failed(peer, "UNAVAILABLE", REFUSED)) is ConnectionLost


def test_refusal_counts_as_reachable() -> None:
    peer, draining = ErrorTranslator("127.0.0.1:9"), ServerDraining("leaving", retry_after_seconds=1.0)
    status = Status("UNAVAILABLE", str(draining), **{TRAILER: to_status(draining).SerializeToString()})
    found = peer.failure(status, False)
    assert (type(found), found.retry_after_seconds) == (ServerDraining, 1.0)
    assert type(failed(peer, "UNAVAILABLE", REFUSED)) is ConnectionLost


def test_own_cancellation_is_cancelled() -> None:
    peer = ErrorTranslator("127.0.0.1:9")
    assert type(failed(peer, "CANCELLED", "x", cancelled=True)) is Cancelled
    assert type(failed(peer, "DEADLINE_EXCEEDED", "x")) is DeadlineExceeded
    assert not peer.was_reachable
    peer.closed = True
    assert type(failed(peer, "CANCELLED", "x")) is Cancelled


@pytest.mark.parametrize(("word", "seconds"), [("1500", 1.5), ("0", 0.0), ("-1", math.inf), ("soon", math.inf)])
def test_grpc_retry_pushback_sets_the_pause(word: str, seconds: float) -> None:
    found = failed(ErrorTranslator("127.0.0.1:9"), "RESOURCE_EXHAUSTED", "busy", grpc_retry_pushback_ms=word)
    assert found.retry_after_seconds == seconds


def test_undecodable_response_is_data_loss() -> None:
    with pytest.raises(DataLoss):
        ErrorTranslator("127.0.0.1:9").decoded(GET_STATS, b"\xff")


@pytest.mark.parametrize(
    ("target", "variable", "says"), [(DEFAULT_TARGET, "", True), (DEFAULT_TARGET, "x:1", False), ("x:1", "", False)]
)
def test_default_address_says_that_no_other_is_named(
    monkeypatch: pytest.MonkeyPatch, target: str, variable: str, says: bool
) -> None:
    monkeypatch.setenv("LINECLEAR_TARGET", variable)
    error = failed(ErrorTranslator(target), "UNAVAILABLE", REFUSED)
    assert ("LINECLEAR_TARGET is not set" in str(error)) is says
