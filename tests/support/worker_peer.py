"""The raw sockets of a worker, for tests that send a worker's messages themselves."""

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
    """Return the Hello of a small worker; each epoch is a new process unless `instance` is given."""
    return Hello(epoch, 8, 4, 2, 32, 97, (0,), 64, pid=epoch if pid is None else pid, instance=instance or epoch)


class Peer:
    """One epoch of a worker."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, epoch: int) -> None:
        self._context, self._directory, self._epoch = context, directory, epoch
        self.connect_plans()
        self.results = context.socket(zmq.PUSH)
        self.results.connect(f"ipc://{directory}/result.sock")

    def connect_plans(self) -> None:
        """Connect the socket for plans, which a test may have closed."""
        self.plans = self._context.socket(zmq.DEALER)
        self.plans.set(zmq.IDENTITY, self._epoch.to_bytes(8, "little"))
        self.plans.connect(f"ipc://{self._directory}/plan.sock")

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.results.send(encode(message))

    def poll(self, seconds: float = 0.0) -> Message | None:
        """Return the next message except probes, None if none arrives in time."""
        while self.plans.poll(seconds * 1000):
            message = decode(self.plans.recv())
            if not isinstance(message, Heartbeat):
                return message
        return None

    def receive(self, seconds: float = PATIENCE_SECONDS) -> Message:
        """Return the next message except probes."""
        message = self.poll(seconds)
        assert message is not None, f"nothing arrived in {seconds} s"
        return message

    def receive_kind(self, kind: type[M]) -> M:
        """Return the next message of a kind and drop those before it."""
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def close(self) -> None:
        self.plans.close()
        self.results.close()


@contextmanager
def peers(directory: Path) -> Iterator[Callable[[int], Peer]]:
    """Yield a function that connects a peer of an epoch to the scheduler in `directory`; all close after the block."""
    context = bare_context()
    try:
        yield partial(Peer, context, directory)
    finally:
        context.destroy()
