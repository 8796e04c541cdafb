"""Orders on their way to a session: how many leave together, and when each goes alone."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest
from support.time_limits import PATIENCE_SECONDS

from lineclear.api_limits import MAX_GATHERED_BYTES, REQUEST_BYTES_KEY
from lineclear.client.outbox import Command, Outbox
from lineclear.client.session import Session
from lineclear.errors import Cancelled
from lineclear.v1 import inference_pb2 as pb


def submit(handle: int, num_bytes: int = 1) -> Command:
    return pb.SubmitCommand(handle=handle, request=pb.GenerateRequest(text="x" * num_bytes))


def outbox(*commands: Command, max_request_bytes: int | None = None) -> Outbox:
    found = Outbox()
    found.share_messages(max_request_bytes)
    for command in commands:
        found.put(command)
    return found


def messages(found: Outbox) -> Iterator[pb.SessionRequest]:
    while (message := found.take()) is not None:
        yield message


def test_commands_are_sent_one_by_one_before_the_headers() -> None:
    found = Outbox()
    for command in (submit(1), submit(2), pb.CancelCommand(handle=1)):
        found.put(command)
    assert [(len(message.submits), len(message.cancels)) for message in messages(found)] == [(1, 0), (1, 0), (0, 1)]


def test_what_has_gathered_leaves_together_and_ends_come_after_beginnings() -> None:
    (message,) = messages(outbox(submit(1), pb.CancelCommand(handle=1), submit(2)))
    assert [order.handle for order in message.submits] == [1, 2]
    assert [order.handle for order in message.cancels] == [1]


def test_a_message_has_at_most_32_commands() -> None:
    sent = list(messages(outbox(*map(submit, range(70)))))
    assert [len(message.submits) for message in sent] == [32, 32, 6]
    assert [command.handle for message in sent for command in message.submits] == list(range(70))


def test_a_large_command_is_sent_alone() -> None:
    half = MAX_GATHERED_BYTES // 2
    sent = list(messages(outbox(submit(1), submit(2, 10 * half), submit(3, half - 100), submit(4, half - 100))))
    assert [[command.handle for command in message.submits] for message in sent] == [[1], [2], [3, 4]]


def test_messages_stay_below_half_of_the_servers_limit() -> None:
    sent = list(messages(outbox(*(submit(n, 1000) for n in range(8)), max_request_bytes=4500)))
    assert [len(message.submits) for message in sent] == [2, 2, 2, 2]


@pytest.mark.parametrize(("headers", "lengths"), [((), [5]), (((REQUEST_BYTES_KEY, "4096"),), [5])])
def test_a_session_shares_messages_after_the_headers(headers: Any, lengths: list[int]) -> None:
    """The one for threads; its gRPC call is played here."""

    class Played:
        """A call whose server has greeted, and whose stream ends when it is cancelled."""

        def __init__(self) -> None:
            self.asked = queue.SimpleQueue[None]()
            self.ended = queue.SimpleQueue[None]()

        def initial_metadata(self) -> Any:
            return headers

        def cancel(self) -> None:
            self.ended.put(None)

        def __iter__(self) -> Iterator[Any]:
            self.asked.put(None)
            self.ended.get(timeout=PATIENCE_SECONDS)
            yield from ()

    def open_call(messages: Iterator[pb.SessionRequest]) -> Played:
        orders.append(messages)
        return played

    orders: list[Iterator[pb.SessionRequest]] = []
    played = Played()
    session = Session("nowhere", open_call, lambda error: Cancelled(str(error)))
    played.asked.get(timeout=PATIENCE_SECONDS)  # from here on it knows what the server said
    for _ in range(5):
        session.begin(pb.GenerateRequest(text="x"), None, lambda left: None)
    sent = [next(orders[0]) for _ in lengths]
    assert [len(message.submits) for message in sent] == lengths
    session.close()
    assert list(orders[0]) == []
