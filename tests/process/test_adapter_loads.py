"""Adapters on their way to workers whose socket has space for few messages."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.worker_peer import hello

from lineclear.errors import AdapterRefused
from lineclear.scheduler.core.limits import CoreLimits
from lineclear.scheduler.core.poison_detector import WorkerLoss
from lineclear.scheduler.core.scheduler import Scheduler
from lineclear.scheduler.engine.adapter_loads import AdapterLoads
from lineclear.scheduler.engine.worker_session import Joined, Lost
from lineclear.wire.messages import AdapterLoaded, LoadAdapter, UnloadAdapter

NUM_ADAPTERS, SPACE = 40, 8


class FewMessages:
    """A link that refuses a message to a worker with SPACE unanswered ones."""

    def __init__(self) -> None:
        self.unanswered: list[LoadAdapter] = []

    def send_control(self, message: LoadAdapter) -> bool:
        if len(self.unanswered) == SPACE:
            return False
        self.unanswered.append(message)
        return True


class Table:
    def __init__(self) -> None:
        self.adapters: dict[bytes, int] = {}

    def load_adapter(self, key: bytes, now: float) -> int:
        return self.adapters.setdefault(key, len(self.adapters) + 1)


def joined(*epochs: int) -> Any:
    """Return a registry of workers that have joined."""
    return SimpleNamespace(joined_epochs=frozenset(epochs))


def answer_all(loads: AdapterLoads, link: FewMessages) -> list[bytes]:
    """Answer each message in turn; return the keys."""
    keys = []
    while link.unanswered:
        message = link.unanswered.pop(0)
        keys.append(message.key)
        loads.answered(AdapterLoaded(message.epoch, message.index, message.key), 0.0)
    return keys


def test_a_worker_gets_every_adapter_before_its_first_plan() -> None:
    link = FewMessages()
    loads = AdapterLoads(cast("Any", Table()), cast("Any", link), joined(1), lambda key, problem: None)
    keys = [bytes([number]) for number in range(NUM_ADAPTERS)]
    loads.worker_joined(Joined(hello(1)), 0.0)
    futures: list[Future[None]] = [Future() for _ in keys]
    for key, done in zip(keys, futures, strict=True):
        loads.load(key, "folder", done, 0.0)
    assert answer_all(loads, link) == keys
    assert all(done.done() for done in futures)
    loads.worker_joined(Joined(hello(2)), 0.0)
    assert loads.joining == {2}
    assert answer_all(loads, link) == keys
    assert loads.joining == set()


def test_what_waits_for_a_lost_worker_is_not_sent() -> None:
    link = FewMessages()
    loads = AdapterLoads(cast("Any", Table()), cast("Any", link), joined(1), lambda key, problem: None)
    loads.worker_joined(Joined(hello(1)), 0.0)
    futures: list[Future[None]] = [Future() for _ in range(NUM_ADAPTERS)]
    for number, done in enumerate(futures):
        loads.load(bytes([number]), "folder", done, 0.0)
    loads.worker_lost(Lost(hello(1), "it left", WorkerLoss.CLEAN, False, False), 0.0)
    assert all(done.done() for done in futures)
    assert len(answer_all(loads, link)) < NUM_ADAPTERS


def test_adapter_that_a_worker_cannot_load_frees_its_place() -> None:
    core, link = Scheduler(CoreLimits(max_loras=1)), FewMessages()
    loads = AdapterLoads(core, cast("Any", link), joined(1), lambda key, problem: None)
    loads.worker_joined(Joined(hello(1)), 0.0)
    refused: Future[None] = Future()
    loads.load(b"first", "folder", refused, 0.0)
    message = link.unanswered.pop()
    loads.answered(AdapterLoaded(1, message.index, message.key, "rank 512 is too large"), 0.0)
    with pytest.raises(AdapterRefused, match="rank 512 is too large"):
        refused.result(0)
    assert core.adapters == {}
    other: Future[None] = Future()
    loads.load(b"second", "folder", other, 0.0)
    dropped, message = link.unanswered
    assert (dropped, message.index, message.key) == (UnloadAdapter(1, 1), 1, b"second")
    loads.answered(AdapterLoaded(1, message.index, message.key), 0.0)
    assert other.result(0) is None
