"""Commands of other threads, and the wake-ups that they cost."""

from __future__ import annotations

import threading

from lineclear.scheduler.engine.engine_loop import CommandInbox


def test_burst_of_commands_wakes_the_engine_once() -> None:
    wakes: list[None] = []
    done: list[int] = []
    inbox = CommandInbox(1000, lambda: wakes.append(None))
    for burst in range(3):
        for number in range(32):
            inbox.submit((), lambda now, number=number: done.append(number))  # type: ignore[misc]
        assert len(wakes) == burst + 1
        inbox.run(0.0)
    assert done == 3 * list(range(32))


def test_no_command_is_left_behind() -> None:
    """Four threads add while the engine's thread runs and waits as `Engine` does."""
    awake, done, per_thread = threading.Event(), list[int](), 2000
    inbox = CommandInbox(1 << 20, awake.set)

    def add() -> None:
        for number in range(per_thread):
            inbox.add(lambda now, number=number: done.append(number))  # type: ignore[misc]

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(done) < 4 * per_thread:
        inbox.run(0.0)
        if not inbox and len(done) < 4 * per_thread:
            assert awake.wait(30.0), "a command is unread and no thread was woken"
            awake.clear()
    for thread in threads:
        thread.join()
