"""What a session has to tell its server: orders that have not left, and how many of them go into one message.

Pure: the waiting is in `sessions`. A message costs both ends far more than an order, so those that have gathered while
one was on its way leave together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, TypeAlias

from lineclear.api_limits import MAX_GATHERED_BYTES, MAX_SESSION_ORDERS, REQUEST_BYTES_KEY, SESSION_ORDERS_KEY
from lineclear.v1 import inference_pb2 as pb

Command: TypeAlias = pb.SessionSubmit | pb.SessionCancel


class Outbox:
    """Orders in their order. Any thread may `put`; one at a time may `take`.

    As many wait here as the program's calls have given: each of them waits for its answer.
    """

    def __init__(self) -> None:
        self.most_orders = 1
        """That the server takes in one message, as far as it has said."""
        self._orders: deque[Command] = deque()

    def put(self, order: Command) -> None:
        """It goes with the next message that has room."""
        self._orders.append(order)

    def take(self) -> pb.SessionRequest | None:
        """The next message; None while there is nothing to tell."""
        if not self._orders:
            return None
        taken = [self._orders.popleft()]
        num_bytes = taken[0].ByteSize()
        while self._orders and len(taken) < self.most_orders:
            num_bytes += self._orders[0].ByteSize()
            if num_bytes > MAX_GATHERED_BYTES:
                break
            taken.append(self._orders.popleft())
        return _message(taken)


def _message(orders: list[Command]) -> pb.SessionRequest:
    if len(orders) == 1:  # as every server understands it
        (order,) = orders
        if isinstance(order, pb.SessionSubmit):
            return pb.SessionRequest(submit=order)
        return pb.SessionRequest(cancel=order)
    # A request is begun before it is ended, and its handle never used again: so the ends may come last.
    return pb.SessionRequest(
        submits=[order for order in orders if isinstance(order, pb.SessionSubmit)],
        cancels=[order for order in orders if isinstance(order, pb.SessionCancel)],
    )


def most_request_bytes(metadata: Iterable[Any] | None) -> int | None:
    """Return the largest request a server takes, by the initial metadata of its session; None where it does not say."""
    for key, value in metadata or ():
        if key == REQUEST_BYTES_KEY and str(value).isdecimal():
            return int(value)
    return None


def most_orders(metadata: Iterable[Any] | None) -> int:
    """How many orders a server takes in one message, by the initial metadata of its session."""
    for key, value in metadata or ():
        if key == SESSION_ORDERS_KEY and str(value).isdecimal():
            return min(max(1, int(value)), MAX_SESSION_ORDERS)
    return 1
