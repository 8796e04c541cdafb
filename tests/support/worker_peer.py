"""The bare sockets of a worker, for tests that play one: it says what the test wants, and only that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import zmq
from support.sockets import bare_context
from support.time_limits import PATIENCE_SECONDS

from lineclear.wire.codec import decode, encode
from lineclear.wire.messages import Heartbeat, Hello, Message

M = TypeVar("M", bound=Message)


def hello(epoch: int, *, instance: int = 0, pid: int | None = None) -> Hello:
    """Of the smallest worker, one process for each epoch unless said otherwise."""
    return Hello(epoch, 8, 4, 2, 32, 97, (0,), 64, pid=epoch if pid is None else pid, instance=instance or epoch)


class Peer:
    """One epoch of a worker."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, epoch: int) -> None:
        self._context, self._directory, self._epoch = context, directory, epoch
        self.connect_plans()
        self.results = context.socket(zmq.PUSH)
        self.results.connect(f"ipc://{directory}/result.sock")

    def connect_plans(self) -> None:
        """Connect the socket for plans, which a test may have closed before."""
        self.plans = self._context.socket(zmq.DEALER)
        self.plans.set(zmq.IDENTITY, self._epoch.to_bytes(8, "little"))
        self.plans.connect(f"ipc://{self._directory}/plan.sock")

    def say(self, *messages: Message) -> None:
        """Send to the scheduler."""
        for message in messages:
            self.results.send(encode(message))

    def poll(self, seconds: float = 0.0) -> Message | None:
        """The next message that is no probe, None if none arrives in time."""
        while self.plans.poll(seconds * 1000):
            message = decode(self.plans.recv())
            if not isinstance(message, Heartbeat):
                return message
        return None

    def hear(self, seconds: float = PATIENCE_SECONDS) -> Message:
        """The next message that is no probe."""
        message = self.poll(seconds)
        assert message is not None, f"nothing came in {seconds} s"
        return message

    def hear_a(self, kind: type[M]) -> M:
        """The next message of a kind; those before it are dropped."""
        while not isinstance(message := self.hear(), kind):
            pass
        return message

    def leave(self) -> None:
        """Close both connections."""
        self.plans.close()
        self.results.close()


@contextmanager
def peers(directory: Path) -> Iterator[Callable[[int], Peer]]:
    """What makes the peer of an epoch for the scheduler in `directory`; all are gone after the block."""
    context = bare_context()
    try:
        yield partial(Peer, context, directory)
    finally:
        context.destroy()
