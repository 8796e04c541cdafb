"""The commands of a Session, gathered into messages."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.time_limits import PATIENCE_SECONDS

from lineclear.api_limits import MAX_GATHERED_BYTES, MAX_SESSION_COMMANDS, REQUEST_BYTES_KEY
from lineclear.client._sync.session import Session
from lineclear.client.session_messages import Command, Outbox, max_request_bytes
from lineclear.errors import Cancelled, RequestTooLarge
from lineclear.v1 import inference_pb2 as pb


def submit(handle: int, num_bytes: int = 1) -> Command:
    return pb.SubmitCommand(handle=handle, request=pb.GenerateRequest(text="x" * num_bytes))


def outbox(*commands: Command) -> Outbox:
    found = Outbox()
    for command in commands:
        found.put(command)
    return found


def messages(found: Outbox) -> Iterator[pb.SessionRequest]:
    while (message := found.take()) is not None:
        yield message


def test_gathered_commands_share_a_message() -> None:
    (message,) = messages(outbox(submit(1), pb.CancelCommand(handle=1), submit(2)))
    assert [command.handle for command in message.submits] == [1, 2]
    assert [command.handle for command in message.cancels] == [1]


def test_a_message_has_at_most_32_commands() -> None:
    sent = list(messages(outbox(*map(submit, range(70)))))
    assert [len(message.submits) for message in sent] == [MAX_SESSION_COMMANDS, MAX_SESSION_COMMANDS, 6]
    assert [command.handle for message in sent for command in message.submits] == list(range(70))


def test_a_large_command_has_its_own_message() -> None:
    half = MAX_GATHERED_BYTES // 2
    sent = list(messages(outbox(submit(1), submit(2, 10 * half), submit(3, half - 100), submit(4, half - 100))))
    assert [[command.handle for command in message.submits] for message in sent] == [[1], [2], [3, 4]]


def test_messages_stay_below_the_limit_of_the_server() -> None:
    found = outbox(*(submit(handle, 100) for handle in range(4)))
    found.limit_bytes(500)
    assert [len(message.submits) for message in messages(found)] == [2, 2]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (None, None),
        ((), None),
        (((REQUEST_BYTES_KEY, "800"),), 800),
        ((("x", "9"), (REQUEST_BYTES_KEY, "many")), None),
        (((REQUEST_BYTES_KEY, b"8"),), None),
    ],
)
def test_max_request_bytes_from_headers(headers: Any, expected: int | None) -> None:
    assert max_request_bytes(headers) == expected


class FakeGrpcCall:
    """The call of a Session: the server has sent `headers`, and the stream ends when it is cancelled."""

    def __init__(self, headers: Any) -> None:
        self.has_sent_headers = threading.Event()
        self._headers = headers
        self._ended = queue.SimpleQueue[None]()

    def initial_metadata(self) -> Any:
        assert self.has_sent_headers.wait(PATIENCE_SECONDS)
        return self._headers

    def cancel(self) -> None:
        self._ended.put(None)

    def __iter__(self) -> Iterator[Any]:
        self._ended.get(timeout=PATIENCE_SECONDS)
        yield from ()


@pytest.fixture
def call() -> FakeGrpcCall:
    return FakeGrpcCall(((REQUEST_BYTES_KEY, "1000"),))


def open_session(call: FakeGrpcCall) -> tuple[Session, Iterator[pb.SessionRequest]]:
    """Return a session and the messages that gRPC would send."""

    def open_call(messages: Iterator[pb.SessionRequest]) -> FakeGrpcCall:
        opened.append(messages)
        return call

    opened: list[Iterator[pb.SessionRequest]] = []
    return Session("nowhere", open_call, lambda error: Cancelled(str(error))), opened[0]


def test_a_session_gathers_until_the_headers_arrive(call: FakeGrpcCall) -> None:
    session, sent = open_session(call)
    for _ in range(5):
        session.start(pb.GenerateRequest(text="x"), None, lambda: None)
    call.has_sent_headers.set()
    assert len(next(sent).submits) == 5
    session.close()
    assert list(sent) == []


def test_a_session_rejects_a_request_above_the_limit(call: FakeGrpcCall) -> None:
    """gRPC would end the stream with all its requests."""
    session, sent = open_session(call)
    call.has_sent_headers.set()
    session.start(pb.GenerateRequest(text="x"), None, lambda: None)
    assert next(sent).submits
    with pytest.raises(RequestTooLarge, match="has 20"):
        session.start(pb.GenerateRequest(text="x" * 2000), None, lambda: None)
    assert session.start(pb.GenerateRequest(text="x" * 600), None, lambda: "direct") == "direct"
    session.close()
