"""Orders on their way to a session: how many leave together, and when each goes alone."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest
from support.time_limits import PATIENCE_SECONDS

from lineclear.api_limits import MAX_GATHERED_BYTES, MAX_SESSION_ORDERS, SESSION_ORDERS_KEY
from lineclear.client.outbox import Command, Outbox, most_orders
from lineclear.client.session import Session
from lineclear.errors import Cancelled
from lineclear.v1 import inference_pb2 as pb


def submit(handle: int, num_bytes: int = 1) -> Command:
    return pb.SessionSubmit(handle=handle, request=pb.GenerateRequest(text="x" * num_bytes))


def outbox(*orders: Command, most: int = MAX_SESSION_ORDERS) -> Outbox:
    found = Outbox()
    found.most_orders = most
    for order in orders:
        found.put(order)
    return found


def messages(found: Outbox) -> Iterator[pb.SessionRequest]:
    while (message := found.take()) is not None:
        yield message


def test_a_server_that_has_not_said_that_it_takes_more_gets_one_at_a_time() -> None:
    sent = list(messages(outbox(submit(1), submit(2), pb.SessionCancel(handle=1), most=1)))
    assert [message.WhichOneof("order") for message in sent] == ["submit", "submit", "cancel"]
    assert not any(message.submits or message.cancels for message in sent)


def test_what_has_gathered_leaves_together_and_ends_come_after_beginnings() -> None:
    (message,) = messages(outbox(submit(1), pb.SessionCancel(handle=1), submit(2)))
    assert [order.handle for order in message.submits] == [1, 2]
    assert [order.handle for order in message.cancels] == [1]


def test_one_alone_goes_as_every_server_understands_it() -> None:
    (message,) = messages(outbox(submit(1)))
    assert message == pb.SessionRequest(submit=pb.SessionSubmit(handle=1, request=pb.GenerateRequest(text="x")))


def test_no_more_than_the_server_takes() -> None:
    sent = list(messages(outbox(*map(submit, range(10)), most=4)))
    assert [len(message.submits) for message in sent] == [4, 4, 2]
    assert [order.handle for message in sent for order in message.submits] == list(range(10))


def test_a_large_one_goes_alone_and_those_around_it_together() -> None:
    half = MAX_GATHERED_BYTES // 2
    sent = list(messages(outbox(submit(1), submit(2, 10 * half), submit(3, half - 100), submit(4, half - 100))))
    assert [message.WhichOneof("order") for message in sent] == ["submit", "submit", None]
    assert [order.handle for order in sent[2].submits] == [3, 4]


@pytest.mark.parametrize(
    ("metadata", "most"),
    [
        (None, 1),
        ((), 1),
        (((SESSION_ORDERS_KEY, "8"),), 8),
        ((("x", "9"), (SESSION_ORDERS_KEY, "9999")), MAX_SESSION_ORDERS),
        (((SESSION_ORDERS_KEY, "0"),), 1),
        (((SESSION_ORDERS_KEY, "many"),), 1),
        (((SESSION_ORDERS_KEY, b"8"),), 1),
    ],
)
def test_how_many_a_server_takes(metadata: Any, most: int) -> None:
    assert most_orders(metadata) == most


@pytest.mark.parametrize(("told", "lengths"), [(((SESSION_ORDERS_KEY, "64"),), [5]), ((), [1] * 5)])
def test_a_session_gathers_where_its_server_takes_many(told: Any, lengths: list[int]) -> None:
    """The one for threads; its gRPC call is played here."""

    class Played:
        """A call whose server has greeted, and whose stream ends when it is cancelled."""

        def __init__(self) -> None:
            self.asked = queue.SimpleQueue[None]()
            self.ended = queue.SimpleQueue[None]()

        def initial_metadata(self) -> Any:
            return told

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
    assert [len(message.submits) or 1 for message in sent] == lengths
    session.close()
    assert list(orders[0]) == []
