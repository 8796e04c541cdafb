"""A program that is interrupted again and again: `python -m client.interrupted TARGET COUNT SEED`.

COUNT interrupts for each operation. After each the next call must be answered; a hang ends the program with all stacks
and exit code 1.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import random
import signal
import sys
import threading
import time
from typing import Any

from support.time_limits import SOON_SECONDS

from lineclear.client import Client


def read_stream(client: Client) -> None:
    """The loop of the README."""
    with client.stream("endless") as stream:
        for _ in stream:
            pass


def read_through_the_session(client: Client) -> None:
    """The same while another answer is open, so that this one is a request of the Session."""
    with client.stream("silent"), client.stream("endless") as stream:
        for _ in stream:
            pass


def read_each(client: Client) -> None:
    for _ in client.iter_batch(["endless", "endless"], concurrency=2):
        pass


def read_attached(client: Client) -> None:
    with client.submit("endless").attach() as stream:
        for _ in stream:
            pass


def poll(client: Client) -> None:
    submitted = client.submit("one two")
    while True:
        submitted.poll()


OPERATIONS = (read_stream, read_through_the_session, read_each, read_attached, poll)


def press(pauses: queue.SimpleQueue[float]) -> None:
    while True:
        time.sleep(pauses.get())
        os.kill(os.getpid(), signal.SIGINT)


def press_again(lost: Any) -> None:
    """Press Ctrl-C again if a destructor swallowed the interrupt: Python prints it and continues."""
    sys.__unraisablehook__(lost)
    if lost.exc_type is KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT)


def main(target: str, count: int, seed: int) -> None:
    chance = random.Random(seed)
    pauses: queue.SimpleQueue[float] = queue.SimpleQueue()
    threading.Thread(target=press, args=(pauses,), daemon=True).start()
    sys.unraisablehook = press_again
    for operation in OPERATIONS:
        with Client(target) as client:
            for _ in range(count):
                faulthandler.dump_traceback_later(SOON_SECONDS, exit=True)
                try:
                    pauses.put(chance.random() * 0.01)
                    operation(client)
                except KeyboardInterrupt:
                    pass
                assert client.generate("one two", timeout_seconds=SOON_SECONDS / 2).text == "one two"
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
